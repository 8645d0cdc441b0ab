// Addresses: which stay on this machine, which sockets are taken, and permissions from the first moment on.
#include <catch2/catch.hpp>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "server/address.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;

// A folder whose name is short enough for a socket in it.
struct SocketFolder {
  std::string path = "/tmp/moed-XXXXXX";
  SocketFolder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~SocketFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string socket() const { return path + "/s"; }
};

// A bound socket at `path`; listens when `backlog` is not negative.
struct BoundSocket {
  int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  BoundSocket(const std::string& path, int backlog) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    REQUIRE(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    if (backlog >= 0) REQUIRE(listen(fd, backlog) == 0);
  }
  ~BoundSocket() { close(fd); }
};

mode_t ModeOf(const std::string& path) {
  struct stat info{};
  REQUIRE(lstat(path.c_str(), &info) == 0);
  return info.st_mode & 0777;
}

}  // namespace

TEST_CASE("Loopback addresses and UNIX sockets stay on this machine, others do not") {
  for (const char* address : {"127.0.0.1:0", "127.9.9.9:80", "[::1]:0", "[::ffff:127.0.0.1]:1", "localhost:0", "unix:/run/s"}) {
    INFO(address);
    const auto local = StaysOnThisMachine("--listen", address);
    REQUIRE(local.ok());
    CHECK(*local);
  }
  for (const char* address : {"0.0.0.0:0", "[::]:0", "10.0.0.1:50061", "192.168.1.1:0", "[fe80::1]:0", "[::ffff:10.0.0.1]:0",
                              "0:50061", "128.0.0.1:0", "126.255.255.255:1", "*:1"}) {
    INFO(address);
    const auto local = StaysOnThisMachine("--listen", address);
    REQUIRE(local.ok());
    CHECK_FALSE(*local);
  }
  for (const char* address : {"no-such-host.invalid:1", "unix-abstract:5"}) {
    INFO(address);
    const auto unknown = StaysOnThisMachine("--listen", address);
    CHECK_THAT(std::string(unknown.status().message()), Contains("--listen") && Contains(address) && Contains("resolved"));
  }
}

TEST_CASE("An address as numbers has every address that it stands for once") {
  using Addresses = std::vector<std::string>;
  CHECK(NumericAddresses("127.0.0.1:80") == Addresses{"127.0.0.1:80"});
  CHECK(NumericAddresses("[::1]:0") == Addresses{"[::1]:0"});
  CHECK(NumericAddresses("no-such-host.invalid:1").empty());
  const Addresses local = NumericAddresses("localhost:80");
  REQUIRE(!local.empty());
  for (const std::string& address : local) CHECK((address == "127.0.0.1:80" || address == "[::1]:80"));
  CHECK(std::set<std::string>(local.begin(), local.end()).size() == local.size());
}

TEST_CASE("A socket of a dead server is free, one of a living server is taken, also when it accepts nobody") {
  const SocketFolder folder;
  const std::string address = "unix:" + folder.socket();
  CHECK(CheckNotTaken("--listen", address).ok());  // nothing there
  { const BoundSocket dead(folder.socket(), 1); }
  CHECK(CheckNotTaken("--listen", address).ok());
  std::filesystem::remove(folder.socket());
  const BoundSocket busy(folder.socket(), 0);
  for (int i = 0; i < 4; ++i) {  // the backlog of one fills, and nobody waits for it
    const absl::Status taken = CheckNotTaken("--listen", address);
    CHECK(absl::IsAlreadyExists(taken));
    CHECK_THAT(std::string(taken.message()), Contains(address) && Contains("another server answers"));
  }
  const int client = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_un target{};
  target.sun_family = AF_UNIX;
  std::strncpy(target.sun_path, folder.socket().c_str(), sizeof(target.sun_path) - 1);
  connect(client, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  CHECK(absl::IsAlreadyExists(CheckNotTaken("--listen", address)));
  close(client);
}

TEST_CASE("A path that is no socket is never taken over") {
  const SocketFolder folder;
  CHECK_THAT(std::string(CheckNotTaken("--listen", "unix:" + folder.path).message()), Contains("another kind of file"));
}

TEST_CASE("A socket is born with exactly the mode, whatever the umask, which comes back afterwards") {
  const SocketFolder folder;
  const mode_t before = umask(0022);
  for (const mode_t mode : {0600, 0660, 0666, 0777}) {
    {
      const SocketMode set(static_cast<int>(mode));
      const BoundSocket socket(folder.socket(), -1);
      CHECK(ModeOf(folder.socket()) == mode);
    }
    std::filesystem::remove(folder.socket());
    CHECK(umask(0022) == 0022);
  }
  umask(before);
}

}  // namespace moed
