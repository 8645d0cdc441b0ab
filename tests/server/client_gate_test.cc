// Who may call which plane, and what the texts give away.
#include <grpcpp/test/server_context_test_spouse.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "server/client_gate.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using testing::TempDir;
using testing::WriteFile;

constexpr char kData[] = "data-token-0123456789";
constexpr char kAdmin[] = "admin-token-0123456789";

struct Bench {
  TempDir dir;
  std::string data = dir.File("data"), admin = dir.File("admin");

  Bench() {
    WriteFile(data, kData);
    WriteFile(admin, kAdmin);
  }
  std::unique_ptr<ClientGate> Open(const std::string& data_file, const std::string& admin_file) const {
    ClientGate::Rules rules;
    rules.token_file = data_file;
    rules.admin_token_file = admin_file;
    auto gate = ClientGate::Open(rules, [] { return std::chrono::steady_clock::now(); });
    REQUIRE(gate.ok());
    return *std::move(gate);
  }
};

// Admit for a call with these authorization headers.
absl::Status Admit(const ClientGate& gate, Plane plane, const std::vector<std::string>& headers) {
  grpc::ServerContext context;
  grpc::testing::ServerContextTestSpouse spouse(&context);
  for (const std::string& header : headers) spouse.AddClientMetadata("authorization", header);
  return gate.Admit(plane, context);
}

std::string Bearer(const std::string& token) { return "Bearer " + token; }

}  // namespace

TEST_CASE("Each plane takes the tokens of its own file only") {
  const Bench bench;
  const auto gate = bench.Open(bench.data, bench.admin);
  CHECK(Admit(*gate, Plane::kData, {Bearer(kData)}).ok());
  CHECK(Admit(*gate, Plane::kAdmin, {Bearer(kAdmin)}).ok());
  CHECK(absl::IsUnauthenticated(Admit(*gate, Plane::kData, {Bearer(kAdmin)})));
  CHECK(absl::IsUnauthenticated(Admit(*gate, Plane::kAdmin, {Bearer(kData)})));
}

TEST_CASE("Without files both planes are open, with admin tokens alone the data plane is, with data tokens alone neither") {
  const Bench bench;
  const auto open = bench.Open("", "");
  CHECK(Admit(*open, Plane::kData, {}).ok());
  CHECK(Admit(*open, Plane::kAdmin, {}).ok());
  const auto admin_only = bench.Open("", bench.admin);
  CHECK(Admit(*admin_only, Plane::kData, {}).ok());
  CHECK(absl::IsUnauthenticated(Admit(*admin_only, Plane::kAdmin, {})));
  const auto data_only = bench.Open(bench.data, "");
  for (const std::vector<std::string>& headers : {std::vector<std::string>{}, {Bearer(kData)}, {Bearer(kAdmin)}}) {
    const absl::Status refused = Admit(*data_only, Plane::kAdmin, headers);
    CHECK(absl::IsUnauthenticated(refused));
    CHECK_THAT(std::string(refused.message()), Contains("--token-file alone"));
  }
}

TEST_CASE("A header that is missing, repeated, of another kind or with an unknown token is refused without its text") {
  const Bench bench;
  const auto gate = bench.Open(bench.data, "");
  const struct {
    std::vector<std::string> headers;
    const char* got;
  } cases[] = {
      {{}, "got none"},
      {{Bearer(kData), Bearer(kData)}, "got several"},
      {{std::string("Basic ") + kData}, "got another kind"},
      {{kData}, "got another kind"},
      {{""}, "got another kind"},
      {{"Bearer "}, "got none"},
      {{Bearer(kData) + "x"}, "a token that is not known"},
      {{Bearer(kData) + " "}, "a token that is not known"},
      {{Bearer(std::string(100'000, 'x'))}, "a token that is not known"},
  };
  for (const auto& each : cases) {
    const absl::Status refused = Admit(*gate, Plane::kData, each.headers);
    CHECK(absl::IsUnauthenticated(refused));
    const std::string text(refused.message());
    CHECK_THAT(text, Contains("authorization: wanted") && Contains(each.got) && !Contains("data-token"));
    CHECK(text.size() < 200);
  }
  CHECK(Admit(*gate, Plane::kData, {std::string("bearer ") + kData}).ok());  // schemes have no case
}

TEST_CASE("A peer's host is its address without the port, and all UNIX sockets are one") {
  CHECK(HostOfPeer("ipv4:10.0.0.1:4711") == "ipv4:10.0.0.1");
  CHECK(HostOfPeer("ipv4:10.0.0.1:1") == HostOfPeer("ipv4:10.0.0.1:2"));
  CHECK(HostOfPeer("ipv6:%5B::1%5D:4711") == "ipv6:%5B::1%5D");
  CHECK(HostOfPeer("unix:") == "unix");
  CHECK(HostOfPeer("unix:/run/moed.sock") == "unix");
}

}  // namespace moed
