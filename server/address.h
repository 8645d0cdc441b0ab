// Listening addresses as text: HOST:PORT or unix:PATH. What may be bound, and with which permissions.
#ifndef MOED_SERVER_ADDRESS_H_
#define MOED_SERVER_ADDRESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed {

// Whether `address` is unix:PATH.
bool IsUnixAddress(const std::string& address);

// Whether nobody on another machine can reach `address`: unix:PATH, or a host all of whose addresses are loopback ones. UNAVAILABLE
// when the host cannot be resolved. Errors start with `option`.
absl::StatusOr<bool> StaysOnThisMachine(const std::string& option, const std::string& address);

// What HOST:PORT stands for, each address once, as numbers: {"[::1]:80", "127.0.0.1:80"} for localhost:80. Empty when the host
// cannot be resolved.
std::vector<std::string> NumericAddresses(const std::string& address);

// `address` with the port that was really bound in the place of port 0.
std::string BoundAddress(const std::string& address, int port);

// ALREADY_EXISTS when a living server has the socket `address` (unix:PATH), or when PATH is something else than a socket, or one
// that does not tell, such as another user's: gRPC would take the path over. OK for other addresses, and for sockets that a dead
// server left behind. Never waits. Errors start with `option`.
absl::Status CheckNotTaken(const std::string& option, const std::string& address);

// Why `address` cannot be bound, found by trying: gRPC itself only says that it failed. Use after a failure.
// The error starts with `option`.
absl::Status BindFailure(const std::string& option, const std::string& address);

// While it exists, sockets are born with exactly these permissions, from the first moment on: it sets the process's umask, so no
// other thread may make files meanwhile, or they are born with no more than `mode`.
class SocketMode {
 public:
  explicit SocketMode(int mode);
  ~SocketMode();
  SocketMode(const SocketMode&) = delete;
  SocketMode& operator=(const SocketMode&) = delete;

 private:
  const mode_t before_;
};

}  // namespace moed

#endif  // MOED_SERVER_ADDRESS_H_
