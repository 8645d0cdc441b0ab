// A forward request as it came, without the copy of its hidden states that a parse makes.
//
// hidden.data is nearly all of a request, and the only part that goes on as it is. So the rest is parsed from a stream that leaves
// these bytes out, and they stay in the transport's slices until the call knows its layer and has memory that this layer's device
// reads. Requests that do not come as every client writes them (hidden in pieces or twice, data twice or empty, lengths with
// padding) take the ordinary parse: then nothing is held back. Both ways accept the same bytes, with the same errors.
// Threads: one at a time, but for CopyHidden and WaitForHidden: a megabyte takes a thread some 100 microseconds, so a call for a
// GPU is queued first, and whoever starts to compute it helps whoever received it. The object must outlive all calls of both.
#ifndef MOED_SERVER_RECEIVED_FORWARD_H_
#define MOED_SERVER_RECEIVED_FORWARD_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "proto/moe/v1/moe.pb.h"

namespace moed {

class ReceivedForward {
 public:
  // Checks the bytes (see CheckBytes in wire.h), parses them but for hidden.data, and frees `bytes`. Call once. INVALID_ARGUMENT
  // when they are no ForwardRequest.
  absl::Status Parse(grpc::ByteBuffer* bytes);

  // The request; hidden has no data when hidden_bytes() > 0.
  const moe::v1::ForwardRequest& message() const { return message_; }

  // Bytes of hidden.data that are not in the message; 0: none, all that came is there.
  size_t hidden_bytes() const { return hidden_bytes_; }

  // Says where CopyHidden is to put these bytes. Call once, before either of the following; not at all when there are none.
  void PlaceHidden(std::byte* to);
  // Copies what no thread has begun to copy. Whoever ends the last piece lets the transport's memory go.
  void CopyHidden();
  // The same, and returns when all of it is copied.
  void WaitForHidden();

 private:
  struct Piece {
    std::byte* to;
    const void* from;
    size_t bytes;
  };
  moe::v1::ForwardRequest message_;
  std::vector<grpc::Slice> slices_;  // until the hidden states are copied
  size_t hidden_at_ = 0, hidden_bytes_ = 0;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0}, done_{0};  // pieces begun, with those that were asked for in vain; pieces copied
};

// As ReceivedForward::Parse; the overload that a handler of any request calls (see request.h).
inline absl::Status ParseRequest(grpc::ByteBuffer* bytes, ReceivedForward* request) { return request->Parse(bytes); }

}  // namespace moed

#endif  // MOED_SERVER_RECEIVED_FORWARD_H_
