// Between the public structs and the wire's messages: the client's only place that knows both. No state.
#ifndef MOED_CLIENT_MESSAGES_H_
#define MOED_CLIENT_MESSAGES_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "moe/v1/moe.pb.h"

namespace moed::client {

// Fills `request`. INVALID_ARGUMENT, naming the field with wanted and got, when spans and shapes contradict each other, or
// when both kinds of routing are given.
absl::Status ToWire(const ForwardCall& call, moe::v1::ForwardRequest* request);

// Takes the answer to `call`; moves its output bytes. INTERNAL when its shape, dtype or byte count is not what was asked
// for.
absl::StatusOr<ForwardResult> FromWire(const ForwardCall& call, moe::v1::ForwardResponse* response);

ServerStatus FromWire(const moe::v1::StatusResponse& response);
Explanation FromWire(const moe::v1::ExplainResponse& response);
SelfCheckResult FromWire(const moe::v1::SelfCheckResponse& response);

}  // namespace moed::client

#endif  // MOED_CLIENT_MESSAGES_H_
