// The two messages of grpc.health.v1's Check, written and read by hand: Debian ships their service inside gRPC but not
// their generated code. HealthCheckRequest has one field, `string service = 1`; HealthCheckResponse one, the enum
// `status = 1` (0 UNKNOWN, 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN). Private to the client library; no state.
#ifndef MOED_CLIENT_HEALTH_MESSAGES_H_
#define MOED_CLIENT_HEALTH_MESSAGES_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/statusor.h"
#include "client/moed_client.h"

namespace moed::client {

inline constexpr char kHealthCheckMethod[] = "/grpc.health.v1.Health/Check";

grpc::ByteBuffer EncodeHealthRequest(const std::string& service);
// INTERNAL when the bytes are no such message. A value that is not known here is kUnknown.
absl::StatusOr<Health> DecodeHealthResponse(const grpc::ByteBuffer& bytes);

}  // namespace moed::client

#endif  // MOED_CLIENT_HEALTH_MESSAGES_H_
