// From an address to a gRPC channel, and from gRPC's errors to absl's. Private to the client library; no state.
#ifndef MOED_CLIENT_CHANNEL_H_
#define MOED_CLIENT_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"

namespace moed::client {

// OK for HOST:PORT, [IPV6]:PORT and unix:PATH; INVALID_ARGUMENT with the address and what was wanted otherwise.
absl::Status CheckAddress(const std::string& address);

// A channel that connects on its first call. Errors: those of CheckAddress and MakeCredentials, INVALID_ARGUMENT for a message
// limit that gRPC cannot hold.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& address, const ClientOptions& options);

// The same code and text; UNAVAILABLE also names the address, since the text then comes from the transport.
absl::Status ToAbsl(const grpc::Status& status, const std::string& address);

}  // namespace moed::client

#endif  // MOED_CLIENT_CHANNEL_H_
