// The worker pool: every task once, on every size, call after call.
#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernels/worker_pool.h"

namespace moed {

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

}  // namespace moed
