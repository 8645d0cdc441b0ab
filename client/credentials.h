// What a client shows and believes, from files: the authorities of servers, its own certificate, its token. Private to the client
// library; no state.
#ifndef MOED_CLIENT_CREDENTIALS_H_
#define MOED_CLIENT_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"

namespace moed::client {

// TLS when `options` names a file for it, else clear text. NOT_FOUND for a file that cannot be read; INVALID_ARGUMENT for one that
// is no PEM, a certificate without its key, a key without its certificate, and TLS to a UNIX socket, which moed serves in clear
// text. Errors name the field.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const std::string& address,
                                                                          const ClientOptions& options);

// The first token of options.token_file, "" without one. A file as moed takes it: a token a line, '#' starts a comment line.
// NOT_FOUND and INVALID_ARGUMENT (no token, or one that moed would not take) name the field; no text contains the token.
absl::StatusOr<std::string> ReadToken(const ClientOptions& options);

}  // namespace moed::client

#endif  // MOED_CLIENT_CREDENTIALS_H_
