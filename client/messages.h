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
// The dtype, the rows and the bytes of the output.
DType OutputType(const ForwardCall& call);
int64_t OutputRows(const ForwardCall& call);
size_t OutputBytes(const ForwardCall& call);

// Fills the request of a checked call, but for the bytes of its hidden states.
void FillWire(const ForwardCall& call, moe::v1::ForwardRequest* request);

// INTERNAL when `output`, which came with `data_bytes` of data apart from it, has not the shape, dtype and bytes that `call` asks for.
absl::Status CheckOutput(const ForwardCall& call, const moe::v1::Tensor& output, size_t data_bytes);

// The answer to `call` without its output's data. INTERNAL when the routing that was asked for is missing or has another shape.
absl::StatusOr<ForwardResult> ResultOf(const ForwardCall& call, const moe::v1::ForwardResponse& response);

ServerStatus FromWire(const moe::v1::StatusResponse& response);
Explanation FromWire(const moe::v1::ExplainResponse& response);
SelfCheckResult FromWire(const moe::v1::SelfCheckResponse& response);

}  // namespace moed::client

#endif  // MOED_CLIENT_MESSAGES_H_
