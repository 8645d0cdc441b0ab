#include "proto/ring/session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace moed::ring {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int kMostDescriptors = 4;  // that are received, to be closed, when a packet brings more than one

// Closes all descriptors of `message` but the first, which is returned; -1 without any. `count` is how many there were.
int TakeDescriptor(msghdr* message, int* count) {
  int first = -1;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t descriptors = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < descriptors; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
      if ((*count)++ == 0) {
        first = fd;
      } else {
        close(fd);
      }
    }
  }
  return first;
}

}  // namespace

int MakeRegion(size_t bytes) {
  const int fd = memfd_create("moed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  // Pages that are there now cannot be missing when the server touches them, and are counted as the client's.
  int error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? posix_fallocate(fd, 0, static_cast<off_t>(bytes)) : errno;
  if (error == 0 && fcntl(fd, F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) error = errno;
  if (error == 0) return fd;
  close(fd);
  errno = error;
  return -1;
}

std::string CheckRegion(int fd, size_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return "wanted a memfd, got another kind of file";
  if ((seals & kSizeSeals) != kSizeSeals) return "wanted a memfd with F_SEAL_SHRINK and F_SEAL_GROW, got one whose size may change";
  if ((seals & F_SEAL_WRITE) != 0) return "wanted a memfd that can be written, got one with F_SEAL_WRITE";
  struct stat info{};
  if (fstat(fd, &info) != 0) return "the descriptor cannot be examined";
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return "wanted " + std::to_string(bytes) + " bytes as the request says, got " + std::to_string(info.st_size);
  }
  if (static_cast<uint64_t>(info.st_blocks) * 512 < bytes) {
    return "wanted all pages allocated (posix_fallocate), got " + std::to_string(info.st_blocks * 512) + " of " +
           std::to_string(bytes) + " bytes";
  }
  return "";
}

void* MapRegion(int fd, size_t bytes) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); }

int SendPacket(int socket, const void* data, size_t bytes, int fd) {
  iovec part = {const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes) ? 0 : sent < 0 ? errno : EPROTO;
}

int ReceivePacket(int socket, void* data, size_t bytes, int* fd) {
  *fd = -1;
  iovec part = {data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno;
  int count = 0;
  *fd = TakeDescriptor(&message, &count);
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (got == static_cast<ssize_t>(bytes) && count <= 1 && !cut) return 0;
  if (*fd >= 0) close(*fd);
  *fd = -1;
  return got == 0 && count == 0 ? ECONNRESET : EPROTO;
}

}  // namespace moed::ring
