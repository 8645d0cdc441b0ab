// Requests on the wire: what a forward may be, and every way in which it can be wrong.
#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include "proto/moe/v1/moe.pb.h"
#include "server/wire.h"
#include "tests/server/wire_requests.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: requests and their parts
using Catch::Matchers::Contains;

}  // namespace

TEST_CASE("A request with ids becomes a call that views it") {
  const v1::ForwardRequest request = Good();
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK(checked->model == "tiny");
  CHECK(checked->call.layer == 1);
  CHECK(checked->call.hidden.data == request.hidden().data().data());
  CHECK(checked->call.hidden.rows == kRows);
  CHECK(checked->call.hidden.cols == kHidden);
  CHECK(checked->call.hidden.dtype == DType::kBf16);
  CHECK(checked->output_dtype == DType::kBf16);
  CHECK(checked->output_bytes() == kRows * kHidden * 2);
  const RoutingByIds* routing = std::get_if<RoutingByIds>(&checked->call.routing);
  REQUIRE(routing != nullptr);
  CHECK(routing->top_k == kSlots);
  CHECK(routing->ids.size() == kRows * kSlots);
  CHECK(routing->weights.size() == kRows * kSlots);
}

TEST_CASE("Logits, or nothing, select the other ways of routing") {
  v1::ForwardRequest request = Good();
  SetTensor(v1::DTYPE_F32, kRows, kExperts, kRows * kExperts * 4, request.mutable_router_logits());
  request.set_output_dtype(v1::DTYPE_F32);
  request.set_routed_only(true);
  const absl::StatusOr<CheckedForward> by_logits = CheckForward(request, OneModel());
  REQUIRE(by_logits.ok());
  REQUIRE(std::holds_alternative<RoutingByLogits>(by_logits->call.routing));
  CHECK(std::get<RoutingByLogits>(by_logits->call.routing).logits.size() == kRows * kExperts);
  CHECK(by_logits->output_dtype == DType::kF32);
  CHECK(by_logits->call.routed_only);
  request.clear_router_logits();
  const absl::StatusOr<CheckedForward> by_gate = CheckForward(request, OneModel());
  REQUIRE(by_gate.ok());
  CHECK(std::holds_alternative<RoutingByGate>(by_gate->call.routing));
}

TEST_CASE("Zero rows are a valid request (B38)") {
  v1::ForwardRequest request = Good();
  SetTensor(v1::DTYPE_F32, 0, kHidden, 0, request.mutable_hidden());
  SetTensor(v1::DTYPE_I32, 0, kSlots, 0, request.mutable_top_k()->mutable_ids());
  SetTensor(v1::DTYPE_F32, 0, kSlots, 0, request.mutable_top_k()->mutable_weights());
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK(checked->call.hidden.rows == 0);
  CHECK(checked->output_bytes() == 0);
}

TEST_CASE("A hidden tensor whose shape and bytes disagree is refused with both (B62)") {
  const auto hidden = [](int64_t rows, int64_t cols, size_t bytes) {
    return [=](v1::ForwardRequest* request) { SetTensor(v1::DTYPE_BF16, rows, cols, bytes, request->mutable_hidden()); };
  };
  const size_t right = kRows * kHidden * 2;
  CheckInvalid(hidden(-1, kHidden, right), {"hidden", "[-1, 8]"});
  CheckInvalid(hidden(kRows, -8, right), {"hidden", "[3, -8]"});
  CheckInvalid(hidden(int64_t{1} << 40, kHidden, 16), {"hidden", "17592186044416 bytes", "got 16 bytes"});
  CheckInvalid(hidden(int64_t{1} << 62, kHidden, 16), {"hidden", "64 bits", "16 bytes"});
  CheckInvalid(hidden(std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max(), 2), {"64 bits"});
  CheckInvalid(hidden(std::numeric_limits<int64_t>::min(), 1, 2), {"negative"});
  CheckInvalid(hidden(kRows, kHidden, right - 1), {"wanted 48 bytes", "got 47 bytes"});
  CheckInvalid(hidden(kRows, kHidden, right + 1), {"wanted 48 bytes", "got 49 bytes"});
  CheckInvalid(hidden(kRows, kHidden + 1, kRows * (kHidden + 1) * 2), {"[M, 8]", "[3, 9]"});
  CheckInvalid(hidden(0, 0, 0), {"[M, 8]", "[0, 0]"});
}

TEST_CASE("A hidden tensor that is missing, of another rank or of another type is refused") {
  CheckInvalid([](v1::ForwardRequest* r) { r->clear_hidden(); }, {"hidden", "got none"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_hidden()->add_shape(1); }, {"2 dimensions", "got 3: [3, 8, 1]"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_hidden()->clear_shape(); }, {"2 dimensions", "got 0: []"});
  CheckInvalid([](v1::ForwardRequest* r) { for (int i = 0; i < 1000; ++i) r->mutable_hidden()->add_shape(1); }, {"1002", "..."});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_hidden()->set_dtype(v1::DTYPE_UNSPECIFIED); }, {"DTYPE_UNSPECIFIED"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_hidden()->set_dtype(v1::DTYPE_I32); }, {"DTYPE_I32"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_hidden()->set_dtype(static_cast<v1::DType>(77)); }, {"unknown dtype 77"});
}

TEST_CASE("An output type that no answer can have is refused") {
  CheckInvalid([](v1::ForwardRequest* r) { r->set_output_dtype(v1::DTYPE_I32); }, {"output_dtype", "DTYPE_I32"});
  CheckInvalid([](v1::ForwardRequest* r) { r->set_output_dtype(static_cast<v1::DType>(-5)); }, {"output_dtype", "dtype -5"});
}

TEST_CASE("An unknown model or layer is NOT_FOUND and the valid ones are listed") {
  const absl::Status layer = ErrorOf([](v1::ForwardRequest* r) { r->set_layer(4); });
  CHECK(absl::IsNotFound(layer));
  CHECK_THAT(std::string(layer.message()), Contains("1-3, 7") && Contains("got 4"));
  const absl::Status model = ErrorOf([](v1::ForwardRequest* r) { r->set_model("huge"); });
  CHECK(absl::IsNotFound(model));
  CHECK_THAT(std::string(model.message()), Contains("tiny") && Contains("'huge'"));
  CHECK(ErrorOf([](v1::ForwardRequest* r) { r->set_model("tiny"); }).ok());
  CHECK(absl::IsNotFound(ErrorOf([](v1::ForwardRequest* r) { r->Clear(); })));
}

TEST_CASE("With two models the name is needed") {
  ModelStatus one, two;
  one.name = "one";
  two.name = "two";
  const ModelTable table({one, two});
  CHECK(absl::IsInvalidArgument(table.Find("").status()));
  CHECK(absl::IsNotFound(table.Find("three").status()));
  CHECK_THAT(std::string(table.Find("").status().message()), Contains("one, two"));
  REQUIRE(table.Find("two").ok());
  CHECK((*table.Find("two"))->name == "two");
}

TEST_CASE("Ids and weights must have one shape, the rows of hidden, and 1 to E slots") {
  const auto top_k = [](int64_t id_rows, int64_t id_cols, int64_t weight_rows, int64_t weight_cols) {
    return [=](v1::ForwardRequest* r) {
      SetTensor(v1::DTYPE_I32, id_rows, id_cols, id_rows * id_cols * 4, r->mutable_top_k()->mutable_ids());
      SetTensor(v1::DTYPE_F32, weight_rows, weight_cols, weight_rows * weight_cols * 4, r->mutable_top_k()->mutable_weights());
    };
  };
  CheckInvalid(top_k(kRows, 2, kRows, 3), {"one shape", "ids [3, 2] and weights [3, 3]"});
  CheckInvalid(top_k(kRows, 2, kRows + 1, 2), {"one shape"});
  CheckInvalid(top_k(2, 2, 2, 2), {"3 rows", "[2, 2]"});
  CheckInvalid(top_k(kRows, 0, kRows, 0), {"1 to 4 slots", "[3, 0]"});
  CheckInvalid(top_k(kRows, kExperts + 1, kRows, kExperts + 1), {"1 to 4 slots", "[3, 5]"});
  CHECK(ErrorOf(top_k(kRows, kExperts, kRows, kExperts)).ok());
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->clear_ids(); }, {"top_k.ids", "none"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->clear_weights(); }, {"top_k.weights", "none"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->mutable_ids()->set_dtype(v1::DTYPE_F32); }, {"top_k.ids", "DTYPE_I32"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->mutable_weights()->set_dtype(v1::DTYPE_BF16); },
               {"top_k.weights", "DTYPE_F32", "DTYPE_BF16"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->mutable_ids()->mutable_data()->pop_back(); }, {"24 bytes", "23 bytes"});
}

TEST_CASE("Logits must be [M, E] f32") {
  const auto logits = [](v1::DType dtype, int64_t rows, int64_t cols, size_t bytes) {
    return [=](v1::ForwardRequest* r) { SetTensor(dtype, rows, cols, bytes, r->mutable_router_logits()); };
  };
  CheckInvalid(logits(v1::DTYPE_F32, kRows, 5, 60), {"router_logits", "[3, 4]", "[3, 5]"});
  CheckInvalid(logits(v1::DTYPE_F32, 2, kExperts, 32), {"router_logits", "[3, 4]", "[2, 4]"});
  CheckInvalid(logits(v1::DTYPE_BF16, kRows, kExperts, 24), {"router_logits", "DTYPE_F32", "DTYPE_BF16"});
  CheckInvalid(logits(v1::DTYPE_F32, kRows, kExperts, 47), {"router_logits", "48 bytes", "47 bytes"});
}

TEST_CASE("An id out of range is refused with row, slot, value and E") {
  const auto with_id = [](int32_t id) {
    return [id](v1::ForwardRequest* r) {
      std::memcpy(r->mutable_top_k()->mutable_ids()->mutable_data()->data() + 5 * 4, &id, 4);
    };
  };
  for (const int32_t id : {-1, 0, kExperts - 1}) CHECK(ErrorOf(with_id(id)).ok());
  for (const int32_t id : {-2, kExperts, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    CheckInvalid(with_id(id), {"ids: row 2, slot 1 is " + std::to_string(id), "want -1 to 3", "E = 4"});
  }
}

TEST_CASE("NaN and +Inf among the logits are refused with row and expert, -Inf is not") {
  const auto with_logit = [](float value) {
    return [value](v1::ForwardRequest* r) {
      SetTensor(v1::DTYPE_F32, kRows, kExperts, kRows * kExperts * 4, r->mutable_router_logits());
      std::memcpy(r->mutable_router_logits()->mutable_data()->data() + 7 * 4, &value, 4);
    };
  };
  const float inf = std::numeric_limits<float>::infinity();
  for (const float value : {-inf, std::numeric_limits<float>::max()}) CHECK(ErrorOf(with_logit(value)).ok());
  for (const float value : {inf, std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
    CheckInvalid(with_logit(value), {"router_logits: row 1, expert 3"});
  }
}

TEST_CASE("Hidden states of one byte an element need a scale for each row, and become bf16") {
  const auto packed = [](v1::ForwardRequest* r) {
    SetTensor(v1::DTYPE_F8E4M3, kRows, kHidden, kRows * kHidden, r->mutable_hidden());
    r->mutable_hidden()->set_scales(std::string(kRows * 4, '\x3f'));
  };
  for (const v1::DType dtype : {v1::DTYPE_F8E4M3, v1::DTYPE_I8}) {
    v1::ForwardRequest request = Good();
    packed(&request);
    request.mutable_hidden()->set_dtype(dtype);
    const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
    REQUIRE(checked.ok());
    REQUIRE(checked->packed);
    CHECK(checked->packed->code == (dtype == v1::DTYPE_I8 ? PayloadCode::kI8 : PayloadCode::kF8E4m3));
    CHECK(checked->packed->codes == request.hidden().data().data());
    CHECK(checked->packed->scales.size() == kRows * 4);
    CHECK((checked->call.hidden.dtype == DType::kBf16 && checked->call.hidden.data == nullptr));
    CHECK(checked->output_dtype == DType::kBf16);
    CHECK(checked->hidden_bytes() == kRows * kHidden);
  }
  const auto with = [&](const std::function<void(v1::Tensor*)>& change) {
    return [&packed, change](v1::ForwardRequest* r) { packed(r), change(r->mutable_hidden()); };
  };
  CheckInvalid(with([](v1::Tensor* t) { t->clear_scales(); }), {"hidden.scales", "3 rows", "0 bytes"});
  CheckInvalid(with([](v1::Tensor* t) { t->set_scales(std::string(kRows * 4 + 1, 'x')); }), {"hidden.scales", "13 bytes"});
  CheckInvalid(with([](v1::Tensor* t) { t->set_data(std::string(kRows * kHidden * 2, 'x')); }), {"24 bytes", "48 bytes"});
  CheckInvalid(with([](v1::Tensor* t) { t->set_dtype(v1::DTYPE_BF16), t->set_data(std::string(kRows * kHidden * 2, 'x')); }), {"scales"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->mutable_ids()->set_scales("abcd"); }, {"top_k.ids", "scales"});
  CheckInvalid([](v1::ForwardRequest* r) { r->set_output_dtype(v1::DTYPE_I8); }, {"output_dtype"});
  CheckInvalid([&](v1::ForwardRequest* r) {
    packed(r), r->mutable_hidden()->clear_data();
    r->mutable_hidden()->mutable_device_memory()->set_cuda_ipc_handle(std::string(64, 'h'));
  }, {"device_memory"});
}

TEST_CASE("A request per slot is that of as many rows with one slot each") {
  v1::ForwardRequest request = Good();
  request.set_per_slot(true);
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK((checked->rows_each == kSlots && checked->must_be_made()));
  CHECK((checked->call.hidden.rows == kRows * kSlots && checked->call.hidden.data == nullptr));
  CHECK(checked->rows_data == request.hidden().data().data());
  CHECK(checked->hidden_bytes() == kRows * kHidden * 2);
  CHECK(checked->output_bytes() == kRows * kSlots * kHidden * 2);
  CHECK(checked->call.routed_only);
  const RoutingByIds* ids = std::get_if<RoutingByIds>(&checked->call.routing);
  REQUIRE(ids != nullptr);
  CHECK((ids->top_k == 1 && ids->ids.size() == kRows * kSlots));
  CheckInvalid([](v1::ForwardRequest* r) { r->set_per_slot(true), r->clear_top_k(); }, {"per_slot", "top_k"});
  CheckInvalid([](v1::ForwardRequest* r) {
    r->set_per_slot(true);
    r->mutable_output_memory()->set_cuda_ipc_handle(std::string(64, 'h'));
  }, {"per_slot", "device_memory"});
}

TEST_CASE("A request id above 128 bytes is refused") {
  CHECK(ErrorOf([](v1::ForwardRequest* r) { r->set_request_id(std::string(128, 'x')); }).ok());
  CheckInvalid([](v1::ForwardRequest* r) { r->set_request_id(std::string(129, 'x')); }, {"request_id", "128", "129"});
}

TEST_CASE("An unknown field is refused at every depth (B57)") {
  const std::string field_15 = {'\x7a', '\x01', 'a'};  // field 15, one byte long
  CheckInvalid([&](v1::ForwardRequest* r) { REQUIRE(r->MergeFromString(field_15)); }, {"ForwardRequest", "field 15"});
  CheckInvalid([&](v1::ForwardRequest* r) { REQUIRE(r->mutable_hidden()->MergeFromString(field_15)); }, {"Tensor", "field 15"});
  CheckInvalid([&](v1::ForwardRequest* r) { REQUIRE(r->mutable_top_k()->mutable_ids()->MergeFromString(field_15)); },
               {"Tensor", "field 15"});
  using Change = std::function<google::protobuf::Message*(v1::ForwardRequest*)>;
  const std::pair<Change, std::string> places[] = {
      {[](v1::ForwardRequest* r) { return r->mutable_top_k(); }, "TopK"},
      {[](v1::ForwardRequest* r) { return r->mutable_top_k()->mutable_weights(); }, "Tensor"},
      {[](v1::ForwardRequest* r) { return r->mutable_top_k()->mutable_weights()->mutable_device_memory(); }, "DeviceMemory"},
      {[](v1::ForwardRequest* r) { return r->mutable_top_k()->mutable_ids()->mutable_device_memory(); }, "DeviceMemory"},
      {[](v1::ForwardRequest* r) { return r->mutable_hidden()->mutable_device_memory(); }, "DeviceMemory"},
      {[](v1::ForwardRequest* r) { return r->mutable_router_logits(); }, "Tensor"},
      {[](v1::ForwardRequest* r) { return r->mutable_router_logits()->mutable_device_memory(); }, "DeviceMemory"},
      {[](v1::ForwardRequest* r) { return r->mutable_output_memory(); }, "DeviceMemory"}};
  for (const auto& [place, name] : places) {
    CheckInvalid([&, place = place](v1::ForwardRequest* r) { REQUIRE(place(r)->MergeFromString(field_15)); },
                 {name + ": wanted fields of moe.v1", "field 15"});
  }
  // `layer` sent as bytes: another type than the contract's.
  CheckInvalid([](v1::ForwardRequest* r) { REQUIRE(r->MergeFromString(std::string("\x12\x01x"))); }, {"field 2"});
}

TEST_CASE("Random bytes are refused or parse into a request that is refused (B62)") {
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string bytes(1024, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    v1::ForwardRequest request;
    if (!request.ParseFromString(bytes) || !CheckForward(request, OneModel()).ok()) ++refused;
  }
  CHECK(refused == 1000);
}

}  // namespace moed
