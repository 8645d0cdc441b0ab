// Forwards on their way through the queue to the engine and back to their callers, whatever transport these came by.
//
// Calls of one layer that came with hidden states of one dtype on the host, and are routed in the same way, share runs. A large
// call goes in pieces, between which others have their turn: its result is whole when the last one ran. Neither is done where
// activation scales span the rows of a call, and calls with tensors in device memory share no run. Should the layer's weights be
// replaced between two pieces of a call, the call starts again, so that no result is of two kinds. A call with a recording
// (recorder.h) completes it before its answer.
// Threads: Submit may be called from any thread. It neither computes nor blocks but where it is allowed to run the call itself;
// then the caller may be answered before it returns. Else callers are answered from compute threads, or dropped as the queue
// says (work_queue.h).
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
  // Both must outlive the runner. Calls of more than `step` rows go in pieces of so many. The observers of calls (wire.h) are told
  // about runs.
  ForwardRunner(Engine* engine, WorkQueue* queue, int64_t step)
      : engine_(engine), queue_(queue), step_(step), routes_on_host_(!engine->UsesGpu()) {}

  // Queues `work`, or runs it on this thread when that is through within `here` (see WorkQueue::Push). An error as
  // WorkQueue::Push, RESOURCE_EXHAUSTED with when to try again (retry_info.h), means that nothing was queued: the caller is not
  // told.
  absl::Status Submit(ForwardWork work, WorkQueue::Duration here = {});

 private:
  class Job;

  QueuedWork::Terms TermsOf(const ForwardWork& work) const;

  Engine* const engine_;
  WorkQueue* const queue_;
  const int64_t step_;
  const bool routes_on_host_;  // then it costs next to nothing to know the experts of a run
};

}  // namespace moed

#endif  // MOED_SERVER_FORWARD_RUNNER_H_
