// What a refused client reads: a google.rpc.Status with a google.rpc.RetryInfo.
#include <catch2/catch.hpp>

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"
#include "server/retry_info.h"

namespace moed {

TEST_CASE("The details of a refused call repeat code and message and tell the delay to the nanosecond") {
  const absl::Status full = WithRetryInfo(absl::ResourceExhaustedError("full"), std::chrono::nanoseconds(2'000'000'345));
  google::rpc::Status details;
  REQUIRE(details.ParseFromString(StatusDetails(full, "full")));
  CHECK(details.code() == 8);
  CHECK(details.message() == "full");
  REQUIRE(details.details().size() == 1);
  google::rpc::RetryInfo info;
  REQUIRE(details.details(0).UnpackTo(&info));
  CHECK(info.retry_delay().seconds() == 2);
  CHECK(info.retry_delay().nanos() == 345);
}

TEST_CASE("Only a lack of room gets a delay, and a status without one has no details") {
  CHECK(StatusDetails(absl::ResourceExhaustedError("too large"), "too large").empty());
  const absl::Status draining = WithRetryInfo(absl::UnavailableError("draining"), std::chrono::seconds(1));
  CHECK(StatusDetails(draining, "draining").empty());
  CHECK(StatusDetails(WithRetryInfo(absl::OkStatus(), std::chrono::seconds(1)), "").empty());
}

TEST_CASE("A queue that is full tells when to try again, one that is closed does not") {
  struct Nothing : QueuedWork {
    Nothing() : QueuedWork({}) {}
    void Run(std::span<Part> parts) override { parts.front().done = true; }
    void Drop(const absl::Status&) override {}
  };
  WorkQueue queue({.calls = 1}, [] { return std::chrono::steady_clock::now(); });
  CHECK(PushOrTellWhen(&queue, std::make_shared<Nothing>()).ok());
  CHECK_FALSE(StatusDetails(PushOrTellWhen(&queue, std::make_shared<Nothing>()), "").empty());
  CHECK_FALSE(StatusDetails(CheckRoomOrTellWhen(&queue, 1), "").empty());
  queue.Shutdown();
  const absl::Status closed = PushOrTellWhen(&queue, std::make_shared<Nothing>());
  CHECK(absl::IsUnavailable(closed));
  CHECK(StatusDetails(closed, "").empty());
}

}  // namespace moed
