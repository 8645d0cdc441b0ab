// Listening addresses as text: HOST:PORT or unix:PATH.
#ifndef MOED_SERVER_ADDRESS_H_
#define MOED_SERVER_ADDRESS_H_

#include <string>

#include "absl/status/status.h"

namespace moed {

// `address` with the port that was really bound in the place of port 0.
std::string BoundAddress(const std::string& address, int port);

// ALREADY_EXISTS when a living server answers on the socket `address` (unix:PATH), or when PATH is something else than a
// socket: gRPC would take the path over. OK for other addresses, and for sockets that a dead server left behind.
// Errors start with `option`.
absl::Status CheckNotTaken(const std::string& option, const std::string& address);

// Why `address` cannot be bound, found by trying: gRPC itself only says that it failed. Use after a failure.
// The error starts with `option`.
absl::Status BindFailure(const std::string& option, const std::string& address);

}  // namespace moed

#endif  // MOED_SERVER_ADDRESS_H_
