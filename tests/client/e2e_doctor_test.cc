// `moectl doctor` against real servers, and against none.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

std::string Model() { return CheckedInModel("ct-w4a16-g32-sym").path; }

// The result of the check whose name begins so; "" without one.
std::string ResultOf(const nlohmann::json& document, const std::string& name) {
  for (const nlohmann::json& check : document["checks"]) {
    if (check["check"].get<std::string>().rfind(name, 0) == 0) return check["result"];
  }
  return "";
}

nlohmann::json Doctor(const std::vector<std::string>& options, int exit_code) {
  std::vector<std::string> arguments = {kMoectl, "doctor", "--json"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  const Finished finished = RunToEnd(arguments);
  INFO("stdout: " << finished.out << "\nstderr: " << finished.err);
  REQUIRE(finished.exit_code == exit_code);
  const nlohmann::json document = nlohmann::json::parse(finished.out, nullptr, false);
  REQUIRE(document.is_object());
  return document;
}

}  // namespace

TEST_CASE("A server in order has no check that fails, by TCP and by its socket") {
  const RunningServer server({Model()});
  for (const std::string& address : {server.tcp(), server.unix_socket()}) {
    const nlohmann::json document = Doctor({"--server", address}, 0);
    CHECK(document["server"] == true);
    for (const char* name : {"address", "version", "health", "model ct-w4a16-g32-sym", "self-check"})
      CHECK(ResultOf(document, name) == "ok");
    CHECK_FALSE(ResultOf(document, "session").empty());
    CHECK_FALSE(ResultOf(document, "threads").empty());
  }
  const Finished text = server.Moectl({"doctor"});
  CHECK(text.exit_code == 0);
  CHECK(text.out.find("self-check of ct-w4a16-g32-sym/1") != std::string::npos);
}

TEST_CASE("Without a server the local part is judged, and the reason is named") {
  const TempDir folder(TempDir::Use::kForSockets);
  const nlohmann::json gone = Doctor({"--server", "unix:" + folder.File("none.sock")}, 1);
  CHECK(gone["server"] == false);
  CHECK(ResultOf(gone, "address") == "fail");
  CHECK_FALSE(ResultOf(gone, "open files").empty());
  CHECK(ResultOf(gone, "health").empty());
  WriteFile(folder.File("file"), "");
  CHECK(ResultOf(Doctor({"--server", "unix:" + folder.File("file")}, 1), "address") == "fail");
  CHECK(ResultOf(Doctor({"--server", "no port"}, 1), "connection options") == "fail");
}

TEST_CASE("Tokens and certificates are looked at, the server's own too") {
  const TempDir folder;
  const Authority authority("authority");
  const Identity identity = authority.Issue("server"), old = authority.Issue("old", -7200, -3600);
  WriteFile(folder.File("ca.pem"), authority.cert());
  WriteFile(folder.File("cert.pem"), identity.cert), WriteFile(folder.File("key.pem"), identity.key);
  WriteFile(folder.File("old.pem"), old.cert), WriteFile(folder.File("old_key.pem"), old.key);
  WriteFile(folder.File("token"), "token-0123456789abcdef\n"), WriteFile(folder.File("other"), "other-0123456789abcdef\n");
  const RunningServer server({Model()}, {"--tls-cert", folder.File("cert.pem"), "--tls-key", folder.File("key.pem"), "--token-file",
                                         folder.File("token")});
  const std::vector<std::string> way = {"--server", server.tcp(), "--tls-ca", folder.File("ca.pem")};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), way.begin(), way.end());
    return more;
  };
  const nlohmann::json good = Doctor(with({"--token-file", folder.File("token")}), 0);
  CHECK(ResultOf(good, "the server's certificate") == "warn");  // for a day only
  CHECK(ResultOf(good, "self-check") == "ok");
  CHECK(ResultOf(Doctor(with({"--token-file", folder.File("other")}), 1), "server") == "fail");
  CHECK(ResultOf(Doctor(with({"--token-file", folder.File("none")}), 1), "token file") == "fail");
  const nlohmann::json ended = Doctor(
      with({"--tls-cert", folder.File("old.pem"), "--tls-key", folder.File("old_key.pem"), "--token-file", folder.File("token")}),
      1);
  CHECK(ResultOf(ended, "--tls-cert") == "fail");
  CHECK(ResultOf(ended, "--tls-ca") != "fail");
}

}  // namespace moed::testing
