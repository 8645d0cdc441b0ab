// A pool of worker threads with one operation: run a function over task indices in parallel.
//
// Workers spin briefly after a job and then sleep. ParallelFor may be called from one thread at a time (the engine's
// compute thread); the calling thread works too, as worker 0. No allocation per call.
#ifndef MOED_KERNELS_WORKER_POOL_H_
#define MOED_KERNELS_WORKER_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moed {

class WorkerPool {
 public:
  // Starts `threads` - 1 workers; `threads` < 1 counts as 1.
  explicit WorkerPool(int threads);
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
  void WorkerMain(int worker);
  void Drain(const void* context, Call call, int64_t tasks, int worker);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};  // one more for each job, and for stopping
  std::atomic<int> running_{0};          // workers that have not finished the current job
  std::atomic<int64_t> next_{0};
  bool stop_ = false;                    // guarded by mutex_
  int sleeping_ = 0;                     // guarded by mutex_
  // The current job; written before generation_ is raised.
  const void* context_ = nullptr;
  Call call_ = nullptr;
  int64_t tasks_ = 0;
};

}  // namespace moed

#endif  // MOED_KERNELS_WORKER_POOL_H_
