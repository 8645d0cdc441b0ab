// Between the public structs and the wire's messages: the client's only place that knows both. No state.
#ifndef MOED_CLIENT_MESSAGES_H_
#define MOED_CLIENT_MESSAGES_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "moe/v1/moe.pb.h"

namespace moed::client {

moe::v1::DType ToWire(DType dtype);

// INVALID_ARGUMENT, naming the field with wanted and got, when spans and shapes contradict each other, or when both kinds of routing
// are given. Hidden states that are elsewhere have their bytes counted by `hidden.data` too.
absl::Status CheckCall(const ForwardCall& call);
// Bytes of the output.
size_t OutputBytes(const ForwardCall& call);

// Fills `request`; `with_data` false: without the bytes of the hidden states. INVALID_ARGUMENT, naming the field with wanted and got, when spans and shapes contradict each other, or
// when both kinds of routing are given.
absl::Status ToWire(const ForwardCall& call, moe::v1::ForwardRequest* request, bool with_data = true);

// Takes the answer to `call`; moves its output bytes. INTERNAL when its shape, dtype or byte count is not what was asked
// for. `with_data` false: the output is elsewhere.
absl::StatusOr<ForwardResult> FromWire(const ForwardCall& call, moe::v1::ForwardResponse* response, bool with_data = true);

ServerStatus FromWire(const moe::v1::StatusResponse& response);
Explanation FromWire(const moe::v1::ExplainResponse& response);
SelfCheckResult FromWire(const moe::v1::SelfCheckResponse& response);

}  // namespace moed::client

#endif  // MOED_CLIENT_MESSAGES_H_
