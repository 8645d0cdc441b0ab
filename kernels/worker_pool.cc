#include "kernels/worker_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>

namespace moed {
namespace {

// Bits of WorkerPool::state_.
constexpr uint32_t kOpen = 1;           // workers may enter
constexpr uint32_t kCallerSleeps = 2;   // the last worker that leaves wakes the caller
constexpr uint32_t kStop = 4;           // for good: workers return
constexpr uint32_t kInside = 8;         // one worker inside; kMaxThreads of them fit below kJob
constexpr uint32_t kJob = kInside * WorkerPool::kMaxThreads;
constexpr uint32_t kInsideMask = kJob - kInside;
constexpr uint32_t kJobMask = ~(kJob - 1);

// Who sleeps on state_, so that a wake-up reaches only those that it is for.
constexpr uint32_t kWorkers = 1;
constexpr uint32_t kCaller = 2;

// Longer than the pause between two stages of a layer, shorter than what an idle server should burn.
constexpr std::chrono::microseconds kSpin(50);
constexpr int kPausesPerClock = 8;  // the clock costs about as much as this many pauses of a slow kind

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Sleeps unless `word` differs from `value` when the kernel looks; may return for no reason.
void Sleep(const std::atomic<uint32_t>& word, uint32_t value, uint32_t who) {
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, value, nullptr, nullptr, who);
}

void Wake(const std::atomic<uint32_t>& word, int count, uint32_t who) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET_PRIVATE, count, nullptr, nullptr, who);
}

// Whether `state` has something to do for a worker whose last job was that of `seen`. The number of a job returns after some
// hundred thousand: a worker that missed all between may miss one more, which only costs its help.
bool HasWork(uint32_t state, uint32_t seen) {
  return (state & kStop) != 0 || ((state & kOpen) != 0 && (state & kJobMask) != (seen & kJobMask));
}

}  // namespace

bool PinThisThread(int processor) {
  if (processor < 0) return false;
  cpu_set_t* set = CPU_ALLOC(processor + 1);
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(processor + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(processor, bytes, set);
  const bool pinned = sched_setaffinity(0, bytes, set) == 0;
  CPU_FREE(set);
  return pinned;
}

WorkerPool::WorkerPool(int threads, const std::vector<int>& processors, bool spin) : spin_(spin) {
  for (int worker = 1; worker < std::min(threads, kMaxThreads); ++worker) {
    const int processor = worker < static_cast<int>(processors.size()) ? processors[worker] : -1;
    workers_.emplace_back([this, worker, processor] { WorkerMain(worker, processor); });
  }
}

WorkerPool::~WorkerPool() {
  state_.fetch_or(kStop, std::memory_order_seq_cst);
  Wake(state_, INT_MAX, kWorkers);
  for (std::thread& worker : workers_) worker.join();
}

// Looks at `done`, for kSpin if the pool spins; whether it came true.
template <typename Done>
bool WorkerPool::SpinUntil(const Done& done) const {
  if (!spin_) return done();
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClock; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void WorkerPool::Drain(int worker) {
  for (int64_t task = next_.fetch_add(1, std::memory_order_relaxed); task < tasks_;
       task = next_.fetch_add(1, std::memory_order_relaxed)) {
    call_(context_, task, worker);
  }
}

void WorkerPool::Run(int64_t tasks, const void* context, Call call) {
  if (tasks <= 0) return;
  if (workers_.empty() || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) call(context, task, 0);
    return;
  }
  std::lock_guard<std::mutex> turn(turn_);
  context_ = context;
  call_ = call;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  // Between jobs state_ is closed and empty, and only the thread whose turn it is writes it.
  state_.store((state_.load(std::memory_order_relaxed) & kJobMask) + kJob + kOpen, std::memory_order_seq_cst);
  WakeSleepers(tasks - 1);
  Drain(0);
  // No task is left to hand out: whoever is inside may still run one.
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  WaitUntilEmpty();
}

// A worker counts itself before it looks at state_ for the last time. Either this load sees the count, and the wake-up comes
// after the kernel took the worker for a sleeper or made it look again; or the worker's look comes after the store of
// state_, and sees the job. That needs one order of the four accesses: all are seq_cst.
void WorkerPool::WakeSleepers(int64_t wanted) {
  const int sleeping = sleeping_.load(std::memory_order_seq_cst);
  if (sleeping > 0) Wake(state_, static_cast<int>(std::min<int64_t>(wanted, INT_MAX)), kWorkers);
}

void WorkerPool::WaitUntilEmpty() {
  const auto empty = [this] { return (state_.load(std::memory_order_acquire) & kInsideMask) == 0; };
  if (SpinUntil(empty)) return;
  uint32_t state = state_.fetch_or(kCallerSleeps, std::memory_order_acq_rel) | kCallerSleeps;
  for (; (state & kInsideMask) != 0; state = state_.load(std::memory_order_acquire)) Sleep(state_, state, kCaller);
  state_.fetch_and(~kCallerSleeps, std::memory_order_relaxed);
}

// False when the job was closed meanwhile, or another one took its place.
bool WorkerPool::Enter(uint32_t state) {
  const uint32_t job = state & kJobMask;
  while ((state & kOpen) != 0 && (state & kJobMask) == job) {
    if (state_.compare_exchange_weak(state, state + kInside, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  }
  return false;
}

void WorkerPool::Leave() {
  const uint32_t before = state_.fetch_sub(kInside, std::memory_order_release);
  if ((before & kInsideMask) == kInside && (before & kCallerSleeps) != 0) Wake(state_, 1, kCaller);
}

// A state that HasWork. Spins again after each wake-up: where one job was, the next is near.
uint32_t WorkerPool::WaitForWork(uint32_t seen) {
  uint32_t state = 0;
  const auto has_work = [&] {
    state = state_.load(std::memory_order_relaxed);
    return HasWork(state, seen);
  };
  while (!SpinUntil(has_work)) {
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    state = state_.load(std::memory_order_seq_cst);
    if (!HasWork(state, seen)) Sleep(state_, state, kWorkers);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }
  return state;
}

void WorkerPool::WorkerMain(int worker, int processor) {
  char name[16];  // as `top -H` shows it
  std::snprintf(name, sizeof(name), "worker-%d", worker);
  pthread_setname_np(pthread_self(), name);
  if (processor >= 0) PinThisThread(processor);
  uint32_t seen = 0;
  for (;;) {
    const uint32_t state = WaitForWork(seen);
    if ((state & kStop) != 0) return;
    if (!Enter(state)) continue;
    seen = state;
    Drain(worker);
    Leave();
  }
}

}  // namespace moed
