// TLS files: which are refused and why, and which state of them is in use.
#include <catch2/catch.hpp>
#include <string>

#include "server/tls.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using namespace testing;  // NOLINT: certificates and files

// The files of a server, and how to change them.
struct Bench {
  TempDir dir;
  Authority authority{"test authority"};
  Identity server = authority.Issue("server");
  TlsPaths paths{dir.File("server.pem"), dir.File("server.key"), dir.File("clients.pem")};

  Bench() {
    Write(server);
    WriteFile(paths.client_ca, authority.cert());
  }
  void Write(const Identity& identity) {
    WriteFile(paths.cert, identity.cert);
    WriteFile(paths.key, identity.key);
  }
  std::string Error() const {
    const auto read = ReadTls(paths);
    return read.ok() ? "no error" : std::string(read.status().message());
  }
};

}  // namespace

TEST_CASE("Good files are read as they are, with intermediate certificates and without authorities of clients") {
  Bench bench;
  const auto read = ReadTls(bench.paths);
  REQUIRE(read.ok());
  CHECK(read->cert == bench.server.cert);
  CHECK(read->key == bench.server.key);
  CHECK(read->client_ca == bench.authority.cert());
  WriteFile(bench.paths.cert, bench.server.cert + bench.authority.cert());
  bench.paths.client_ca.clear();
  CHECK(bench.Error() == "no error");
}

TEST_CASE("Missing, broken and mismatched files are refused with option, file and reason") {
  Bench bench;
  const auto bad = [&bench](const std::string& path, const std::string& text, const std::string& good) {
    WriteFile(path, text);
    const std::string error = bench.Error();
    WriteFile(path, good);
    CHECK_THAT(error, Contains(path) && !Contains("PRIVATE"));
    return error;
  };
  const std::string cert = bench.server.cert, key = bench.server.key;
  CHECK_THAT(bad(bench.paths.cert, "", cert), Contains("--tls-cert: wanted at least one PEM certificate") && Contains("got none"));
  CHECK_THAT(bad(bench.paths.cert, key, cert), Contains("--tls-cert") && Contains("got none"));
  CHECK_THAT(bad(bench.paths.cert, cert.substr(0, cert.size() / 2), cert), Contains("--tls-cert"));
  CHECK_THAT(bad(bench.paths.cert, cert + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", cert),
             Contains("--tls-cert: wanted PEM certificates") && Contains("a broken one after 1"));
  CHECK_THAT(bad(bench.paths.key, "", key), Contains("--tls-key: wanted a PEM private key"));
  CHECK_THAT(bad(bench.paths.key, cert, key), Contains("--tls-key: wanted a PEM private key"));
  CHECK_THAT(bad(bench.paths.key, Encrypted(key), key), Contains("--tls-key") && Contains("without a passphrase"));
  CHECK_THAT(bad(bench.paths.key, bench.authority.Issue("other").key, key),
             Contains("--tls-key: wanted the key of the certificate in " + bench.paths.cert) && Contains("got another key"));
  CHECK_THAT(bad(bench.paths.client_ca, key, bench.authority.cert()), Contains("--tls-client-ca"));
  CHECK(bench.Error() == "no error");
  for (const std::string& path : {bench.paths.cert, bench.paths.key, bench.paths.client_ca}) {
    const std::string text = ReadFile(path);
    std::remove(path.c_str());
    CHECK_THAT(bench.Error(), Contains("--tls-") && Contains(path) && Contains("No such file"));
    WriteFile(path, text);
  }
  bench.paths.key = bench.dir.path();
  CHECK_THAT(bench.Error(), Contains("--tls-key") && Contains("not a regular file"));
}

TEST_CASE("A certificate that is not valid now is refused") {
  Bench bench;
  bench.Write(bench.authority.Issue("server", -7200, -3600));
  CHECK_THAT(bench.Error(), Contains("--tls-cert") && Contains("expired"));
  bench.Write(bench.authority.Issue("server", 3600, 7200));
  CHECK_THAT(bench.Error(), Contains("--tls-cert") && Contains("not valid yet"));
}

TEST_CASE("New files are in use when all of them fit, and until then the old ones are") {
  Bench bench;
  const auto files = TlsFiles::Open(bench.paths);
  REQUIRE(files.ok());
  const auto before = (*files)->Current();
  CHECK((*files)->Current() == before);  // unchanged files are not read again
  const Identity next = bench.authority.Issue("next");
  WriteFile(bench.paths.cert, next.cert);
  CHECK((*files)->Current() == before);
  WriteFile(bench.paths.cert, "broken");
  CHECK((*files)->Current() == before);
  WriteFile(bench.paths.cert, next.cert);
  WriteFile(bench.paths.key, next.key);
  const auto after = (*files)->Current();
  CHECK(after->cert == next.cert);
  CHECK(after->key == next.key);
  std::remove(bench.paths.cert.c_str());
  CHECK((*files)->Current() == after);
  CHECK(before->cert == bench.server.cert);  // whoever still has the old ones keeps them
}

}  // namespace moed
