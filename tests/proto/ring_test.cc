// The shared-memory half of the wire contract: memory whose size cannot change, packets with descriptors, and a doorbell that loses
// no ring.
#include <catch2/catch.hpp>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "proto/ring/doorbell.h"
#include "proto/ring/layout.h"
#include "proto/ring/session.h"

namespace moed::ring {
namespace {

using Catch::Matchers::Contains;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr size_t kBytes = 64 << 10;

struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

struct Pair {
  Pair() { REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0); }
  ~Pair() {
    for (const int end : ends) close(end);
  }
  int ends[2];
};

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

int PlainMemfd(unsigned flags, int seals, size_t bytes, bool allocated) {
  const int fd = memfd_create("test", flags);
  REQUIRE(fd >= 0);
  REQUIRE(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  if (allocated) REQUIRE(posix_fallocate(fd, 0, static_cast<off_t>(bytes)) == 0);
  if (seals != 0) REQUIRE(fcntl(fd, F_ADD_SEALS, seals) == 0);
  return fd;
}

}  // namespace

TEST_CASE("A region that was made is one, and its size and seals stay as they are") {
  const Descriptor region(MakeRegion(kBytes));
  REQUIRE(region.fd >= 0);
  CHECK(CheckRegion(region.fd, kBytes).empty());
  CHECK(ftruncate(region.fd, 0) != 0);
  CHECK(ftruncate(region.fd, 2 * kBytes) != 0);
  CHECK(fcntl(region.fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  void* const memory = MapRegion(region.fd, kBytes);
  REQUIRE(memory != MAP_FAILED);
  std::memset(memory, 1, kBytes);
  CHECK(munmap(memory, kBytes) == 0);
}

TEST_CASE("What is no region is refused with the reason") {
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;
  const Descriptor unsealed(PlainMemfd(MFD_ALLOW_SEALING, 0, kBytes, true));
  CHECK_THAT(CheckRegion(unsealed.fd, kBytes), Contains("F_SEAL_SHRINK"));
  const Descriptor half(PlainMemfd(MFD_ALLOW_SEALING, F_SEAL_SHRINK, kBytes, true));
  CHECK_THAT(CheckRegion(half.fd, kBytes), Contains("F_SEAL_GROW"));
  const Descriptor unwritable(PlainMemfd(MFD_ALLOW_SEALING, kSize | F_SEAL_WRITE, kBytes, true));
  CHECK_THAT(CheckRegion(unwritable.fd, kBytes), Contains("F_SEAL_WRITE"));
  const Descriptor sparse(PlainMemfd(MFD_ALLOW_SEALING, kSize, kBytes, false));
  CHECK_THAT(CheckRegion(sparse.fd, kBytes), Contains("wanted all pages allocated") && Contains("got 0 of 65536"));
  const Descriptor small(PlainMemfd(MFD_ALLOW_SEALING, kSize, kBytes, true));
  CHECK_THAT(CheckRegion(small.fd, 2 * kBytes), Contains("wanted 131072 bytes") && Contains("got 65536"));
  const Descriptor file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  CHECK_THAT(CheckRegion(file.fd, kBytes), Contains("wanted a memfd"));
  CHECK_THAT(CheckRegion(-1, kBytes), Contains("wanted a memfd"));
}

TEST_CASE("A packet arrives whole, with its descriptor") {
  const Pair pair;
  const Descriptor region(MakeRegion(kBytes));
  OpenRequest sent;
  sent.region_bytes = kBytes;
  REQUIRE(SendPacket(pair.ends[0], &sent, sizeof(sent), region.fd) == 0);
  OpenRequest got = {};
  int fd = -1;
  REQUIRE(ReceivePacket(pair.ends[1], &got, sizeof(got), &fd) == 0);
  const Descriptor received(fd);
  CHECK(got.region_bytes == kBytes);
  CHECK(CheckRegion(received.fd, kBytes).empty());
  CHECK((fcntl(received.fd, F_GETFD) & FD_CLOEXEC) != 0);
  REQUIRE(SendPacket(pair.ends[0], &sent, sizeof(sent), -1) == 0);
  REQUIRE(ReceivePacket(pair.ends[1], &got, sizeof(got), &fd) == 0);
  CHECK(fd == -1);
}

TEST_CASE("Packets of another size, or with several descriptors, are refused and no descriptor is kept") {
  const Pair pair;
  const int before = OpenDescriptors();
  OpenRequest got;
  int fd = 0;
  for (const size_t bytes : {size_t{1}, sizeof(OpenRequest) - 1, sizeof(OpenRequest) + 1}) {
    const std::string packet(bytes, 'x');
    REQUIRE(SendPacket(pair.ends[0], packet.data(), packet.size(), 0) == 0);
    CHECK(ReceivePacket(pair.ends[1], &got, sizeof(got), &fd) == EPROTO);
    CHECK(fd == -1);
  }
  for (const size_t count : {size_t{2}, size_t{4}, size_t{20}}) {
    OpenRequest request;
    iovec part = {&request, sizeof(request)};
    std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
    msghdr message = {};
    message.msg_iov = &part, message.msg_iovlen = 1;
    message.msg_control = control.data(), message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS, rights->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memset(CMSG_DATA(rights), 0, count * sizeof(int));  // standard input, `count` times
    REQUIRE(sendmsg(pair.ends[0], &message, 0) == static_cast<ssize_t>(sizeof(request)));
    CHECK(ReceivePacket(pair.ends[1], &got, sizeof(got), &fd) == EPROTO);
    CHECK(fd == -1);
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("The end of a connection is told apart from bad packets") {
  Pair pair;
  close(pair.ends[0]);
  pair.ends[0] = dup(pair.ends[1]);
  OpenAnswer got;
  int fd = 0;
  CHECK(ReceivePacket(pair.ends[1], &got, sizeof(got), &fd) == ECONNRESET);
}

TEST_CASE("A wait ends at its limit when nothing changes, and at once when something did") {
  for (const microseconds spin : {microseconds(0), microseconds(50), microseconds(1'000'000)}) {
    std::atomic<uint32_t> word{7}, waits{0};
    const auto begin = steady_clock::now();
    CHECK_FALSE(Wait(word, 7, waits, spin, milliseconds(20)));
    CHECK(steady_clock::now() - begin >= milliseconds(19));
    CHECK(Wait(word, 6, waits, spin, seconds(60)));
    CHECK(steady_clock::now() - begin < seconds(20));
  }
}

TEST_CASE("No ring is lost between a thread that sleeps and one that rings, whoever is faster") {
  constexpr uint32_t kRounds = 20'000;
  for (const microseconds spin : {microseconds(0), microseconds(5)}) {
    std::atomic<uint32_t> ping{0}, ping_waits{0}, pong{0}, pong_waits{0};
    std::atomic<bool> lost{false};
    const auto wait = [&](std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& waits) {
      const auto end = steady_clock::now() + seconds(20);
      while (!Wait(word, old, waits, spin, seconds(20))) {
        if (steady_clock::now() >= end) return lost.store(true);
      }
    };
    std::thread other([&] {
      for (uint32_t i = 0; i < kRounds && !lost; ++i) {
        wait(ping, i, ping_waits);
        pong.store(i + 1, std::memory_order_release);
        Ring(pong, pong_waits);
      }
    });
    for (uint32_t i = 0; i < kRounds && !lost; ++i) {
      ping.store(i + 1, std::memory_order_release);
      Ring(ping, ping_waits);
      wait(pong, i, pong_waits);
    }
    other.join();
    CHECK_FALSE(lost.load());
    CHECK(pong == kRounds);
  }
}

TEST_CASE("A ring fits where it says") {
  CHECK(RingBytes(1) == sizeof(Header) + 2048);
  alignas(64) static char memory[sizeof(Header) + 4 * sizeof(Slot)];
  CHECK(reinterpret_cast<char*>(SlotsAt(memory)) == memory + sizeof(Header));
  CHECK(reinterpret_cast<char*>(SlotsAt(memory) + 4) == memory + RingBytes(4));
}

}  // namespace moed::ring
