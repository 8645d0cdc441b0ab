// Forward calls in a session of shared memory: by its ring, or by an RPC whose tensors lie there.
#ifndef MOED_CLIENT_SHARED_CALLS_H_
#define MOED_CLIENT_SHARED_CALLS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "client/shared_session.h"
#include "moe/v1/moe.pb.h"

namespace moed::client {

// A checked call (CheckCall) whose tensors are in a session. Threads: one at a time.
class SharedCall {
 public:
  // Whether the call's texts fit into a ring, as all do that a server takes.
  static bool CanSay(const ForwardCall& call);

  // Puts the call's tensors into the session: those that lie there already stay where they are, others are copied to parts of it. The
  // output's place is `output` when that lies there, else a part. Nothing when the session has not enough free memory.
  // The call must be one that CanSay allows.
  static std::optional<SharedCall> Place(const std::shared_ptr<SharedSession>& session, const ForwardCall& call,
                                         std::span<uint8_t> output);

  // Runs the call by the ring. Nothing when no slot is free. With an empty `output` the result has the data.
  std::optional<absl::StatusOr<ForwardResult>> Run(const CallOptions& options);

  // The request of an RPC of this call, and what its answer comes to.
  moe::v1::ForwardRequest Request() const;
  absl::StatusOr<ForwardResult> ResultOf(const moe::v1::ForwardResponse& response);

 private:
  SharedCall(std::shared_ptr<SharedSession> session, const ForwardCall& call, std::span<uint8_t> output)
      : session_(std::move(session)), call_(call), output_(output) {}
  bool PlaceAll();
  bool PlaceRouting();
  // The offset of `bytes` in the session, copied there unless they are there; nothing when there is no room.
  std::optional<uint64_t> In(std::span<const uint8_t> bytes);
  std::optional<uint64_t> NewPart(size_t bytes);
  // The offset of memory that lies in the session, held as long as this call may be under way; nothing for other memory.
  std::optional<uint64_t> Held(std::span<const uint8_t> bytes);
  const uint8_t* At(uint64_t offset) const;
  void TakeOutput(ForwardResult* result) const;
  absl::StatusOr<ForwardResult> Take(const ring::Completion& completion);

  std::shared_ptr<SharedSession> session_;
  const ForwardCall& call_;
  const std::span<uint8_t> output_;
  bool output_in_place_ = false;
  ring::Submission submission_ = {};
  std::vector<SharedSession::Part> parts_;
};

}  // namespace moed::client

#endif  // MOED_CLIENT_SHARED_CALLS_H_
