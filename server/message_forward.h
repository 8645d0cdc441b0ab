// A forward whose request and answer are messages, from the parsed request to the bytes of the answer; what sends them is up to who
// derives from it: a unary call, or an item of a stream.
#ifndef MOED_SERVER_MESSAGE_FORWARD_H_
#define MOED_SERVER_MESSAGE_FORWARD_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "proto/moe/v1/moe.pb.h"
#include "server/client_limits.h"
#include "server/forward_caller.h"
#include "server/forward_record.h"
#include "server/received_forward.h"
#include "server/region.h"
#include "server/wire.h"

namespace moed {

// Threads: as ForwardCaller says. The checked call views `*request` and `hidden`.
class MessageForward : public ForwardCaller {
 public:
  explicit MessageForward(std::unique_ptr<ReceivedForward> parsed) : request(std::move(parsed)) {}

  void Prepare() final;
  void Answer(ForwardAnswer answer) final;

  // Takes rows of the caller's share; RESOURCE_EXHAUSTED when the client has too much in flight.
  virtual absl::Status TakeRows(int64_t rows) = 0;
  // Of this call, until it is over. Whoever derives from this ends it.
  virtual ForwardRecord& record() = 0;

  const std::unique_ptr<ReceivedForward> request;
  std::optional<CallMemory> hidden;  // nothing when they are in the message or in memory that the client named
  std::shared_ptr<Region> hidden_region, output_region;  // of sessions
  MutableTensorView output;          // its shape and dtype
  bool output_follows = true;        // in the answer; else it is in memory that the client named

 private:
  // The bytes of a ForwardResponse. The call is over.
  virtual void Deliver(grpc::ByteBuffer response) = 0;

  grpc::Slice head_;                         // of the answer: what comes before the output's data
  moe::v1::ForwardResponse rest_;            // and what comes after, as far as it is known
};

}  // namespace moed

#endif  // MOED_SERVER_MESSAGE_FORWARD_H_
