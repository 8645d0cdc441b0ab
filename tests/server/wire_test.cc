// Wire conversion: what a forward request may be, every way in which it can be wrong, and the bytes of the answer.
#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "proto/moe/v1/moe.pb.h"
#include "proto/ring/layout.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;

constexpr int kHidden = 8;
constexpr int kExperts = 4;
constexpr int kRows = 3;
constexpr int kSlots = 2;

ModelTable OneModel() {
  ModelStatus model;
  model.name = "tiny";
  model.hidden = kHidden;
  model.num_experts = kExperts;
  model.top_k = kSlots;
  for (const int layer : {1, 2, 3, 7}) {
    LayerStatus status;
    status.layer = layer;
    model.layers.push_back(status);
  }
  return ModelTable({model});
}

void SetTensor(v1::DType dtype, int64_t rows, int64_t cols, size_t bytes, v1::Tensor* tensor) {
  tensor->Clear();
  tensor->set_dtype(dtype);
  tensor->add_shape(rows);
  tensor->add_shape(cols);
  tensor->set_data(std::string(bytes, '\0'));
}

// A correct request with ids.
v1::ForwardRequest Good() {
  v1::ForwardRequest request;
  request.set_layer(1);
  SetTensor(v1::DTYPE_BF16, kRows, kHidden, kRows * kHidden * 2, request.mutable_hidden());
  SetTensor(v1::DTYPE_I32, kRows, kSlots, kRows * kSlots * 4, request.mutable_top_k()->mutable_ids());
  SetTensor(v1::DTYPE_F32, kRows, kSlots, kRows * kSlots * 4, request.mutable_top_k()->mutable_weights());
  return request;
}

// The error of Good() after `change`.
absl::Status ErrorOf(const std::function<void(v1::ForwardRequest*)>& change) {
  v1::ForwardRequest request = Good();
  change(&request);
  return CheckForward(request, OneModel()).status();
}

void CheckInvalid(const std::function<void(v1::ForwardRequest*)>& change, const std::vector<std::string>& parts) {
  const absl::Status status = ErrorOf(change);
  INFO(status.ToString());
  CHECK(absl::IsInvalidArgument(status));
  for (const std::string& part : parts) CHECK_THAT(std::string(status.message()), Contains(part));
}

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

TEST_CASE("Hidden states and output may be places in device memory, which are checked before anything is opened") {
  const auto in_device = [](v1::ForwardRequest* r) {
    r->mutable_hidden()->clear_data();
    r->mutable_hidden()->mutable_device_memory()->set_cuda_ipc_handle(std::string(64, 'h'));
    r->mutable_hidden()->mutable_device_memory()->set_offset(32);
    r->mutable_output_memory()->set_cuda_ipc_handle(std::string(64, 'h'));
    r->mutable_output_memory()->set_offset(32 + kRows * kHidden * 2);
  };
  v1::ForwardRequest request = Good();
  in_device(&request);
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK(checked->call.hidden.place == Place::kDevice);
  CHECK(checked->call.hidden.rows == kRows);
  REQUIRE((checked->hidden_memory && checked->output_memory));
  CHECK(checked->hidden_memory->offset == 32);
  CHECK(checked->hidden_memory->handle[63] == std::byte{'h'});
  CHECK(checked->output_memory->offset == 32 + kRows * kHidden * 2);

  using Change = std::function<void(v1::DeviceMemory*)>;
  const auto with = [&](const Change& change) {
    return [&in_device, change](v1::ForwardRequest* r) { in_device(r), change(r->mutable_hidden()->mutable_device_memory()); };
  };
  for (size_t bytes : {0, 63, 65}) {
    CheckInvalid(with([&](v1::DeviceMemory* m) { m->set_cuda_ipc_handle(std::string(bytes, 'h')); }),
                 {"hidden.device_memory.cuda_ipc_handle: wanted 64 bytes, got " + std::to_string(bytes)});
  }
  CheckInvalid(with([](v1::DeviceMemory* m) { m->set_offset(8); }), {"hidden.device_memory.offset", "multiple of 16, got 8"});
  CheckInvalid(with([](v1::DeviceMemory* m) { m->set_offset(48); }), {"output_memory: wanted no byte of hidden"});
  CheckInvalid([&](v1::ForwardRequest* r) { in_device(r), r->mutable_hidden()->set_data("x"); },
               {"wanted one of data, device_memory and session_memory, got several"});
  CheckInvalid([&](v1::ForwardRequest* r) { in_device(r), r->mutable_hidden()->set_shape(0, int64_t{1} << 59); }, {"64 bits"});
  CheckInvalid([&](v1::ForwardRequest* r) { in_device(r), r->mutable_hidden()->set_shape(0, int64_t{1} << 38); }, {"at most"});
  CheckInvalid([&](v1::ForwardRequest* r) { in_device(r), r->mutable_output_memory()->set_offset(1); }, {"output_memory.offset"});
  CheckInvalid([](v1::ForwardRequest* r) { r->mutable_top_k()->mutable_ids()->mutable_device_memory(); },
               {"top_k.ids: wanted data, got device_memory"});
}

TEST_CASE("Hidden states and output may be places in a session, which must not overlap there") {
  const auto in_session = [](v1::ForwardRequest* r) {
    r->mutable_hidden()->clear_data();
    r->mutable_hidden()->mutable_session_memory()->set_key(std::string(16, 'k'));
    r->mutable_hidden()->mutable_session_memory()->set_offset(64);
    r->mutable_output_session_memory()->set_key(std::string(16, 'k'));
    r->mutable_output_session_memory()->set_offset(128);
  };
  v1::ForwardRequest request = Good();
  in_session(&request);
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK(checked->call.hidden.place == Place::kHost);
  CHECK(checked->call.hidden.data == nullptr);
  CHECK_FALSE(checked->output_in_answer());
  REQUIRE((checked->hidden_session && checked->output_session));
  CHECK(checked->hidden_session->offset == 64);
  CHECK(checked->hidden_session->key[15] == 'k');
  CHECK(checked->output_session->offset == 128);

  const auto with = [&](const std::function<void(v1::ForwardRequest*)>& change) {
    return [&in_session, change](v1::ForwardRequest* r) { in_session(r), change(r); };
  };
  for (size_t bytes : {0, 15, 17}) {
    CheckInvalid(with([=](auto* r) { r->mutable_hidden()->mutable_session_memory()->set_key(std::string(bytes, 'k')); }),
                 {"hidden.session_memory.key: wanted 16 bytes, got " + std::to_string(bytes)});
  }
  for (uint64_t offset : {64, 65, 64 + kRows * kHidden * 2 - 1, 64 - kRows * kHidden * 2 + 1}) {
    CheckInvalid(with([=](auto* r) { r->mutable_output_session_memory()->set_offset(offset); }),
                 {"output_session_memory: wanted no byte of hidden"});
  }
  v1::ForwardRequest apart = request;
  apart.mutable_output_session_memory()->set_offset(64);
  apart.mutable_output_session_memory()->set_key(std::string(16, 'x'));  // another session's
  CHECK(CheckForward(apart, OneModel()).ok());
  CheckInvalid(with([](auto* r) { r->mutable_hidden()->set_data("x"); }), {"got several"});
  CheckInvalid(with([](auto* r) { r->mutable_hidden()->mutable_device_memory(); }), {"got several"});
  CheckInvalid(with([](auto* r) { r->mutable_output_memory(); }), {"at most one place for the output"});
  CheckInvalid(with([](auto* r) { r->mutable_hidden()->set_shape(0, int64_t{1} << 59); }), {"64 bits"});
  CheckInvalid([](auto* r) { r->mutable_top_k()->mutable_weights()->mutable_session_memory(); },
               {"top_k.weights: wanted data, got session_memory"});
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

TEST_CASE("A submission of a ring is the request that it stands for, with its routing copied") {
  alignas(64) std::byte region[1024] = {};
  const int32_t ids[] = {3, 1, 2, 0, 1, 1};
  std::memcpy(region + 256, ids, sizeof(ids));
  ring::Submission good = {};
  good.flags = ring::kRoutedOnly | ring::kReturnRouting;
  good.layer = 1;
  good.routing = ring::Routing::kTopK;
  good.hidden_dtype = v1::DTYPE_BF16;
  good.output_dtype = v1::DTYPE_F32;
  good.rows = 3, good.cols = kHidden, good.top_k = 2;
  good.hidden_offset = 0, good.output_offset = 64, good.ids_offset = 256, good.weights_offset = 320;
  std::strcpy(good.model, "tiny");
  std::strcpy(good.request_id, "an id");
  v1::ForwardRequest request;
  REQUIRE(FromRing(good, region, &request).ok());
  std::memset(region + 256, 0x7f, sizeof(ids));  // too late
  CHECK(std::memcmp(request.top_k().ids().data().data(), ids, sizeof(ids)) == 0);
  std::memcpy(region + 256, ids, sizeof(ids));
  CHECK((request.model() == "tiny" && request.request_id() == "an id"));
  CHECK((request.routed_only() && request.return_routing() && request.output_dtype() == v1::DTYPE_F32));
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, OneModel());
  REQUIRE(checked.ok());
  CHECK((checked->hidden_session->offset == 0 && checked->output_session->offset == 64));

  const auto refused = [&](const std::function<void(ring::Submission*)>& change) {
    ring::Submission bad = good;
    change(&bad);
    v1::ForwardRequest into;
    absl::Status status = FromRing(bad, region, &into);
    if (status.ok()) status = CheckForward(into, OneModel()).status();
    CHECK(absl::IsInvalidArgument(status));
    return std::string(status.message());
  };
  using Catch::Matchers::Contains;
  CHECK_THAT(refused([](auto* s) { s->flags = 8; }), Contains("flags"));
  CHECK_THAT(refused([](auto* s) { s->reserved[111] = 1; }), Contains("reserved"));
  CHECK_THAT(refused([](auto* s) { s->routing = static_cast<ring::Routing>(3); }), Contains("routing: wanted 0 to 2, got 3"));
  CHECK_THAT(refused([](auto* s) { s->ids_offset = 1008; }), Contains("multiple of 64"));
  CHECK_THAT(refused([](auto* s) { s->ids_offset = 1024; }), Contains("top_k.ids: wanted a tensor within the 1024 bytes"));
  CHECK_THAT(refused([](auto* s) { s->weights_offset = uint64_t{0} - 64; }), Contains("top_k.weights"));
  CHECK_THAT(refused([](auto* s) { s->top_k = uint64_t{1} << 62; }), Contains("top_k.ids"));
  CHECK_THAT(refused([](auto* s) { s->rows = uint64_t{0} - 1; }), Contains("top_k.ids"));
  CHECK_THAT(refused([](auto* s) { s->routing = ring::Routing::kGate, s->rows = uint64_t{0} - 1; }), Contains("negative"));
  CHECK_THAT(refused([](auto* s) { s->hidden_dtype = 77; }), Contains("77"));
  CHECK_THAT(refused([](auto* s) { s->output_dtype = 4; }), Contains("output_dtype"));
  CHECK_THAT(refused([](auto* s) { s->output_offset = 20; }), Contains("no byte of hidden"));
  CHECK(CheckUsedRouting(good, region, 2).ok());
  CHECK_THAT(std::string(CheckUsedRouting(good, region, 3).message()), Contains("room for 3 slots a row, got 2"));
  good.used_weights_offset = 1024;
  CHECK_THAT(std::string(CheckUsedRouting(good, region, 2).message()), Contains("used_weights"));
}

TEST_CASE("A tensor in device memory ends within its allocation, whatever the offset") {
  struct Memory : SharedMemory {
    void* data() const override { return const_cast<std::byte*>(block.data()); }
    size_t bytes() const override { return block.size(); }
    std::vector<std::byte> block = std::vector<std::byte>(256);
  } memory;
  const auto at = [&](uint64_t offset, size_t bytes) { return AddressIn("hidden", memory, {{}, offset}, bytes); };
  CHECK(*at(0, 256) == memory.block.data());
  CHECK(*at(240, 16) == memory.block.data() + 240);
  CHECK(at(256, 0).ok());
  using Range = std::pair<uint64_t, size_t>;
  for (const auto& [offset, bytes] : {Range{0, 257}, {16, 241}, {272, 0}, {UINT64_MAX - 15, 16}, {16, SIZE_MAX}}) {
    const absl::Status status = at(offset, bytes).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Contains("hidden: wanted a tensor within the 256 bytes"));
  }
}

TEST_CASE("The head of an output without data is that of a tensor with a shape") {
  v1::ForwardResponse answer;
  REQUIRE(answer.ParseFromString(OutputHead(DType::kBf16, 3, 8, false)));
  CHECK(answer.output().data().empty());
  CHECK(answer.output().shape(0) == 3);
  CHECK(answer.output().dtype() == v1::DTYPE_BF16);
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

TEST_CASE("An answer that no message can hold is refused before it is computed") {
  // 2 MiB of hidden states, whose routing by 64 slots per row takes 512 MiB.
  ModelStatus wide;
  wide.name = "wide";
  wide.hidden = 1;
  wide.num_experts = 64;
  wide.top_k = 64;
  wide.layers.resize(1);
  const ModelTable table({wide});
  v1::ForwardRequest request;
  SetTensor(v1::DTYPE_F16, 1 << 20, 1, 2 << 20, request.mutable_hidden());
  CHECK(CheckForward(request, table).ok());
  request.set_return_routing(true);
  const absl::Status status = CheckForward(request, table).status();
  CHECK(absl::IsResourceExhausted(status));
  CHECK_THAT(std::string(status.message()), Contains("538968064") && Contains("268369920"));
}

TEST_CASE("Head, data and rest together are the serialised answer") {
  ForwardInfo info;
  info.backend = "cpu_generic";
  info.scheme = "int4";
  info.generation = 3;
  info.compute_us = 42;
  info.batch_rows = 1234;
  info.top_k = 2;
  info.ids = {3, -1};
  info.weights = {0.5f, 0.25f};
  for (const int64_t rows : {0, 1, 1000}) {
    v1::ForwardRequest request = Good();
    request.set_request_id("abc");
    info.want_routing = rows == 1;
    std::string data(static_cast<size_t>(rows) * kHidden * 2, '\0');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31);
    v1::ForwardResponse rest = BeginAnswer(request);
    EndAnswer(info, rows, &rest);
    const std::string bytes = OutputHead(DType::kF16, rows, kHidden) + data + rest.SerializeAsString();
    v1::ForwardResponse answer;
    REQUIRE(answer.ParseFromString(bytes));
    CHECK(answer.output().dtype() == v1::DTYPE_F16);
    CHECK(answer.output().shape_size() == 2);
    CHECK(answer.output().shape(0) == rows);
    CHECK(answer.output().shape(1) == kHidden);
    CHECK(answer.output().data() == data);
    CHECK(answer.backend() == "cpu_generic");
    CHECK(answer.scheme() == "int4");
    CHECK(answer.generation() == 3);
    CHECK(answer.timing().compute_us() == 42);
    CHECK(answer.timing().batch_rows() == 1234);
    CHECK(answer.request_id() == "abc");
    CHECK(answer.has_routing() == (rows == 1));
    CHECK(answer.GetReflection()->GetUnknownFields(answer).empty());
    if (rows != 1) continue;
    int32_t ids[2];
    std::memcpy(ids, answer.routing().ids().data().data(), sizeof(ids));
    CHECK(ids[0] == 3);
    CHECK(ids[1] == -1);
    CHECK(answer.routing().weights().data().size() == 8);
  }
}

TEST_CASE("A self-check takes 1 to 64 rows, 8 when unsaid") {
  v1::SelfCheckRequest request;
  CHECK(*SelfCheckTokens(request) == 8);
  request.set_tokens(64);
  CHECK(*SelfCheckTokens(request) == 64);
  for (const int tokens : {-1, 65}) {
    request.set_tokens(tokens);
    CHECK_THAT(std::string(SelfCheckTokens(request).status().message()), Contains("1 to 64") && Contains(std::to_string(tokens)));
  }
}

TEST_CASE("One failed row fails a self-check") {
  v1::SelfCheckResponse response;
  SelfCheckRow row;
  row.passed = true;
  AddSelfCheckRows({row}, &response);
  CHECK(response.passed());
  row.passed = false;
  AddSelfCheckRows({row}, &response);
  row.passed = true;
  AddSelfCheckRows({row}, &response);
  CHECK_FALSE(response.passed());
  CHECK(response.rows_size() == 3);
}

TEST_CASE("A layer is shown as ready only when calls are let in (B64)") {
  ModelStatus model;
  model.name = "tiny";
  model.state = LayerState::kReady;
  model.layers.resize(2);
  model.layers[0].state = LayerState::kReady;
  model.layers[1].state = LayerState::kFailed;
  v1::StatusResponse loading, serving;
  FillStatus({model}, {}, Phase::kLoading, &loading);
  FillStatus({model}, {}, Phase::kServing, &serving);
  CHECK(loading.models(0).state() == v1::LAYER_STATE_LOADING);
  CHECK(loading.models(0).layers(0).state() == v1::LAYER_STATE_LOADING);
  CHECK(loading.models(0).layers(1).state() == v1::LAYER_STATE_FAILED);
  CHECK(serving.models(0).layers(0).state() == v1::LAYER_STATE_READY);
  CHECK(serving.models(0).error().empty());
  CHECK(serving.version() == "0.1.0");
  v1::StatusResponse draining;
  FillStatus({model}, {}, Phase::kDraining, &draining);
  CHECK(draining.models(0).state() == v1::LAYER_STATE_PLANNED);
  CHECK(draining.models(0).layers(0).state() == v1::LAYER_STATE_PLANNED);
  CHECK(draining.models(0).error() == "the server is draining");
}

TEST_CASE("A status tells threads, their limit, the memory nodes of processors and layers, and the GPU with its free memory") {
  ModelStatus model;
  model.layers.resize(2);
  model.layers[1].numa_nodes = {0, 3};
  const HostStatus host{.threads = 2, .threads_limit = "cgroup quota 2.5", .pinned = true, .processors = 16, .cpu_quota = 2.5,
                        .numa_nodes = {1}, .gpu = "NVIDIA H200", .gpu_free_bytes = 141000000000};
  v1::StatusResponse status;
  FillStatus({model}, host, Phase::kServing, &status);
  CHECK(status.host().threads() == 2);
  CHECK(status.host().threads_limit() == "cgroup quota 2.5");
  CHECK(status.host().pinned());
  CHECK(status.host().processors() == 16);
  CHECK(status.host().cpu_quota() == 2.5);
  REQUIRE(status.host().numa_nodes_size() == 1);
  CHECK(status.host().numa_nodes(0) == 1);
  CHECK(status.host().gpu() == "NVIDIA H200");
  CHECK(status.host().gpu_free_bytes() == 141000000000u);
  CHECK(status.models(0).layers(0).numa_nodes_size() == 0);
  REQUIRE(status.models(0).layers(1).numa_nodes_size() == 2);
  CHECK(status.models(0).layers(1).numa_nodes(1) == 3);
}

TEST_CASE("An explanation keeps every reason") {
  ExplainReport report;
  report.device = "h200";
  report.fits = false;
  for (const int layer : {1, 2}) {
    LayerExplanation explanation;
    explanation.layer = layer;
    BackendVerdict verdict;
    verdict.name = "cpu_amx";
    verdict.verdict.reasons = {{"isa_missing", "amx_tile"}, {"shape_unsupported", "I=640"}};
    explanation.backends = {verdict};
    report.layers.push_back(explanation);
  }
  v1::ExplainResponse all, one;
  FillExplain(report, -1, &all);
  FillExplain(report, 2, &one);
  CHECK(all.layers_size() == 2);
  REQUIRE(one.layers_size() == 1);
  CHECK(one.layers(0).layer() == 2);
  CHECK_FALSE(one.fits());
  REQUIRE(one.layers(0).backends(0).reasons_size() == 2);
  CHECK_FALSE(one.layers(0).backends(0).ok());
  CHECK(one.layers(0).backends(0).reasons(1).code() == "shape_unsupported");
}

}  // namespace moed
