#include "server/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr char kUnixPrefix[] = "unix:";

bool IsUnix(const std::string& address) { return address.rfind(kUnixPrefix, 0) == 0; }

std::string ErrnoText(int error) { return std::generic_category().message(error); }

absl::Status CannotListen(const std::string& option, const std::string& address, const std::string& reason) {
  return absl::UnavailableError(absl::StrCat(option, ": wanted an address that can be bound, got ", address, ": ", reason));
}

sockaddr_un UnixAddress(const std::string& address) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;
  std::strncpy(out.sun_path, address.c_str() + sizeof(kUnixPrefix) - 1, sizeof(out.sun_path) - 1);
  return out;
}

// 0, or the errno of binding and listening.
int TryBind(int family, const sockaddr* address, socklen_t length) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  const int error = bind(fd, address, length) == 0 && listen(fd, 1) == 0 ? 0 : errno;
  close(fd);
  return error;
}

std::string WhyNotTcp(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (failed != 0) return absl::StrCat("the host cannot be resolved: ", gai_strerror(failed));
  std::string reason;
  for (const addrinfo* one = found; one != nullptr && reason.empty(); one = one->ai_next) {
    const int error = TryBind(one->ai_family, one->ai_addr, one->ai_addrlen);
    if (error != 0) reason = ErrnoText(error);
  }
  freeaddrinfo(found);
  return reason;
}

std::string WhyNotUnix(const std::string& address) {
  const sockaddr_un target = UnixAddress(address);
  const int error = TryBind(AF_UNIX, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  if (error == 0) unlink(target.sun_path);
  return error == 0 ? "" : ErrnoText(error);
}

}  // namespace

std::string BoundAddress(const std::string& address, int port) {
  if (IsUnix(address)) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

absl::Status CheckNotTaken(const std::string& option, const std::string& address) {
  if (!IsUnix(address)) return absl::OkStatus();
  const sockaddr_un target = UnixAddress(address);
  struct stat info{};
  if (lstat(target.sun_path, &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(
        absl::StrCat(option, ": wanted a free path or a socket, got ", address, ", which is another kind of file"));
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return CannotListen(option, address, ErrnoText(errno));
  const bool answered = connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0;
  close(fd);
  if (!answered) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(option, ": wanted a free address, got ", address, ", where another server answers"));
}

absl::Status BindFailure(const std::string& option, const std::string& address) {
  const std::string reason = IsUnix(address) ? WhyNotUnix(address) : WhyNotTcp(address);
  return CannotListen(option, address, reason.empty() ? "gRPC could not bind it" : reason);
}

}  // namespace moed
