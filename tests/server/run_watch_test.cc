// Runs beyond the limit are told once, and their end as well. Time is a number.
#include "server/run_watch.h"

#include <catch2/catch.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace moed {
namespace {

using std::chrono::seconds;
using Catch::Matchers::Contains;

// A work that calls `inside` while it runs.
class Work final : public QueuedWork {
 public:
  Work(std::string group, int64_t rows, std::function<void()> inside)
      : QueuedWork({.group = std::move(group), .rows = rows}), inside_(std::move(inside)) {}
  void Run(std::span<Part> parts) override {
    inside_();
    parts.front().done = true;
  }
  void Drop(const absl::Status&) override {}

 private:
  const std::function<void()> inside_;
};

}  // namespace

TEST_CASE("A run is told once when it is beyond the limit, with its layer and rows, and once when it has ended") {
  WorkQueue::TimePoint now{};
  WorkQueue queue({}, [&] { return now; });
  std::vector<std::string> told;
  RunWatch watch(seconds(10), [&] { return queue.LongestRun(); }, [&](const std::string& what) { told.push_back(what); });
  const auto look = [&](seconds later) { now += later, watch.Look(now); };
  look(seconds(100));
  CHECK(told.empty());
  REQUIRE(queue.Push(std::make_shared<Work>("m/3", 7, [&] {
    look(seconds(10));
    CHECK(told.empty());
    look(seconds(1));
    REQUIRE(told.size() == 1);
    CHECK_THAT(told[0], Contains("m/3") && Contains("7 rows") && Contains("11 s"));
    look(seconds(60));
    CHECK(told.size() == 1);
  })).ok());
  REQUIRE(queue.RunNext());
  look(seconds(1));
  CHECK((told.size() == 2 && told[1].empty()));
  look(seconds(60));
  CHECK(told.size() == 2);
}

TEST_CASE("What waits is no run, and of several runs the oldest counts") {
  WorkQueue::TimePoint now{};
  WorkQueue queue({}, [&] { return now; });
  CHECK_FALSE(queue.LongestRun());
  const auto nothing = [] {};
  REQUIRE(queue.Push(std::make_shared<Work>("b", 1, [&] {
    now += seconds(5);
    REQUIRE(queue.Push(std::make_shared<Work>("c", 1, nothing)).ok());
    CHECK(queue.LongestRun()->group == "b");
    REQUIRE(queue.Push(std::make_shared<Work>("d", 1, [&] { CHECK(queue.LongestRun()->group == "b"); })).ok());
    while (queue.RunNext()) {
    }
    CHECK(queue.LongestRun()->began == WorkQueue::TimePoint{});
  })).ok());
  CHECK_FALSE(queue.LongestRun());
  REQUIRE(queue.RunNext());
  CHECK_FALSE(queue.LongestRun());
}

}  // namespace moed
