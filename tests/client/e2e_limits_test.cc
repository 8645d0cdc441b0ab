// What one client may have in flight, and which calls come from one client: a real moed that is busy with one call.
#include <catch2/catch.hpp>
#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "client/moed_client.h"
#include "tests/client/running_server.h"
#include "tests/client/slow_model.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Catch::Matchers::Contains;
using client::ClientOptions;
using client::MoeClient;

constexpr int64_t kLimit = 2000;  // rows: some seconds of work

// By messages unless the transport is said.
std::unique_ptr<MoeClient> ClientOf(const std::string& address, ClientOptions options = {}) {
  options.own_connection = true;
  if (options.transport == client::Transport::kAuto) options.transport = client::Transport::kRpc;
  auto client = MoeClient::Connect(address, options);
  REQUIRE(client.ok());
  return *std::move(client);
}

absl::Status Forward(MoeClient& client, int64_t rows) { return ForwardZeros(client, rows, std::chrono::minutes(10)); }

// A server of the slow model that lets a client have kLimit rows in flight.
struct Bench {
  TempDir dir;

  RunningServer Serve(std::vector<std::string> more) const {
    WriteSlowModel(dir.path());
    const std::vector<std::string> slow = SlowModelOptions();
    more.insert(more.end(), slow.begin(), slow.end());
    more.insert(more.end(), {"--client-rows", std::to_string(kLimit)});
    return RunningServer({dir.path()}, more);
  }
};

// Calls that the server's queue let in so far.
uint64_t Accepted(MoeClient& client) {
  const absl::StatusOr<client::ServerStatus> status = client.Status();
  REQUIRE(status.ok());
  return status->queue.accepted;
}

// A call of `client` that leaves one row of the limit; on return the server has it.
std::future<absl::Status> StartLongCall(MoeClient& client) {
  const uint64_t before = Accepted(client);
  auto call = std::async(std::launch::async, [&client] { return Forward(client, kLimit - 1); });
  CHECK(WaitFor([&] { return Accepted(client) > before; }));
  return call;
}

// That `second` is refused while `first` has nearly all that one client may have, and is let in afterwards.
void CheckOneClient(MoeClient& first, MoeClient& second) {
  auto call = StartLongCall(first);
  const absl::Status refused = Forward(second, 2);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Contains("one client may have 2000 rows in flight: ") && Contains(" are, 2 more"));
  CHECK(second.Status().ok());
  CHECK(call.get().ok());
  CHECK(Forward(second, 2).ok());
}

// That `second` is let in while `first` has nearly all that one client may have.
void CheckTwoClients(MoeClient& first, MoeClient& second) {
  auto call = StartLongCall(first);
  CHECK(Forward(second, 2).ok());
  CHECK(call.get().ok());
}

}  // namespace

TEST_CASE("Connections from one host are one client, as are all of the UNIX socket, and the two are not the same") {
  const Bench bench;
  const RunningServer server = bench.Serve({});
  const auto tcp = ClientOf(server.tcp()), tcp_too = ClientOf(server.tcp());
  const auto local = ClientOf(server.unix_socket()), local_too = ClientOf(server.unix_socket());
  CheckOneClient(*tcp, *tcp_too);
  CheckOneClient(*local, *local_too);
  CheckTwoClients(*tcp, *local);
  const auto ring = ClientOf(server.tcp(), {.transport = client::Transport::kRing});
  CheckOneClient(*ring, *local);  // a session is one of a UNIX socket too
  CheckOneClient(*local, *ring);
  const absl::Status alone = Forward(*tcp, kLimit + 1);
  CHECK_THAT(std::string(alone.message()), Contains("2000 rows in flight: 0 are, 2001 more"));
}

TEST_CASE("A token is a client, on whatever connection; a token that nobody asked for is none") {
  const Bench bench;
  const TempDir tokens;
  WriteFile(tokens.File("a"), "team-a-0123456789\n");
  WriteFile(tokens.File("b"), "team-b-0123456789\n");
  WriteFile(tokens.File("all"), ReadFile(tokens.File("a")) + ReadFile(tokens.File("b")));
  const ClientOptions a{.token_file = tokens.File("a")}, b{.token_file = tokens.File("b")};
  {
    const RunningServer server = bench.Serve({"--token-file", tokens.File("all")});
    const auto one = ClientOf(server.tcp(), a), one_too = ClientOf(server.unix_socket(), a), other = ClientOf(server.tcp(), b);
    CheckOneClient(*one, *one_too);
    CheckTwoClients(*one, *other);
    ClientOptions ring = a;
    ring.transport = client::Transport::kRing;
    CheckOneClient(*ClientOf(server.tcp(), ring), *one);
  }
  const RunningServer open = bench.Serve({});
  CheckOneClient(*ClientOf(open.tcp(), a), *ClientOf(open.tcp(), b));
}

TEST_CASE("Where the server asks for certificates their subject is the client") {
  const Bench bench;
  const TempDir files;
  const Authority authority("test authority");
  const auto write = [&](const std::string& name) {
    const Identity identity = authority.Issue(name);
    WriteFile(files.File(name + ".pem"), identity.cert);
    WriteFile(files.File(name + ".key"), identity.key);
    return ClientOptions{.tls_ca = files.File("ca"), .tls_cert = files.File(name + ".pem"), .tls_key = files.File(name + ".key")};
  };
  WriteFile(files.File("ca"), authority.cert());
  write("server");
  const ClientOptions a = write("a"), b = write("b");
  const RunningServer server = bench.Serve({"--tls-cert", files.File("server.pem"), "--tls-key", files.File("server.key"),
                                            "--tls-client-ca", files.File("ca")});
  const auto one = ClientOf(server.tcp(), a), one_too = ClientOf(server.tcp(), a), other = ClientOf(server.tcp(), b);
  CheckOneClient(*one, *one_too);
  CheckTwoClients(*one, *other);
}

TEST_CASE("A request of more bytes than one client may have is refused with the numbers") {
  const Bench bench;
  WriteSlowModel(bench.dir.path());
  const RunningServer server({bench.dir.path()}, {"--client-bytes", "5000"});
  const auto client = ClientOf(server.tcp());
  CHECK(Forward(*client, 2).ok());
  const absl::Status refused = Forward(*client, 3);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Contains("one client may have 5000 bytes of requests in flight: 0 are, 6"));
  CHECK(Forward(*client, 2).ok());
}

}  // namespace moed::testing
