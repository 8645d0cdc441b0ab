// ConnectBare of doctor_facts.h: sockets alone, so that each way to fail has its own words.
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "client/doctor_facts.h"

namespace moed::client {
namespace {

std::string ErrnoText(int error) { return std::generic_category().message(error); }

absl::Status Unreachable(int error, bool unix_socket) {
  const char* fix = "Start moed with this --listen, or name its address by --server.";
  if (error == EACCES || error == EPERM) {
    fix = unix_socket ? "Run as the user that moed runs as, or start moed with --unix-mode 0660 and a group of both."
                      : "A rule of this host forbids the connection: see its firewall.";
  } else if (error == ENOENT) {
    fix = "No socket is there: start moed with this --listen, or mount the folder of its sockets.";
  } else if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    fix = "Nothing answers from there: see the address, the route and the firewalls between.";
  } else if (error == EINPROGRESS || error == EAGAIN) {
    fix = "The server takes no connection: it hangs or is stopped. See its log and its processor time.";
  }
  return absl::UnavailableError(absl::StrCat(ErrnoText(error), "\n", fix));
}

// 0 or the errno of a connection within the limit.
int ConnectWithin(int socket, const sockaddr* address, socklen_t size, std::chrono::milliseconds limit) {
  if (connect(socket, address, size) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd polled = {socket, POLLOUT, 0};
  if (poll(&polled, 1, static_cast<int>(limit.count())) != 1) return ETIMEDOUT;
  int error = 0;
  socklen_t bytes = sizeof(error);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

// Blocking again, with a limit on each read and write.
void Limit(int socket, std::chrono::milliseconds limit) {
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
  const timeval time = {limit.count() / 1000, limit.count() % 1000 * 1000};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
}

BareConnection ConnectUnix(const std::string& path, std::chrono::milliseconds limit) {
  BareConnection result;
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return result.status = Unreachable(errno, true), result;
  if (!S_ISSOCK(found.st_mode)) {
    result.status = absl::UnavailableError("not a socket\nName the path that moed listens at.");
    return result;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  result.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int error = ConnectWithin(result.socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address), limit);
  if (error != 0) return result.status = Unreachable(error, true), result;
  Limit(result.socket, limit);
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(result.socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0) result.server = peer.pid;
  return result;
}

BareConnection ConnectTcp(const std::string& address, std::chrono::milliseconds limit) {
  BareConnection result;
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found); error != 0) {
    result.status = absl::UnavailableError(
        absl::StrCat("\"", host, "\" is no known host: ", gai_strerror(error), "\nCorrect the name, or this host's name service."));
    return result;
  }
  int error = ENOENT;
  for (const addrinfo* each = found; each != nullptr && error != 0; each = each->ai_next) {
    if (result.socket >= 0) close(result.socket);
    result.socket = socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    error = ConnectWithin(result.socket, each->ai_addr, each->ai_addrlen, limit);
  }
  freeaddrinfo(found);
  if (error != 0) return result.status = Unreachable(error, false), result;
  Limit(result.socket, limit);
  return result;
}

}  // namespace

BareConnection ConnectBare(const std::string& address, std::chrono::milliseconds limit) {
  constexpr char kUnix[] = "unix:";
  BareConnection result =
      address.rfind(kUnix, 0) == 0 ? ConnectUnix(address.substr(sizeof(kUnix) - 1), limit) : ConnectTcp(address, limit);
  if (!result.status.ok() && result.socket >= 0) close(result.socket), result.socket = -1;
  return result;
}

}  // namespace moed::client
