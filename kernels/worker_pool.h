// A pool of worker threads with one operation: run a function over task indices in parallel.
//
// Threads: ParallelFor may be called from any thread; loops of several threads take turns, one loop each, while those of one task
// just run. The calling thread works too, as worker 0. Nobody is waited for who has no task: a worker that sleeps or that the
// operating system does not run (a CPU quota, more threads than processors) joins a job late or not at all. Workers, and the
// caller while tasks are still running, spin for some 50 microseconds before they sleep, unless told not to. No allocation per
// call.
//
// A job lives in `state_`: open, workers enter and leave; closed, nobody enters. Invariant: the fields of the job are written only
// while it is closed and nobody is inside, and read only by the caller and by those inside.
#ifndef MOED_KERNELS_WORKER_POOL_H_
#define MOED_KERNELS_WORKER_POOL_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moed {

// Lets the calling thread run on `processor` only. False when the operating system refuses: no such processor, or not allowed.
bool PinThisThread(int processor);

class WorkerPool {
 public:
  static constexpr int kMaxThreads = 4096;

  // Starts `threads` - 1 workers; `threads` is taken into [1, kMaxThreads]. Worker w runs on processors[w] only, where there
  // is such an entry and the operating system agrees. Entry 0 is the caller's, who pins itself (PinThisThread). `spin` false
  // is for more threads than can run at once: one that spins would take the time of another.
  explicit WorkerPool(int threads, const std::vector<int>& processors = {}, bool spin = true);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) once for every task in [0, tasks), worker in [0, threads()), and returns when all are done.
  // Tasks are handed out in increasing order, one at a time. `body` must not throw and must not call ParallelFor.
  template <typename Body>
  void ParallelFor(int64_t tasks, const Body& body) {
    Run(tasks, &body, [](const void* context, int64_t task, int worker) { (*static_cast<const Body*>(context))(task, worker); });
  }

 private:
  using Call = void (*)(const void* context, int64_t task, int worker);

  void Run(int64_t tasks, const void* context, Call call);
  void WakeSleepers(int64_t wanted);
  void WaitUntilEmpty();
  void WorkerMain(int worker, int processor);
  uint32_t WaitForWork(uint32_t seen);
  bool Enter(uint32_t state);
  void Leave();
  void Drain(int worker);
  template <typename Done>
  bool SpinUntil(const Done& done) const;

  const bool spin_;
  std::mutex turn_;  // held by the caller whose loop runs
  std::vector<std::thread> workers_;
  // Flags, the number of workers inside, and above these the number of the job. Also what threads sleep on.
  alignas(64) std::atomic<uint32_t> state_{0};
  std::atomic<int> sleeping_{0};              // workers that sleep or are about to
  alignas(64) std::atomic<int64_t> next_{0};  // the next task to hand out
  // The job; see the invariant above.
  alignas(64) const void* context_ = nullptr;
  Call call_ = nullptr;
  int64_t tasks_ = 0;
};

}  // namespace moed

#endif  // MOED_KERNELS_WORKER_POOL_H_
