// A forward request as it came, without the copy of its hidden states that a parse makes.
//
// hidden.data is nearly all of a request, and the only part that goes on as it is. So the rest is parsed from a stream that leaves
// these bytes out, and they stay in the transport's slices until the call knows its layer and has memory that this layer's device
// reads. Requests that do not come as every client writes them (hidden in pieces or twice, data twice or empty, lengths with
// padding) take the ordinary parse: then nothing is held back. Both ways accept the same bytes, with the same errors.
// Threads: one at a time, but for TakePart and WaitPast: a megabyte takes a thread some 100 microseconds, so a call for a GPU is
// queued first, and several threads copy together, among them the one that computes. Pieces are begun in order, so what is copied
// is a prefix but for the pieces that other threads are at. The object, and the memory that it copies to, must outlive all calls of
// both.
#ifndef MOED_SERVER_RECEIVED_FORWARD_H_
#define MOED_SERVER_RECEIVED_FORWARD_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/incoming_rows.h"
#include "proto/moe/v1/moe.pb.h"
#include "server/copy_helpers.h"

namespace moed {

class ReceivedForward final : public IncomingRows, public SharedCopy {
 public:
  // Checks the bytes (see CheckBytes in wire.h), parses them but for hidden.data, and takes `bytes`, which is empty then: they are
  // freed at once where nothing is held back. Call once. INVALID_ARGUMENT when they are no ForwardRequest.
  absl::Status Parse(grpc::ByteBuffer* bytes);

  // The request; hidden has no data when hidden_bytes() > 0.
  const moe::v1::ForwardRequest& message() const { return message_; }

  // Bytes of hidden.data that are not in the message; 0: none, all that came is there.
  size_t hidden_bytes() const { return hidden_bytes_; }

  // Says where these bytes are to be put. Call once, before any of the following; not at all when there are none.
  void PlaceHidden(std::byte* to);
  // Copies what no thread has begun to copy.
  void TakePart() override;
  // As IncomingRows says; of the bytes at the place that PlaceHidden gave.
  size_t WaitPast(size_t bytes) override;
  // After a TakePart of the same thread: waits for the pieces that other threads are at, and frees the transport's memory. It takes
  // some microseconds, so this is not for the thread that computes. Where nobody calls it the memory goes with the object.
  void LetGo();

 private:
  bool CopyPiece();

  struct Piece {
    std::byte* to;
    const void* from;
    size_t bytes;
  };
  moe::v1::ForwardRequest message_;
  grpc::ByteBuffer bytes_;                 // until the hidden states are copied
  std::vector<std::string_view> slices_;   // of bytes_, none empty
  size_t hidden_at_ = 0, hidden_bytes_ = 0;
  std::vector<Piece> pieces_;
  std::unique_ptr<std::atomic<bool>[]> copied_;  // of each piece
  std::atomic<size_t> next_{0}, done_{0};  // pieces begun, with those that were asked for in vain; pieces copied
  size_t prefix_pieces_ = 0, prefix_bytes_ = 0;  // that are known to be copied; WaitPast's
};

// As ReceivedForward::Parse; the overload that a handler of any request calls (see request.h).
inline absl::Status ParseRequest(grpc::ByteBuffer* bytes, ReceivedForward* request) { return request->Parse(bytes); }

}  // namespace moed

#endif  // MOED_SERVER_RECEIVED_FORWARD_H_
