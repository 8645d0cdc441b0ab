#include "server/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr char kUnixPrefix[] = "unix:";

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

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// What HOST:PORT stands for; null with the reason in *why when it cannot be resolved.
Addresses Resolve(const std::string& address, std::string* why) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (failed == 0) return Addresses(found);
  *why = absl::StrCat("the host cannot be resolved: ", gai_strerror(failed));
  return nullptr;
}

std::string WhyNotTcp(const std::string& address) {
  std::string reason;
  const Addresses found = Resolve(address, &reason);
  for (const addrinfo* one = found.get(); one != nullptr && reason.empty(); one = one->ai_next) {
    const int error = TryBind(one->ai_family, one->ai_addr, one->ai_addrlen);
    if (error != 0) reason = ErrnoText(error);
  }
  return reason;
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  if (address.sa_family != AF_INET6) return false;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == IN_LOOPBACKNET);
}

// How a connection to a socket fails: 0 when it does not. Never waits: a full backlog is EAGAIN.
int TryConnect(const sockaddr_un& target) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  const int error = connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0 ? 0 : errno;
  close(fd);
  return error;
}

std::string WhyNotUnix(const std::string& address) {
  const sockaddr_un target = UnixAddress(address);
  const int error = TryBind(AF_UNIX, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  if (error == 0) unlink(target.sun_path);
  return error == 0 ? "" : ErrnoText(error);
}

}  // namespace

bool IsUnixAddress(const std::string& address) { return address.rfind(kUnixPrefix, 0) == 0; }

absl::StatusOr<bool> StaysOnThisMachine(const std::string& option, const std::string& address) {
  if (IsUnixAddress(address)) return true;
  std::string why;
  const Addresses found = Resolve(address, &why);
  if (found == nullptr) return CannotListen(option, address, why);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    if (!IsLoopback(*one->ai_addr)) return false;
  }
  return true;
}

std::vector<std::string> NumericAddresses(const std::string& address) {
  std::string why;
  const Addresses found = Resolve(address, &why);
  std::vector<std::string> all;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      continue;
    }
    std::string text = one->ai_family == AF_INET6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
    if (std::find(all.begin(), all.end(), text) == all.end()) all.push_back(std::move(text));
  }
  return all;
}

std::string BoundAddress(const std::string& address, int port) {
  if (IsUnixAddress(address)) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

absl::Status CheckNotTaken(const std::string& option, const std::string& address) {
  if (!IsUnixAddress(address)) return absl::OkStatus();
  const sockaddr_un target = UnixAddress(address);
  struct stat info{};
  if (lstat(target.sun_path, &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(
        absl::StrCat(option, ": wanted a free path or a socket, got ", address, ", which is another kind of file"));
  }
  const int error = TryConnect(target);
  if (error == ECONNREFUSED || error == ENOENT) return absl::OkStatus();
  const bool answered = error == 0 || error == EAGAIN;
  return absl::AlreadyExistsError(
      absl::StrCat(option, ": wanted a free address, got ", address, ", where another server answers",
                   answered ? "" : absl::StrCat(" or could: ", ErrnoText(error))));
}

absl::Status BindFailure(const std::string& option, const std::string& address) {
  const std::string reason = IsUnixAddress(address) ? WhyNotUnix(address) : WhyNotTcp(address);
  return CannotListen(option, address, reason.empty() ? "it could not be bound" : reason);
}

SocketMode::SocketMode(int mode) : before_(umask(static_cast<mode_t>(0777 & ~mode))) {}

SocketMode::~SocketMode() { umask(before_); }

}  // namespace moed
