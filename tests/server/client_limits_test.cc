// What one client may have in flight.
#include <catch2/catch.hpp>
#include <string>
#include <utility>

#include "server/client_limits.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;

}  // namespace

TEST_CASE("A client gets no more than its limit, another one its own, and what is given back can be taken again") {
  ClientLimits limits(10, 1000);
  REQUIRE(limits.any());
  ClientShare other(&limits, "b");
  CHECK(other.TakeRows(10).ok());
  {
    ClientShare first(&limits, "a"), second(&limits, "a");
    CHECK(first.TakeRows(6).ok());
    CHECK(second.TakeRows(4).ok());
    const absl::Status over = second.TakeRows(1);
    CHECK(absl::IsResourceExhausted(over));
    CHECK_THAT(std::string(over.message()), Contains("10 rows in flight: 10 are, 1 more"));
    CHECK(second.TakeBytes(1000).ok());
    CHECK_THAT(std::string(first.TakeBytes(7).message()), Contains("1000 bytes of requests in flight: 1000 are, 7 more"));
    CHECK(limits.clients() == 2);
  }
  CHECK(limits.clients() == 1);
  ClientShare again(&limits, "a");
  CHECK(again.TakeRows(10).ok());
  CHECK(again.TakeBytes(1000).ok());
}

TEST_CASE("A call larger than the limit is refused even alone, and takes nothing") {
  ClientLimits limits(10, 0);
  ClientShare share(&limits, "a");
  CHECK(absl::IsResourceExhausted(share.TakeRows(11)));
  CHECK(limits.clients() == 0);
  CHECK(share.TakeRows(10).ok());
}

TEST_CASE("Without a limit of one kind that kind is not counted and the other still is") {
  ClientLimits rows_only(5, 0);
  {
    ClientShare share(&rows_only, "a");
    CHECK(share.TakeBytes(int64_t{1} << 40).ok());
    CHECK(rows_only.clients() == 0);
    CHECK(share.TakeRows(5).ok());
  }
  CHECK(rows_only.clients() == 0);
  ClientLimits none(0, 0);
  CHECK_FALSE(none.any());
  CHECK(ClientShare().TakeRows(int64_t{1} << 40).ok());
}

TEST_CASE("A share that is moved is given back once") {
  ClientLimits limits(10, 0);
  ClientShare first(&limits, "a");
  REQUIRE(first.TakeRows(10).ok());
  {
    ClientShare moved(std::move(first));
    ClientShare assigned(&limits, "b");
    REQUIRE(assigned.TakeRows(3).ok());
    assigned = std::move(moved);
    CHECK(limits.clients() == 1);  // b's went back
  }
  CHECK(limits.clients() == 0);
}

}  // namespace moed
