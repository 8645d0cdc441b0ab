// Who wants a forward: what a runner needs to know of a call, and where its answer goes. Each transport has a caller of its own.
//
// Threads: started and deadline are fixed; Gone is asked on any thread; Prepare, Answer and Fail come from one thread at a time, a
// compute thread but for a Fail while another call is taken in. Exactly one of Answer and Fail ends the call, and no method is
// called after that. A runner shares the caller's ownership until then: what the call views (hidden states, routing, memory for the
// output) belongs to the caller or is held by it.
#ifndef MOED_SERVER_FORWARD_CALLER_H_
#define MOED_SERVER_FORWARD_CALLER_H_

#include <chrono>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "engine/call_memory.h"
#include "engine/engine.h"

namespace moed {

struct ForwardAnswer {
  ForwardInfo info;
  // [M, H] in the dtype that was asked for; nothing when the output lies in memory that the caller named.
  std::optional<CallMemory> output;
  int64_t receive_us = 0;  // from started() until it was queued
  int64_t queue_us = 0;    // from then on, but for info.compute_us: also the wait for a lane or for the host's turn
  std::chrono::steady_clock::time_point computed;
};

class ForwardCaller {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  virtual ~ForwardCaller() = default;

  // When all of the request was there.
  virtual TimePoint started() const = 0;
  // TimePoint::max(): none.
  virtual TimePoint deadline() const = 0;
  // Whether nobody waits for the answer any more. Must not block.
  virtual bool Gone() const = 0;
  // Called once before the call runs: for what of the answer can be made before its output is known, since hidden states may still
  // be on their way then. May throw std::bad_alloc: the call fails with RESOURCE_EXHAUSTED.
  virtual void Prepare() {}
  // The call's result. May throw std::bad_alloc as long as it has not answered: then Fail follows.
  virtual void Answer(ForwardAnswer answer) = 0;
  // Why there is no result. DEADLINE_EXCEEDED or CANCELLED: dropped before it ran; else as Engine::Forward. Must not throw.
  virtual void Fail(const absl::Status& why) = 0;
};

}  // namespace moed

#endif  // MOED_SERVER_FORWARD_CALLER_H_
