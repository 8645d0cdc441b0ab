// A forward call as one message each way, with one copy of its tensors on this side: hidden states go from the caller's memory into the
// slice that is sent, or are sent from where they lie when that memory can be kept; the output goes from the slices that came straight
// to its place.
//
// Threads: none of its own.
#ifndef MOED_CLIENT_MESSAGE_CALL_H_
#define MOED_CLIENT_MESSAGE_CALL_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"

namespace moed::client {

// The bytes of the ForwardRequest of `call`, which was checked (CheckCall). Hidden states with an owner are not copied: it is held until
// the transport has done with them, which may be after the call.
grpc::ByteBuffer EncodeRequest(const ForwardCall& call);

// The answer to `call`, whose output goes to `output`; with a null `output` it becomes the result's data. INTERNAL when it is no
// ForwardResponse, or its output has not the shape, dtype and bytes that were asked for; `output` may be written then.
absl::StatusOr<ForwardResult> DecodeResponse(const ForwardCall& call, grpc::ByteBuffer* response, std::span<uint8_t> output);

}  // namespace moed::client

#endif  // MOED_CLIENT_MESSAGE_CALL_H_
