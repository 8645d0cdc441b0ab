// Who could reach a server: what is refused before it listens, and the ways out that the text names.
#include <catch2/catch.hpp>
#include <string>

#include "server/security.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using namespace testing;  // NOLINT: certificates and files

struct Bench {
  TempDir dir;
  Authority authority{"test authority"};
  ServeOptions options;

  Bench() {
    const Identity server = authority.Issue("server");
    WriteFile(dir.File("cert"), server.cert);
    WriteFile(dir.File("key"), server.key);
    WriteFile(dir.File("ca"), authority.cert());
    WriteFile(dir.File("tokens"), "0123456789abcdef\n");
    options.listen = {"127.0.0.1:0"};
  }
  void UseTls() {
    options.tls_cert = dir.File("cert");
    options.tls_key = dir.File("key");
  }
  std::string Error() const {
    const absl::Status status = CheckSecurity(options);
    return status.ok() ? "no error" : std::string(status.message());
  }
};

}  // namespace

TEST_CASE("Clear text beyond loopback is refused with the ways out, and each of them is one") {
  for (const std::string address : {"0.0.0.0:50061", "[::]:0", "10.1.2.3:50061"}) {
    Bench bench;
    bench.options.listen.push_back("unix:/run/moed.sock");
    bench.options.listen.push_back(address);
    CHECK_THAT(bench.Error(), Contains("--listen: wanted loopback or a unix:PATH") && Contains(address) &&
                                  Contains("--tls-cert FILE") && Contains("127.0.0.1:PORT") && Contains("--allow-insecure") &&
                                  !Contains("tokens"));
    bench.options.token_file = bench.dir.File("tokens");
    CHECK_THAT(bench.Error(), Contains("would see the tokens") && Contains("--allow-insecure"));
    bench.options.allow_insecure = true;
    CHECK(bench.Error() == "no error");
    bench.options.allow_insecure = false;
    bench.UseTls();
    CHECK(bench.Error() == "no error");
    bench.options.tls_cert.clear();
    bench.options.tls_key.clear();
    bench.options.listen.pop_back();
    CHECK(bench.Error() == "no error");
  }
}

TEST_CASE("An address that other machines reach is warned of unless it is encrypted and asks who calls") {
  Bench bench;
  CHECK(SecurityWarnings(bench.options).empty());
  bench.options.listen.push_back("0.0.0.0:0");
  bench.options.allow_insecure = true;
  const std::vector<std::string> both = SecurityWarnings(bench.options);
  REQUIRE(both.size() == 2);
  CHECK_THAT(both[0], Contains("--allow-insecure") && Contains("0.0.0.0:0") && Contains("clear text"));
  CHECK_THAT(both[1], Contains("whoever reaches 0.0.0.0:0 may call"));
  bench.UseTls();
  CHECK(SecurityWarnings(bench.options) == std::vector<std::string>{both[1]});
  bench.options.token_file = bench.dir.File("tokens");
  CHECK(SecurityWarnings(bench.options).empty());
  bench.options.token_file.clear();
  bench.options.tls_client_ca = bench.dir.File("ca");
  CHECK(SecurityWarnings(bench.options).empty());
}

TEST_CASE("The address of health may be anywhere in clear text") {
  Bench bench;
  bench.options.health_listen = "0.0.0.0:8080";
  CHECK(bench.Error() == "no error");
}

TEST_CASE("TLS options that miss another are refused by name") {
  Bench bench;
  bench.options.tls_cert = bench.dir.File("cert");
  CHECK_THAT(bench.Error(), Contains("--tls-cert: wanted --tls-key with it"));
  bench.options.tls_cert.clear();
  bench.options.tls_key = bench.dir.File("key");
  CHECK_THAT(bench.Error(), Contains("--tls-key: wanted --tls-cert with it"));
  bench.options.tls_key.clear();
  bench.options.tls_client_ca = bench.dir.File("ca");
  CHECK_THAT(bench.Error(), Contains("--tls-client-ca: wanted --tls-cert and --tls-key"));
  bench.UseTls();
  CHECK(bench.Error() == "no error");
}

TEST_CASE("Files of certificates and tokens are checked before anything listens") {
  Bench bench;
  bench.UseTls();
  WriteFile(bench.dir.File("key"), bench.authority.Issue("other").key);
  CHECK_THAT(bench.Error(), Contains("--tls-key") && Contains("another key"));
  bench.options.tls_cert.clear();
  bench.options.tls_key.clear();
  bench.options.token_file = bench.dir.File("none");
  CHECK_THAT(bench.Error(), Contains("--token-file: cannot open " + bench.dir.File("none")));
  bench.options.token_file = bench.dir.File("tokens");
  WriteFile(bench.dir.File("admin"), "too-short\n");
  bench.options.admin_token_file = bench.dir.File("admin");
  CHECK_THAT(bench.Error(), Contains("--admin-token-file: " + bench.dir.File("admin") + " line 1") && !Contains("too-short"));
}

TEST_CASE("Channelz, which asks for no token, is refused beside tokens") {
  Bench bench;
  bench.options.channelz = true;
  CHECK(bench.Error() == "no error");
  bench.options.token_file = bench.dir.File("tokens");
  CHECK_THAT(bench.Error(), Contains("--channelz") && Contains("--token-file"));
}

}  // namespace moed
