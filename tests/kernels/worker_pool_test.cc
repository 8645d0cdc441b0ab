// The worker pool: every task once, on every size, call after call; no wake-up missed; pinning.
#include <catch2/catch.hpp>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernels/worker_pool.h"

namespace moed {
namespace {

// Empty when the operating system does not say. On any thread, so without assertions.
std::vector<int> ProcessorsOfThisThread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> processors;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) processors.push_back(processor);
  }
  return processors;
}

// Runs one task on each thread: none returns before all have begun, so that a worker that does not wake up hangs the test.
template <typename Body>
void OnEveryThread(WorkerPool* pool, const Body& body) {
  std::atomic<int> begun{0};
  pool->ParallelFor(pool->threads(), [&](int64_t, int worker) {
    ++begun;
    while (begun < pool->threads()) std::this_thread::yield();
    body(worker);
  });
}

}  // namespace

TEST_CASE("Every task runs exactly once, whatever the number of tasks and threads") {
  for (int threads : {-1, 1, 2, 5}) {
    WorkerPool pool(threads);
    CHECK(pool.threads() == std::max(threads, 1));
    for (int64_t tasks : {0, 1, 2, 3, 100, 10000}) {
      std::vector<std::atomic<int>> count(static_cast<size_t>(tasks));
      std::atomic<bool> worker_in_range{true};
      pool.ParallelFor(tasks, [&](int64_t task, int worker) {
        ++count[static_cast<size_t>(task)];
        if (worker < 0 || worker >= pool.threads()) worker_in_range = false;
      });
      int64_t once = 0;
      for (const std::atomic<int>& n : count) once += n == 1;
      CHECK(once == tasks);
      CHECK(worker_in_range);
    }
  }
}

TEST_CASE("Thousands of short jobs in a row lose no task, also after the workers went to sleep") {
  WorkerPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 5000; ++job) {
    pool.ParallelFor(7, [&](int64_t task, int) { sum += task; });
    if (job % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(sum == 5000 * 21);
}

TEST_CASE("What a task wrote is visible when ParallelFor returns") {
  WorkerPool pool(3);
  std::vector<int> values(1000);
  for (int round = 1; round <= 200; ++round) {
    pool.ParallelFor(1000, [&](int64_t task, int) { values[static_cast<size_t>(task)] = round; });
    int64_t stale = 0;
    for (int value : values) stale += value != round;
    REQUIRE(stale == 0);
  }
}

TEST_CASE("Every worker wakes up for a job that needs it, whether it spins, sleeps or is about to") {
  for (const bool spin : {true, false}) {
    WorkerPool pool(4, {}, spin);
    std::atomic<int> ran{0};
    for (int round = 0; round < 400; ++round) {
      std::this_thread::sleep_for(std::chrono::microseconds(round / 2));  // over the time that a worker spins
      OnEveryThread(&pool, [&](int) { ++ran; });
    }
    CHECK(ran == 1600);
  }
}

TEST_CASE("A caller that sleeps until a long task of a worker ends returns after it") {
  WorkerPool spinning(2), sleeping(2, {}, false);
  for (int round = 0; round < 40; ++round) {
    WorkerPool& pool = round % 2 == 0 ? spinning : sleeping;
    std::atomic<bool> long_one_ended{false};
    OnEveryThread(&pool, [&](int worker) {
      if (worker == 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // much longer than the caller spins
      long_one_ended = true;
    });
    REQUIRE(long_one_ended);
  }
}

TEST_CASE("With many more threads than processors no task is lost") {
  for (const bool spin : {true, false}) {
    WorkerPool pool(64, {}, spin);
    std::atomic<int64_t> sum{0};
    for (int job = 0; job < 500; ++job) pool.ParallelFor(65, [&](int64_t task, int) { sum += task; });
    CHECK(sum == 500 * 65 * 32);
  }
}

TEST_CASE("Jobs of other sizes follow each other without a task of one running in the next") {
  WorkerPool pool(3);
  int64_t wrong = 0;
  for (int64_t job = 0; job < 3000; ++job) {
    const int64_t tasks = 2 + job % 5;
    std::atomic<int64_t> count{0};
    std::atomic<bool> foreign{false};
    pool.ParallelFor(tasks, [&](int64_t task, int) {
      ++count;
      if (task >= tasks) foreign = true;
    });
    wrong += count != tasks || foreign;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Loops of several threads at once each run all of their tasks, one loop at a time") {
  WorkerPool pool(3);
  std::atomic<int> wrong{0};
  int64_t unguarded = 0;  // written by worker 0 of each loop of several tasks: a race where two loops ran at once
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int loop = 0; loop < 300; ++loop) {
        const int64_t tasks = 2 + (loop + caller) % 7;
        std::vector<int> ran(static_cast<size_t>(tasks), 0);
        pool.ParallelFor(tasks, [&](int64_t task, int worker) {
          ++ran[static_cast<size_t>(task)];
          if (worker == 0) ++unguarded;
        });
        for (const int times : ran) wrong += times != 1;
        pool.ParallelFor(1, [&](int64_t, int) { wrong += ran.empty(); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
  CHECK(unguarded > 0);
}

TEST_CASE("Pools come and go while their workers spin, sleep or have yet to start") {
  for (int round = 0; round < 100; ++round) {
    WorkerPool pool(4);
    if (round % 4 > 0) pool.ParallelFor(8, [](int64_t, int) {});
    if (round % 4 > 1) std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 4)));
  }
  SUCCEED("every worker was joined");
}

TEST_CASE("Pinned workers run on their processor only, the caller where it did") {
  const std::vector<int> before = ProcessorsOfThisThread();
  REQUIRE_FALSE(before.empty());
  WorkerPool pool(3, {before.front(), before.front(), before.back()});
  std::vector<std::vector<int>> seen(3);
  OnEveryThread(&pool, [&](int worker) { seen[static_cast<size_t>(worker)] = ProcessorsOfThisThread(); });
  CHECK(seen[0] == before);
  CHECK(seen[1] == std::vector<int>{before.front()});
  CHECK(seen[2] == std::vector<int>{before.back()});
}

TEST_CASE("A thread that pins itself runs there, and a processor that does not exist is refused") {
  const std::vector<int> before = ProcessorsOfThisThread();
  REQUIRE_FALSE(before.empty());
  std::vector<int> pinned;
  bool accepted = false, refused = false;
  std::thread([&] {
    accepted = PinThisThread(before.back());
    pinned = ProcessorsOfThisThread();
    refused = !PinThisThread(-1) && !PinThisThread(100000);
  }).join();
  CHECK(accepted);
  CHECK(pinned == std::vector<int>{before.back()});
  CHECK(refused);
  CHECK(ProcessorsOfThisThread() == before);
}

}  // namespace moed
