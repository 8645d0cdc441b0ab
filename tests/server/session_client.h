// A client of the session socket made of system calls, for tests that break its rules.
#ifndef MOED_TESTS_SERVER_SESSION_CLIENT_H_
#define MOED_TESTS_SERVER_SESSION_CLIENT_H_

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "proto/ring/layout.h"
#include "proto/ring/session.h"

namespace moed::testing {

class SessionClient {
 public:
  explicit SessionClient(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    connected_ = connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~SessionClient() {
    Close();
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  SessionClient(const SessionClient&) = delete;
  SessionClient& operator=(const SessionClient&) = delete;

  bool connected() const { return connected_; }
  int socket_fd() const { return socket_; }
  std::byte* memory() const { return memory_; }
  ring::Header& header() const { return *ring::HeaderAt(memory_); }
  ring::Slot& slot(uint32_t index) const { return ring::SlotsAt(memory_)[index]; }

  void Close() {
    if (socket_ >= 0) close(std::exchange(socket_, -1));
  }

  bool Send(const ring::OpenRequest& request, int fd) { return ring::SendPacket(socket_, &request, sizeof(request), fd) == 0; }

  // The answer; code -1 when the server closed the connection instead, or said nothing for ten seconds.
  ring::OpenAnswer Receive() {
    ring::OpenAnswer answer;
    int fd = -1;
    pollfd polled = {socket_, POLLIN, 0};
    if (poll(&polled, 1, 10'000) != 1 || ring::ReceivePacket(socket_, &answer, sizeof(answer), &fd) != 0) answer.code = -1;
    return answer;
  }

  // Opens a session with a ring at its beginning.
  ring::OpenAnswer Open(size_t bytes, uint32_t slots) {
    const int region = ring::MakeRegion(bytes);
    bytes_ = bytes;
    memory_ = static_cast<std::byte*>(ring::MapRegion(region, bytes));
    ring::OpenRequest request;
    request.region_bytes = bytes;
    request.ring_slots = slots;
    const bool sent = Send(request, region);
    close(region);
    ring::OpenAnswer answer = sent ? Receive() : ring::OpenAnswer{};
    if (!sent) answer.code = -1;
    return answer;
  }

  // Whether the server closes the connection within ten seconds.
  bool Ended() {
    pollfd polled = {socket_, POLLIN, 0};
    char byte;
    return poll(&polled, 1, 10'000) == 1 && recv(socket_, &byte, 1, 0) <= 0;
  }

 private:
  int socket_ = -1;
  bool connected_ = false;
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SERVER_SESSION_CLIENT_H_
