// Works that whoever brings them runs: when that is, and that nothing is lost by it. The clock moves only when told.
#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/work_queue.h"

namespace moed {
namespace {

using std::chrono::microseconds;
using Events = std::vector<std::string>;

constexpr microseconds kHere(100);

// Runs of it take `took` by the clock of its bench.
struct Bench {
  class Work : public QueuedWork {
   public:
    Work(Bench* bench, std::string name, int64_t rows, microseconds took, std::function<void()> inside, int runs)
        : QueuedWork({.group = "layer", .rows = rows}), bench_(bench), name_(std::move(name)), took_(took),
          inside_(std::move(inside)), runs_(runs) {}
    void Run(std::span<Part> parts) override {
      bench_->Note(name_, took_);
      if (inside_) inside_();
      parts.front().done = --runs_ == 0;
      parts.front().next = 0;
    }
    void Drop(const absl::Status&) override { bench_->Note(name_ + " dropped", {}); }

   private:
    Bench* const bench_;
    const std::string name_;
    const microseconds took_;
    const std::function<void()> inside_;
    int runs_;
  };

  explicit Bench(WorkQueue::Limits limits = {})
      : queue(limits, [this] {
          std::lock_guard<std::mutex> lock(mutex);
          return now;
        }) {}

  void Note(std::string event, microseconds took) {
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(event));
    now += took;
  }

  absl::Status Push(const std::string& name, microseconds here = kHere, microseconds took = microseconds(40), int64_t rows = 1,
                    std::function<void()> inside = {}, int runs = 1) {
    return queue.Push(std::make_shared<Work>(this, name, rows, took, std::move(inside), runs), here);
  }
  // Has one run, so that it is known how long they take.
  void Learn(microseconds took, int64_t rows = 1) {
    REQUIRE(Push("first", kHere, took, rows).ok());
    REQUIRE(queue.RunNext());
    events.clear();
  }

  std::mutex mutex;
  WorkQueue::TimePoint now{};  // guarded by mutex
  Events events;               // guarded by mutex while the queue has threads
  WorkQueue queue;
};

}  // namespace

TEST_CASE("A short work runs before Push returns, once it is known that it is short, and where that is allowed") {
  Bench bench;
  CHECK(bench.Push("unknown").ok());
  CHECK(bench.events.empty());
  CHECK(bench.queue.RunNext());
  CHECK(bench.Push("known").ok());
  CHECK(bench.events == Events{"unknown", "known"});
  CHECK(bench.Push("not allowed", microseconds(0)).ok());
  CHECK(bench.events.size() == 2);
  CHECK(bench.queue.RunNext());
  const WorkQueue::Counters counters = bench.queue.counters();
  CHECK(counters.accepted == 3);
  CHECK(counters.finished == 3);
  CHECK(counters.waiting == 0);
}

TEST_CASE("A work that may take longer than allowed is left to others: by its rows, or by what runs took") {
  Bench by_rows;
  by_rows.Learn(microseconds(40), 4);  // 10 us a row
  CHECK(by_rows.Push("10 rows", kHere, microseconds(100), 10).ok());
  CHECK(by_rows.events.size() == 1);
  CHECK(by_rows.Push("100 rows", kHere, microseconds(1000), 100).ok());
  CHECK(by_rows.events.size() == 1);
  CHECK(by_rows.queue.RunNext());
  Bench by_runs;
  by_runs.Learn(microseconds(101), 1000);
  CHECK(by_runs.Push("1 row").ok());
  CHECK(by_runs.events.empty());
  CHECK(by_runs.queue.RunNext());
}

TEST_CASE("Nobody passes what waits, and nothing runs beside a run") {
  Bench bench;
  bench.Learn(microseconds(40));
  CHECK(bench.Push("waits", microseconds(0)).ok());
  CHECK(bench.Push("behind it").ok());
  CHECK(bench.events.empty());
  while (bench.queue.RunNext()) {
  }
  CHECK(bench.events == Events{"waits", "behind it"});
  const auto inside = [&] { CHECK(bench.Push("beside").ok()); };
  CHECK(bench.Push("outer", kHere, microseconds(40), 1, inside).ok());
  CHECK(bench.events == Events{"waits", "behind it", "outer"});
  CHECK(bench.queue.RunNext());
  CHECK(bench.events.back() == "beside");
}

TEST_CASE("Works that wait for company do so, whoever brings them") {
  WorkQueue::Limits limits;
  limits.wait = microseconds(500);
  limits.batch_rows = 8;
  int runs = 0;  // lives longer than the queue, which runs what is left when it ends
  Bench bench(limits);
  class Shared : public QueuedWork {
   public:
    explicit Shared(int* runs) : QueuedWork({.group = "layer", .kind = "kind"}), runs_(runs) {}
    void Run(std::span<Part> parts) override {
      ++*runs_;
      for (Part& part : parts) part.done = true;
    }
    void Drop(const absl::Status&) override {}

   private:
    int* const runs_;
  };
  for (int i = 0; i < 3; ++i) CHECK(bench.queue.Push(std::make_shared<Shared>(&runs), microseconds(1000)).ok());
  CHECK(runs == 0);
  bench.now += microseconds(500);
  CHECK(bench.queue.RunNext());
  CHECK(runs == 1);
  CHECK(bench.queue.Push(std::make_shared<Shared>(&runs), microseconds(1000)).ok());
  CHECK(runs == 1);
}

TEST_CASE("What is left of a work, and what came while it ran, is taken up by the queue's threads") {
  Bench bench;
  bench.Learn(microseconds(40));
  bench.queue.Start(1);
  std::promise<void> other;
  const auto inside = [&, first = true]() mutable {
    if (first) CHECK(bench.Push("other", kHere, microseconds(40), 1, [&] { other.set_value(); }).ok());
    first = false;
  };
  CHECK(bench.Push("twice", kHere, microseconds(40), 1, inside, 2).ok());
  other.get_future().wait();
  bench.queue.Shutdown();
  CHECK(std::count(bench.events.begin(), bench.events.end(), "twice") == 2);
  CHECK(bench.events.front() == "twice");
  CHECK(bench.queue.counters().finished == 3);
}

TEST_CASE("A shutdown waits for who runs a work of their own") {
  Bench bench;
  bench.Learn(microseconds(40));
  std::promise<void> begun, go_on;
  auto pushed = std::async(std::launch::async, [&] {
    return bench.Push("long after all", kHere, microseconds(40), 1, [&] {
      begun.set_value();
      go_on.get_future().wait();
    });
  });
  begun.get_future().wait();
  auto shutdown = std::async(std::launch::async, [&] { bench.queue.Shutdown(); });
  CHECK(shutdown.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
  go_on.set_value();
  shutdown.wait();
  CHECK(pushed.get().ok());
  CHECK(bench.queue.counters().finished == 2);
  CHECK(absl::IsUnavailable(bench.Push("too late")));
}

}  // namespace moed
