// The queue under a clock that moves only when told, without a thread of its own; and with its threads. What runs with what is in
// batcher_test.
#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "server/work_queue.h"

namespace moed {
namespace {

using std::chrono::milliseconds;

enum class Next { kDone, kAgain };

// A work whose runs are given; one that is to run again is as it was before.
struct Job {
  std::function<Next(WorkQueue::Duration)> run;
  std::function<void(absl::Status)> drop;
  std::function<bool()> gone;
  WorkQueue::TimePoint deadline = WorkQueue::TimePoint::max();
};

class WorkOfJob : public QueuedWork {
 public:
  explicit WorkOfJob(Job job) : QueuedWork({.deadline = job.deadline}), job_(std::move(job)) {}
  bool Gone() const override { return job_.gone && job_.gone(); }
  void Run(std::span<Part> parts) override {
    parts.front().next = 0;
    parts.front().done = job_.run(parts.front().waited) == Next::kDone;
  }
  void Drop(const absl::Status& why) override { job_.drop(why); }

 private:
  const Job job_;
};

std::shared_ptr<QueuedWork> Work(Job job) { return std::make_shared<WorkOfJob>(std::move(job)); }

WorkQueue::Limits Calls(int calls) { return {.calls = calls}; }

// A queue, its clock, and a record of what happened to its jobs.
struct Bench {
  explicit Bench(int capacity) : queue(Calls(capacity), [this] { return now; }) {}

  Job JobOf(const std::string& name, WorkQueue::TimePoint deadline = WorkQueue::TimePoint::max()) {
    Job job;
    job.run = [this, name](WorkQueue::Duration waited) {
      events.push_back(name + " ran after " + std::to_string(waited / milliseconds(1)));
      return Next::kDone;
    };
    job.drop = [this, name](absl::Status why) {
      events.push_back(name + (absl::IsDeadlineExceeded(why) ? " expired" : absl::IsCancelled(why) ? " cancelled" : " ?"));
    };
    job.deadline = deadline;
    return job;
  }

  WorkQueue::TimePoint now{};
  std::vector<std::string> events;
  WorkQueue queue;
};

using Events = std::vector<std::string>;

// Works that share runs: each run is told as "a+b".
class Sharing : public QueuedWork {
 public:
  Sharing(const std::string& name, int64_t rows, std::vector<std::string>* events)
      : QueuedWork({.group = "layer", .kind = "kind", .rows = rows}), name_(name), events_(events) {}
  void Run(std::span<Part> parts) override {
    std::string names;
    for (Part& part : parts) {
      const Sharing& work = static_cast<Sharing&>(*part.work);
      if (work.name_ == "no memory") throw std::bad_alloc();
      names += (names.empty() ? "" : "+") + work.name_;
      part.done = true;
    }
    events_->push_back(names);
  }
  void Drop(const absl::Status& why) override {
    events_->push_back(name_ + (absl::IsResourceExhausted(why) ? " without memory" : " ?"));
  }

 private:
  const std::string name_;
  std::vector<std::string>* const events_;
};

}  // namespace

TEST_CASE("Jobs run in the order of arrival and learn how long they waited") {
  Bench bench(4);
  CHECK(bench.queue.Push(Work(bench.JobOf("a"))).ok());
  bench.now += milliseconds(5);
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  bench.now += milliseconds(2);
  CHECK(bench.queue.RunNext());
  CHECK(bench.queue.RunNext());
  CHECK_FALSE(bench.queue.RunNext());
  CHECK(bench.events == Events{"a ran after 7", "b ran after 2"});
  CHECK(bench.queue.counters().finished == 2);
}

TEST_CASE("A full queue refuses at once with the numbers") {
  Bench bench(2);
  CHECK(bench.queue.Push(Work(bench.JobOf("a"))).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  const absl::Status refused = bench.queue.Push(Work(bench.JobOf("c")));
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Matchers::Contains("2 calls wait, 2 may"));
  CHECK(bench.queue.counters().refused == 1);
  CHECK(bench.queue.counters().waiting == 2);
  CHECK(bench.queue.RunNext());
  CHECK(bench.queue.Push(Work(bench.JobOf("d"))).ok());
  CHECK(bench.events == Events{"a ran after 0"});
}

TEST_CASE("A job whose deadline passed is dropped before it runs and counted (B59)") {
  Bench bench(60);
  for (int i = 0; i < 50; ++i) CHECK(bench.queue.Push(Work(bench.JobOf("x", bench.now + milliseconds(50)))).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("normal"))).ok());
  bench.now += milliseconds(50);  // a deadline that is now has passed
  while (bench.queue.RunNext()) {
  }
  CHECK(bench.events.size() == 51);
  CHECK(bench.events.front() == "x expired");
  CHECK(bench.events.back() == "normal ran after 50");
  CHECK(bench.queue.counters().expired == 50);
  CHECK(bench.queue.counters().finished == 1);
}

TEST_CASE("A job with time left runs") {
  Bench bench(2);
  CHECK(bench.queue.Push(Work(bench.JobOf("a", bench.now + milliseconds(50)))).ok());
  bench.now += milliseconds(49);
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"a ran after 49"});
}

TEST_CASE("A job whose caller went away is dropped before it runs and counted") {
  Bench bench(2);
  bool gone = false;
  Job job = bench.JobOf("a");
  job.gone = [&gone] { return gone; };
  CHECK(bench.queue.Push(Work(job)).ok());
  gone = true;
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"a cancelled"});
  CHECK(bench.queue.counters().cancelled == 1);
}

TEST_CASE("A deadline counts as such when the transport cancelled the call for it") {
  Bench bench(2);
  Job job = bench.JobOf("a", bench.now + milliseconds(1));
  job.gone = [] { return true; };
  CHECK(bench.queue.Push(Work(job)).ok());
  bench.now += milliseconds(1);
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"a expired"});
}

TEST_CASE("Jobs that nobody waits for make room in a full queue") {
  Bench bench(2);
  CHECK(bench.queue.Push(Work(bench.JobOf("a", bench.now + milliseconds(1)))).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  bench.now += milliseconds(1);
  CHECK(bench.queue.Push(Work(bench.JobOf("c"))).ok());
  CHECK(bench.events == Events{"a expired"});
  while (bench.queue.RunNext()) {
  }
  CHECK(bench.events == Events{"a expired", "b ran after 1", "c ran after 0"});
}

TEST_CASE("Who asks for room first is refused as the job would be, and jobs that nobody waits for make it") {
  Bench bench(2);
  CHECK(bench.queue.CheckRoom(1).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("a", bench.now + milliseconds(3)))).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  const absl::Status refused = bench.queue.CheckRoom(1);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Matchers::Contains("2 calls wait, 2 may"));
  CHECK(bench.queue.counters().refused == 1);
  CHECK(bench.queue.counters().waiting == 2);
  bench.now += milliseconds(3);
  CHECK(bench.queue.CheckRoom(1).ok());
  CHECK(bench.events == Events{"a expired"});
  CHECK(bench.queue.counters().refused == 1);
  bench.queue.Shutdown();
  CHECK(bench.queue.CheckRoom(1).ok());  // a Push says what is the matter
}

TEST_CASE("A full queue looks for jobs that nobody waits for once a millisecond, however many it refuses") {
  int looks = 0;
  bool gone = false;
  Bench bench(1);
  Job job = bench.JobOf("a");
  job.gone = [&] { return ++looks, gone; };
  CHECK(bench.queue.Push(Work(job)).ok());
  for (int i = 0; i < 100; ++i) {
    CHECK_FALSE(bench.queue.CheckRoom(1).ok());
    CHECK_FALSE(bench.queue.Push(Work(bench.JobOf("refused"))).ok());
  }
  CHECK(looks == 1);
  gone = true;
  bench.now += milliseconds(1);
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  CHECK(bench.events == Events{"a cancelled"});
}

TEST_CASE("A job with another step goes to the back, and is dropped between steps") {
  Bench bench(1);
  int steps = 0;
  Job job = bench.JobOf("long", bench.now + milliseconds(10));
  job.run = [&](WorkQueue::Duration) {
    bench.events.push_back("step");
    // The queue is empty while this runs: the other one takes the only place, and the step comes back all the same.
    if (steps++ == 0) CHECK(bench.queue.Push(Work(bench.JobOf("other"))).ok());
    return Next::kAgain;
  };
  CHECK(bench.queue.Push(Work(job)).ok());
  CHECK(bench.queue.RunNext());
  CHECK(bench.queue.RunNext());
  CHECK(bench.queue.RunNext());
  bench.now += milliseconds(10);
  CHECK(bench.queue.RunNext());
  CHECK_FALSE(bench.queue.RunNext());
  CHECK(bench.events == Events{"step", "other ran after 0", "step", "long expired"});
}

TEST_CASE("A job that finds no memory is dropped with RESOURCE_EXHAUSTED and the next one runs") {
  Bench bench(4);
  Job job = bench.JobOf("a");
  job.run = [](WorkQueue::Duration) -> Next { throw std::bad_alloc(); };
  absl::Status why;
  job.drop = [&why](const absl::Status& status) { why = status; };
  REQUIRE(bench.queue.Push(Work(std::move(job))).ok());
  REQUIRE(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  CHECK(bench.queue.RunNext());
  CHECK(absl::IsResourceExhausted(why));
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"b ran after 0"});
  CHECK(bench.queue.counters().finished == 2);
}

TEST_CASE("Shutdown finishes what was accepted and takes nothing more") {
  Bench bench(4);
  int steps = 0;
  Job job = bench.JobOf("a");
  job.run = [&](WorkQueue::Duration) { return ++steps < 3 ? Next::kAgain : Next::kDone; };
  CHECK(bench.queue.Push(Work(job)).ok());
  CHECK(bench.queue.Push(Work(bench.JobOf("b"))).ok());
  bench.queue.Shutdown();
  CHECK(steps == 3);
  CHECK(bench.events == Events{"b ran after 0"});
  CHECK(absl::IsUnavailable(bench.queue.Push(Work(bench.JobOf("c")))));
  CHECK(bench.queue.counters().finished == 2);
  CHECK(bench.queue.counters().waiting == 0);
}

TEST_CASE("Works that share a run are counted as calls, rows and merged") {
  Bench bench(8);
  for (const char* name : {"a", "b", "c"}) REQUIRE(bench.queue.Push(std::make_shared<Sharing>(name, 5, &bench.events)).ok());
  CHECK(bench.queue.counters().waiting_rows == 15);
  CHECK(bench.queue.RunNext());
  REQUIRE(bench.queue.Push(std::make_shared<Sharing>("d", 7, &bench.events)).ok());
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"a+b+c", "d"});
  const WorkQueue::Counters counters = bench.queue.counters();
  CHECK(counters.finished == 4);
  CHECK(counters.runs == 2);
  CHECK(counters.rows == 22);
  CHECK(counters.merged == 3);
  CHECK(counters.waiting_rows == 0);
}

TEST_CASE("A run without memory drops what it had not answered and nothing else") {
  Bench bench(8);
  for (const char* name : {"a", "no memory", "c"}) {
    REQUIRE(bench.queue.Push(std::make_shared<Sharing>(name, 1, &bench.events)).ok());
  }
  CHECK(bench.queue.RunNext());
  CHECK(bench.events == Events{"no memory without memory", "c without memory"});
  CHECK(bench.queue.counters().finished == 3);
  CHECK_FALSE(bench.queue.RunNext());
}

TEST_CASE("Who is refused learns how long what waits will take, from the time that rows took") {
  Bench bench(4);
  CHECK(bench.queue.RetryDelay() == milliseconds(100));  // nothing is known
  Job slow = bench.JobOf("slow");
  slow.run = [&](WorkQueue::Duration) { return bench.now += milliseconds(20), Next::kDone; };
  REQUIRE(bench.queue.Push(Work(slow)).ok());  // one row in 20 ms
  REQUIRE(bench.queue.RunNext());
  for (int i = 0; i < 4; ++i) REQUIRE(bench.queue.Push(Work(slow)).ok());
  CHECK(absl::IsResourceExhausted(bench.queue.Push(Work(slow))));
  const auto delay = std::chrono::duration_cast<std::chrono::microseconds>(bench.queue.RetryDelay()).count();
  CHECK(delay == Approx(80000).margin(1));
  while (bench.queue.RunNext()) {
  }
  CHECK(bench.queue.RetryDelay() == milliseconds(1));  // nothing waits
}

TEST_CASE("A thread of its own wakes when works have waited for company long enough") {
  WorkQueue queue({.wait = milliseconds(5)}, [] { return std::chrono::steady_clock::now(); });
  queue.Start(1);
  std::vector<std::string> events;
  REQUIRE(queue.Push(std::make_shared<Sharing>("a", 1, &events)).ok());
  REQUIRE(queue.Push(std::make_shared<Sharing>("b", 1, &events)).ok());
  const auto begin = std::chrono::steady_clock::now();
  while (queue.counters().finished < 2 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(queue.counters().finished == 2);
}

TEST_CASE("With threads of its own every accepted job ends exactly once, also in a shutdown") {
  const int threads = GENERATE(1, 2, 3);
  constexpr int kPushers = 4, kJobs = 500;
  std::atomic<int> ran{0}, dropped{0}, accepted{0}, refused{0};
  WorkQueue queue(Calls(64), [] { return std::chrono::steady_clock::now(); });
  queue.Start(threads);
  std::vector<std::future<void>> pushers;
  for (int p = 0; p < kPushers; ++p) {
    pushers.push_back(std::async(std::launch::async, [&] {
      for (int i = 0; i < kJobs; ++i) {
        Job job;
        // Every third job has another step; that may be dropped like a first one.
        job.run = [&, steps = i % 3 == 0 ? 2 : 1](WorkQueue::Duration) mutable {
          if (--steps > 0) return Next::kAgain;
          return ++ran, Next::kDone;
        };
        job.drop = [&](absl::Status) { ++dropped; };
        job.gone = [i] { return i % 7 == 0; };
        ++(queue.Push(Work(std::move(job))).ok() ? accepted : refused);
      }
    }));
  }
  for (std::future<void>& pusher : pushers) pusher.get();
  queue.Shutdown();
  CHECK(accepted + refused == kPushers * kJobs);
  CHECK(ran + dropped == accepted);
  CHECK(queue.counters().accepted == static_cast<uint64_t>(accepted));
  CHECK(queue.counters().finished + queue.counters().cancelled == static_cast<uint64_t>(accepted));
}

TEST_CASE("Two threads run two jobs at once, and a shutdown waits for both") {
  std::promise<void> both_inside, go_on;
  std::shared_future<void> released = go_on.get_future().share();
  std::atomic<int> inside{0}, firsts{0}, ended{0};
  WorkQueue queue(Calls(8), [] { return std::chrono::steady_clock::now(); });
  queue.Start(2, [&] { ++firsts; });
  for (int i = 0; i < 2; ++i) {
    Job job;
    job.run = [&](WorkQueue::Duration) {
      if (++inside == 2) both_inside.set_value();
      released.wait();
      return ++ended, Next::kDone;
    };
    REQUIRE(queue.Push(Work(std::move(job))).ok());
  }
  both_inside.get_future().wait();  // hangs if they took turns
  CHECK(firsts == 2);
  std::future<void> shutdown = std::async(std::launch::async, [&] { queue.Shutdown(); });
  CHECK(shutdown.wait_for(milliseconds(50)) == std::future_status::timeout);
  CHECK(ended == 0);
  go_on.set_value();
  shutdown.get();
  CHECK(ended == 2);
  CHECK(queue.counters().finished == 2);
}

TEST_CASE("With two threads a job with another step is finished in a shutdown, whoever left before") {
  std::promise<void> go_on;
  std::shared_future<void> released = go_on.get_future().share();
  std::atomic<int> steps{0};
  WorkQueue queue(Calls(8), [] { return std::chrono::steady_clock::now(); });
  queue.Start(2);
  Job job;
  job.run = [&](WorkQueue::Duration) {
    released.wait();
    return ++steps < 5 ? Next::kAgain : Next::kDone;
  };
  REQUIRE(queue.Push(Work(std::move(job))).ok());
  std::future<void> shutdown = std::async(std::launch::async, [&] { queue.Shutdown(); });
  CHECK(shutdown.wait_for(milliseconds(20)) == std::future_status::timeout);  // the idle thread left meanwhile
  go_on.set_value();
  shutdown.get();
  CHECK(steps == 5);
  CHECK(queue.counters().finished == 1);
}

TEST_CASE("Expected jobs run, those that never come cost nobody anything, and no job is forgotten between sleep and look-out") {
  std::atomic<int> ran{0};
  WorkQueue queue(Calls(100000), [] { return std::chrono::steady_clock::now(); });
  queue.Expect();  // without a thread
  queue.Start(2);
  std::atomic<int> refused{0};
  const auto push = [&] {
    Job job;
    job.run = [&](WorkQueue::Duration) { return ++ran, Next::kDone; };
    refused += !queue.Push(Work(std::move(job))).ok();
  };
  const auto wait_for = [&](int count) {
    const auto begin = std::chrono::steady_clock::now();
    while (ran < count && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) std::this_thread::yield();
    return ran >= count;
  };
  // One at a time, with pauses around what a look-out takes: the next only comes when the last is done.
  int pushed = 0;
  for (int i = 0; i < 300; ++i) {
    queue.Expect();
    std::this_thread::sleep_for(std::chrono::microseconds(i % 6 * 40));
    if (i % 3 == 2) continue;
    push();
    REQUIRE(wait_for(++pushed));
  }
  // From several threads at once.
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 2000; ++i) {
        if (i % (caller + 1) == 0) queue.Expect();
        push();
        if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(110));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wait_for(pushed + 6000));
  CHECK(refused == 0);
  queue.Expect();
  queue.Shutdown();
  CHECK(queue.counters().finished == static_cast<uint64_t>(pushed + 6000));
}

}  // namespace moed
