// Forwards on their way through the queue to the engine and back to their callers, whatever transport these came by.
//
// Threads: Submit may be called from any thread and neither computes nor blocks. Callers are answered from compute threads, or
// dropped as the queue says (work_queue.h).
#ifndef MOED_SERVER_FORWARD_RUNNER_H_
#define MOED_SERVER_FORWARD_RUNNER_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "server/forward_caller.h"
#include "server/wire.h"
#include "server/work_queue.h"

namespace moed {

// A checked call and where its output goes.
struct ForwardWork {
  CheckedForward checked;     // what it views is kept by `caller`
  bool want_routing = false;  // fill the ids and weights of ForwardInfo
  // Memory of the host for the output, checked.output_bytes() of it, kept by `caller`; not with checked.output_memory. Null: the
  // place that checked.output_memory names, else memory that comes with the answer. After a failure it may be partly written.
  std::byte* output = nullptr;
  std::shared_ptr<ForwardCaller> caller;
};

class ForwardRunner {
 public:
  // Both must outlive the runner.
  ForwardRunner(Engine* engine, WorkQueue* queue) : engine_(engine), queue_(queue) {}

  // Queues `work`. An error as WorkQueue::Push means that nothing was queued: the caller is not told.
  absl::Status Submit(ForwardWork work);

 private:
  struct Job;

  void Run(Job* job);
  absl::Status Compute(Job* job, ForwardAnswer* answer);
  absl::Status PrepareMemory(Job* job, ForwardAnswer* answer);
  absl::StatusOr<std::byte*> OpenPlace(const std::string& field, const CheckedForward& checked, const SharedPlace& place,
                                       size_t bytes, std::shared_ptr<const SharedMemory>* held);

  Engine* const engine_;
  WorkQueue* const queue_;
};

}  // namespace moed

#endif  // MOED_SERVER_FORWARD_RUNNER_H_
