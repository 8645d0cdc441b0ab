// Tensors that are not in the request: places in device memory, in a session and behind a ring.
#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "proto/moe/v1/moe.pb.h"
#include "proto/ring/layout.h"
#include "server/wire.h"
#include "tests/server/wire_requests.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: requests and their parts
using Catch::Matchers::Contains;

}  // namespace

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

}  // namespace moed
