#include "kernels/worker_pool.h"

namespace moed {
namespace {

// Looks at a new job this many times before going to sleep: about 20 microseconds, longer than the pause between the two
// stages of a layer and shorter than what an idle server should burn.
constexpr int kSpins = 2000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

WorkerPool::WorkerPool(int threads) {
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { WorkerMain(worker); });
  }
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::Drain(const void* context, Call call, int64_t tasks, int worker) {
  for (int64_t task = next_.fetch_add(1, std::memory_order_relaxed); task < tasks;
       task = next_.fetch_add(1, std::memory_order_relaxed)) {
    call(context, task, worker);
  }
}

void WorkerPool::Run(int64_t tasks, const void* context, Call call) {
  if (tasks <= 0) return;
  if (workers_.empty() || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) call(context, task, 0);
    return;
  }
  context_ = context;
  call_ = call;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
    wake = sleeping_ > 0;
  }
  if (wake) wake_.notify_all();
  Drain(context, call, tasks, 0);
  while (running_.load(std::memory_order_acquire) != 0) Pause();
}

void WorkerPool::WorkerMain(int worker) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t now = generation_.load(std::memory_order_acquire);
    for (int spin = 0; now == seen && spin < kSpins; ++spin) {
      Pause();
      now = generation_.load(std::memory_order_acquire);
    }
    if (now == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      --sleeping_;
      now = generation_.load(std::memory_order_relaxed);
    }
    seen = now;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
    }
    Drain(context_, call_, tasks_, worker);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace moed
