// Who may call a real moed: TLS, client certificates, tokens, and what happens when their files change while it serves.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <future>
#include <string>
#include <vector>

#include "client/moed_client.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Catch::Matchers::Contains;
using client::ClientOptions;
using client::MoeClient;

constexpr char kToken[] = "team-a-0123456789";
constexpr char kOtherToken[] = "team-b-0123456789";

std::string Model() { return CheckedInModel("gptq-int4-g32-sym").path; }

// The files of a server and of its clients.
struct Files {
  TempDir dir;
  Authority servers{"server authority"};
  Authority clients{"client authority"};

  Files() {
    WriteIdentity("server", servers.Issue("server"));
    WriteFile(File("servers"), servers.cert());
    WriteFile(File("clients"), clients.cert());
  }
  std::string File(const std::string& name) const { return dir.File(name); }
  void WriteIdentity(const std::string& name, const Identity& identity) const {
    WriteFile(File(name + ".pem"), identity.cert);
    WriteFile(File(name + ".key"), identity.key);
  }
  std::vector<std::string> Tls() const { return {"--tls-cert", File("server.pem"), "--tls-key", File("server.key")}; }
  std::vector<std::string> MutualTls() const {
    std::vector<std::string> all = Tls();
    all.insert(all.end(), {"--tls-client-ca", File("clients")});
    return all;
  }
};

// Status on a connection of its own.
absl::Status Call(const std::string& address, ClientOptions options = {}) {
  options.own_connection = true;
  const auto client = MoeClient::Connect(address, options);
  return client.ok() ? (*client)->Status().status() : client.status();
}

absl::StatusOr<client::Health> HealthOf(const std::string& address, ClientOptions options = {}) {
  options.own_connection = true;
  const auto client = MoeClient::Connect(address, options);
  if (!client.ok()) return client.status();
  return (*client)->CheckHealth();
}

Finished Check(std::vector<std::string> more) {
  std::vector<std::string> arguments = {kMoed, "check", "--model", Model()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunToEnd(arguments);
}

// The code of an empty call of `method`.
grpc::StatusCode CodeOf(const std::string& address, const std::string& method) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  std::promise<grpc::Status> done;
  const grpc::Slice nothing;
  const grpc::ByteBuffer empty(&nothing, 1);
  stub.UnaryCall(&context, method, {}, &empty, &response, [&](grpc::Status status) { done.set_value(status); });
  return done.get_future().get().error_code();
}

}  // namespace

TEST_CASE("With TLS clients that trust the server's authority are served, others are not; the UNIX socket stays clear") {
  const Files files;
  const RunningServer server({Model()}, files.Tls());
  CHECK(Call(server.tcp(), {.tls_ca = files.File("servers")}).ok());
  CHECK(absl::IsUnavailable(Call(server.tcp())));
  CHECK(absl::IsUnavailable(Call(server.tcp(), {.tls_ca = files.File("clients")})));
  CHECK(Call(server.unix_socket()).ok());
  CHECK(RunToEnd({kMoectl, "--server", server.tcp(), "--tls-ca", files.File("servers"), "smoke"}).exit_code == 0);
  const Finished bench = RunToEnd({kMoectl, "--server", server.tcp(), "--tls-ca", files.File("servers"), "bench", "--layer", "0",
                                   "--seconds", "0.1"});
  CHECK(bench.exit_code == 0);
  const Finished clear = server.Moectl({"status"});
  CHECK(clear.exit_code == 2);
  CHECK_THAT(clear.FirstError(), Contains("UNAVAILABLE"));
}

TEST_CASE("With TLS a name is served on every address that it stands for, by one port") {
  const Files files;
  std::vector<std::string> options = files.Tls();
  options.insert(options.end(), {"--listen", "localhost:0"});
  const RunningServer server({Model()}, options);
  const auto ready = nlohmann::json::parse(ReadFile(server.ready_file()));
  std::string local;
  for (const auto& address : ready["addresses"]) {
    if (address.get<std::string>().rfind("localhost:", 0) == 0) local = address;
  }
  REQUIRE(local != "");
  CHECK(local != "localhost:0");
  CHECK(Call(local, {.tls_ca = files.File("servers")}).ok());
  CHECK(Call("127.0.0.1" + local.substr(9), {.tls_ca = files.File("servers")}).ok());
  files.WriteIdentity("server", files.servers.Issue("renewed"));
  CHECK(Call("127.0.0.1" + local.substr(9), {.tls_ca = files.File("servers")}).ok());
  CHECK(Call(server.tcp(), {.tls_ca = files.File("servers")}).ok());
}

TEST_CASE("With an authority of clients only clients that it signed are served") {
  const Files files;
  files.WriteIdentity("good", files.clients.Issue("good"));
  files.WriteIdentity("foreign", files.servers.Issue("foreign"));
  const RunningServer server({Model()}, files.MutualTls());
  const auto with = [&files](const std::string& name) {
    return ClientOptions{
        .tls_ca = files.File("servers"), .tls_cert = files.File(name + ".pem"), .tls_key = files.File(name + ".key")};
  };
  CHECK(Call(server.tcp(), with("good")).ok());
  CHECK(absl::IsUnavailable(Call(server.tcp(), with("foreign"))));
  CHECK(absl::IsUnavailable(Call(server.tcp(), {.tls_ca = files.File("servers")})));
  CHECK(RunToEnd({kMoectl, "--server", server.tcp(), "--tls-ca", files.File("servers"), "--tls-cert", files.File("good.pem"),
                  "--tls-key", files.File("good.key"), "health"})
            .exit_code == 0);
}

TEST_CASE("Changed certificates count for new connections, broken ones leave the old, and connections that exist stay") {
  const Files files;
  RunningServer server({Model()}, files.MutualTls());
  const Authority next("next authority");
  WriteFile(files.File("next"), next.cert());
  files.WriteIdentity("client", files.clients.Issue("client"));
  files.WriteIdentity("late", next.Issue("late"));
  ClientOptions old_trust{.own_connection = true, .tls_ca = files.File("servers"), .tls_cert = files.File("client.pem"),
                          .tls_key = files.File("client.key")};
  ClientOptions new_trust = old_trust;
  new_trust.tls_ca = files.File("next");
  const auto existing = MoeClient::Connect(server.tcp(), old_trust);
  REQUIRE(existing.ok());
  REQUIRE((*existing)->Status().ok());

  for (int round = 0; round < 2; ++round) {  // also when the broken ones were seen before
    WriteFile(files.File("server.pem"), "broken");
    CHECK(Call(server.tcp(), old_trust).ok());
    WriteFile(files.File("server.pem"), next.Issue("server").cert);  // not of the key
    CHECK(Call(server.tcp(), old_trust).ok());
    CHECK_FALSE(Call(server.tcp(), new_trust).ok());
  }
  files.WriteIdentity("server", next.Issue("server"));
  CHECK(Call(server.tcp(), new_trust).ok());
  CHECK(absl::IsUnavailable(Call(server.tcp(), old_trust)));
  CHECK((*existing)->Status().ok());

  ClientOptions late = new_trust;
  late.tls_cert = files.File("late.pem");
  late.tls_key = files.File("late.key");
  CHECK_FALSE(Call(server.tcp(), late).ok());
  WriteFile(files.File("clients"), next.cert());
  CHECK(Call(server.tcp(), late).ok());
  CHECK_FALSE(Call(server.tcp(), new_trust).ok());
  CHECK_THAT(server.process().Stdout(), Contains("TLS stays as it was") && Contains("TLS certificates read again"));
}

TEST_CASE("With tokens every call but health needs one that the file holds, and no text has a token") {
  const Files files;
  WriteFile(files.File("tokens"), std::string("# team a\n") + kToken + "\n");
  WriteFile(files.File("mine"), kToken);
  WriteFile(files.File("wrong"), kOtherToken);
  RunningServer server({Model()}, {"--token-file", files.File("tokens"), "--log-level", "trace"});
  const ClientOptions mine{.token_file = files.File("mine")}, wrong{.token_file = files.File("wrong")};
  for (const std::string& address : {server.tcp(), server.unix_socket()}) {
    CHECK(Call(address, mine).ok());
    CHECK(absl::IsUnauthenticated(Call(address)));
    const absl::Status refused = Call(address, wrong);
    CHECK(absl::IsUnauthenticated(refused));
    CHECK_THAT(std::string(refused.message()), Contains("authorization") && !Contains(kOtherToken));
    CHECK(*HealthOf(address) == client::Health::kServing);
    CHECK(*HealthOf(address, wrong) == client::Health::kServing);
  }
  for (const char* method : {"Forward", "SelfCheck", "Status", "Explain"}) {
    CHECK(CodeOf(server.tcp(), std::string("/moe.v1.Moe/") + method) == grpc::StatusCode::UNAUTHENTICATED);
  }
  CHECK(RunToEnd({kMoectl, "--server", server.tcp(), "--token-file", files.File("mine"), "smoke"}).exit_code == 0);
  CHECK(RunToEnd({kMoectl, "--server", server.tcp(), "explain"}, {"MOED_TOKEN_FILE=" + files.File("mine")}).exit_code == 0);
  const Finished refused = server.Moectl({"status"});
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.FirstError(), Contains("UNAUTHENTICATED"));
  const std::string printed = server.process().Stdout() + server.process().Stderr();
  CHECK_THAT(printed, !Contains(kToken) && !Contains(kOtherToken));
}

TEST_CASE("Sessions of shared memory want the token too, when they open and for each call") {
  const Files files;
  WriteFile(files.File("tokens"), kToken);
  WriteFile(files.File("mine"), kToken);
  WriteFile(files.File("wrong"), kOtherToken);
  const RunningServer server({Model()}, {"--token-file", files.File("tokens")});
  const auto forward = [](MoeClient& client) {
    const std::vector<uint8_t> hidden(256 * 2, 0);
    client::ForwardCall call;
    call.hidden = {client::DType::kBf16, 1, 256, hidden};
    return client.Forward(call).status();
  };
  const auto connect = [&](client::Transport transport, const std::string& token_file) {
    auto client = MoeClient::Connect(server.tcp(), {.own_connection = true, .transport = transport, .token_file = token_file});
    REQUIRE(client.ok());
    return *std::move(client);
  };
  for (const auto transport : {client::Transport::kAuto, client::Transport::kSharedMemory, client::Transport::kRing}) {
    INFO(client::TransportName(transport));
    CHECK(forward(*connect(transport, files.File("mine"))).ok());
    CHECK(absl::IsUnauthenticated(forward(*connect(transport, files.File("wrong")))));
    CHECK(absl::IsUnauthenticated(forward(*connect(transport, ""))));
  }
  const auto open = connect(client::Transport::kRing, files.File("mine"));
  REQUIRE(forward(*open).ok());
  WriteFile(files.File("tokens"), kOtherToken);
  CHECK(WaitFor([&] { return absl::IsUnauthenticated(forward(*open)); }));
}

TEST_CASE("A token that is put into the file is taken soon, one that is taken out is not") {
  const Files files;
  WriteFile(files.File("tokens"), kToken);
  WriteFile(files.File("a"), kToken);
  WriteFile(files.File("b"), kOtherToken);
  const RunningServer server({Model()}, {"--token-file", files.File("tokens")});
  const ClientOptions a{.token_file = files.File("a")}, b{.token_file = files.File("b")};
  CHECK(Call(server.tcp(), a).ok());
  WriteFile(files.File("tokens"), std::string(kToken) + "\n" + kOtherToken + "\n");
  CHECK(WaitFor([&] { return Call(server.tcp(), b).ok(); }));
  CHECK(Call(server.tcp(), a).ok());
  WriteFile(files.File("tokens"), kOtherToken);
  CHECK(WaitFor([&] { return absl::IsUnauthenticated(Call(server.tcp(), a)); }));
  CHECK(Call(server.tcp(), b).ok());
}

TEST_CASE("serve and check refuse the same options about who may call, with exit code 2 and the error first") {
  const Files files;
  WriteFile(files.File("tokens"), "short\n");
  const struct {
    std::vector<std::string> options;
    std::string in_first_line;
  } cases[] = {
      {{"--listen", "0.0.0.0:0"}, "--listen: wanted loopback"},
      {{"--tls-cert", files.File("server.pem")}, "--tls-cert: wanted --tls-key"},
      {{"--tls-cert", files.File("server.pem"), "--tls-key", files.File("server.pem")}, "--tls-key: wanted a PEM private key"},
      {{"--tls-client-ca", files.File("clients")}, "--tls-client-ca: wanted --tls-cert"},
      {{"--token-file", files.File("tokens")}, "--token-file: " + files.File("tokens") + " line 1"},
      {{"--admin-token-file", "/nonexistent"}, "--admin-token-file: cannot open /nonexistent"},
  };
  for (const auto& each : cases) {
    for (const char* command : {"serve", "check"}) {
      std::vector<std::string> arguments = {kMoed, command, "--model", Model()};
      arguments.insert(arguments.end(), each.options.begin(), each.options.end());
      const Finished finished = RunToEnd(arguments);
      CHECK(finished.exit_code == 2);
      CHECK_THAT(finished.FirstError(), Contains("error: " + each.in_first_line));
    }
  }
  CHECK(Check({"--listen", "0.0.0.0:0", "--allow-insecure"}).exit_code == 0);
  std::vector<std::string> tls = files.MutualTls();
  tls.insert(tls.end(), {"--listen", "0.0.0.0:0", "--health-listen", "0.0.0.0:0"});
  CHECK(Check(tls).exit_code == 0);
}

TEST_CASE("Channelz answers on the main addresses, and only when asked for") {
  constexpr char kMethod[] = "/grpc.channelz.v1.Channelz/GetServers";
  const RunningServer with({Model()}, {"--channelz"});
  CHECK(CodeOf(with.tcp(), kMethod) == grpc::StatusCode::OK);
  const RunningServer without({Model()});
  CHECK(CodeOf(without.tcp(), kMethod) == grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace moed::testing
