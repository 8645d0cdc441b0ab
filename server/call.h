// One RPC from its arrival to its answer: the wrapper that every handler goes through.
//
// A Call is the reactor of its RPC. It owns the conversions that must not differ between methods: the deadline, absl
// status to gRPC status (the codes are equal), the time taken, and the log line. A handler finishes it exactly once, with
// Done, from any thread; the object deletes itself when gRPC has sent the answer.
#ifndef MOED_SERVER_CALL_H_
#define MOED_SERVER_CALL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "server/client_gate.h"
#include "server/forward_record.h"
#include "server/request.h"
#include "server/work_queue.h"

namespace moed {

// gRPC's status for `status`, its payloads as details. Long messages are cut, since they travel in trailers, which clients limit to
// 8 KiB.
grpc::Status ToGrpc(const absl::Status& status);

// A call's deadline on the steady clock, which is what the queue and all durations use.
std::chrono::steady_clock::time_point SteadyDeadline(std::chrono::system_clock::time_point deadline);

// Counts the calls that are not yet answered, so that a drain knows when the last answer was handed over.
class OpenCalls {
 public:
  void Add();
  void Remove();
  // Waits until none is open; false when `limit` passed first.
  bool WaitForNone(std::chrono::milliseconds limit);
  // Waits until none is open and none came for `quiet`; false when `limit` passed first.
  bool WaitForQuiet(std::chrono::milliseconds quiet, std::chrono::milliseconds limit);

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int count_ = 0;       // guarded by mutex_
  uint64_t added_ = 0;  // calls ever; guarded by mutex_
};

class Call final : public grpc::ServerUnaryReactor {
 public:
  // `method` must be a literal.
  Call(const char* method, grpc::CallbackServerContext* context, OpenCalls* open);

  // Answers the call. The response object, if any, must be complete; `this` may be gone when Done returns.
  // Never throws: without memory for the answer's text the call gets RESOURCE_EXHAUSTED.
  void Done(const absl::Status& status);

  // Names the call in log lines.
  void SetRequestId(const std::string& id);

  // Takes `bytes` of `budget`, given back when the call is over. At most once; errors as ByteBudget::Take.
  absl::Status Reserve(ByteBudget* budget, size_t bytes);

  // Refuses a caller that `gate` does not let into `plane`, as ClientGate::Admit. Else what the call takes of its client's share
  // is given back when it is answered. At most once; a null gate lets everybody in.
  absl::Status Enter(ClientGate* gate, Plane plane);
  // RESOURCE_EXHAUSTED when the client has too much in flight, as ClientShare.
  absl::Status TakeBytes(size_t bytes) { return OfClient(share_.TakeBytes(static_cast<int64_t>(bytes))); }
  absl::Status TakeRows(int64_t rows) { return OfClient(share_.TakeRows(rows)); }

  // What Done records of a call that is a forward and whose record was begun.
  ForwardRecord& record() { return record_; }

  // DEADLINE_EXCEEDED when the deadline passed already.
  absl::Status CheckDeadline() const;

  // Puts `run` into the queue `steps` >= 1 times at most, as part of `group` (see queued_work.h), with this call's deadline and
  // caller: each time after others had a turn. `run` returns false, or ends with Done and returns true, at the last step at latest.
  // If it is dropped the call is answered with the reason. An error means that nothing was queued.
  absl::Status Queue(WorkQueue* queue, const std::string& group, int64_t steps, std::function<bool()> run);

  std::chrono::steady_clock::time_point started() const { return started_; }
  WorkQueue::TimePoint deadline() const { return deadline_; }
  // Whether the client went away, or a deadline passed.
  bool Gone() const { return context_->IsCancelled(); }

 private:
  void OnDone() override;
  // OnDone on the thread that found the answer sent: by default gRPC wakes another for it, which takes a processor from who waits
  // for the answer. What OnDone does is as short as that allows.
  bool InternalInlineable() override { return true; }
  absl::Status OfClient(absl::Status status);

  const char* const method_;
  grpc::CallbackServerContext* const context_;
  OpenCalls* const open_;
  const std::chrono::steady_clock::time_point started_;
  WorkQueue::TimePoint deadline_ = WorkQueue::TimePoint::max();
  std::string request_id_;
  ClientShare share_;
  ForwardRecord record_;
  ByteBudget* budget_ = nullptr;  // null: nothing was taken
  size_t reserved_ = 0;
};

}  // namespace moed

#endif  // MOED_SERVER_CALL_H_
