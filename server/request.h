// From a request's bytes to its message, within bounds that hold before anything is built from the bytes.
//
// All methods of moe.v1 are raw: with generated handlers gRPC itself would answer a malformed message UNIMPLEMENTED.
// Threads: a ByteBudget may be used from any thread; the functions are pure.
#ifndef MOED_SERVER_REQUEST_H_
#define MOED_SERVER_REQUEST_H_

#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>

#include "absl/status/status.h"

namespace moed {

// How many bytes of requests may be in flight: received and not yet answered.
class ByteBudget {
 public:
  explicit ByteBudget(size_t limit) : limit_(limit) {}

  // RESOURCE_EXHAUSTED with the numbers when `bytes` more would exceed the limit; then nothing is taken.
  absl::Status Take(size_t bytes);
  void Give(size_t bytes) { used_ -= bytes; }
  size_t used() const { return used_; }

 private:
  const size_t limit_;
  std::atomic<size_t> used_{0};
};

// Checks the bytes (see CheckBytes in wire.h), parses them into `message`, and frees them. INVALID_ARGUMENT when they are no
// such message.
absl::Status ParseRequest(grpc::ByteBuffer* bytes, google::protobuf::Message* message);

// The bytes of an answer.
grpc::ByteBuffer Serialised(const google::protobuf::Message& message);

}  // namespace moed

#endif  // MOED_SERVER_REQUEST_H_
