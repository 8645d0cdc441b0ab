// moectl's command line without a server: what it refuses, with exit code 2 and the error as the first line on stderr.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace moed::testing {
namespace {

constexpr char kMoectl[] = "client/moectl";
constexpr char kGolden[] = "tests/data/gptq-int4-g32-sym/golden.safetensors";

Finished Moectl(const std::vector<std::string>& arguments) {
  std::vector<std::string> all = {kMoectl};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return RunToEnd(all);
}

struct Refused {
  std::vector<std::string> arguments;
  std::vector<std::string> in_first_line;
};

void CheckRefused(const std::vector<Refused>& cases) {
  for (const Refused& each : cases) {
    const Finished finished = Moectl(each.arguments);
    INFO("stderr: " << finished.err);
    CHECK(finished.exit_code == 2);
    CHECK(finished.out.empty());
    CHECK(finished.FirstError().rfind("moectl: ", 0) == 0);
    for (const std::string& text : each.in_first_line) CHECK(finished.FirstError().find(text) != std::string::npos);
  }
}

std::vector<std::string> Forward(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"forward", "--layer", "0", "--input", kGolden};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace

TEST_CASE("Help and version exit with 0, and help has examples") {
  const Finished version = Moectl({"--version"});
  CHECK(version.exit_code == 0);
  CHECK(version.out.find("0.1.0") != std::string::npos);
  const std::vector<std::vector<std::string>> commands = {{},        {"status"},  {"explain"}, {"health"},
                                                          {"smoke"}, {"forward"}, {"bench"},   {"doctor"},
                                                          {"replay"}};
  for (std::vector<std::string> arguments : commands) {
    arguments.push_back("--help");
    const Finished help = Moectl(arguments);
    CHECK(help.exit_code == 0);
    CHECK(help.out.find("Examples:") != std::string::npos);
  }
}

TEST_CASE("Unknown names and missing options are refused by name") {
  CheckRefused({
      {{}, {"command", "status", "got none"}},
      {{"frob"}, {"command", "forward", "got \"frob\""}},
      {{"--frob", "status"}, {"--frob"}},
      {{"status", "--frob"}, {"--frob"}},
      {{"forward", "--layer", "0", "--hidden", "0.x"}, {"--input"}},
      {{"forward", "--input", kGolden, "--hidden", "0.x"}, {"--layer"}},
      {{"bench"}, {"--layer"}},
      {{"doctor", "--frob"}, {"--frob"}},
      {{"replay"}, {"FILE"}},
      {{"replay", "/nowhere"}, {"/nowhere", "wanted a recording"}},
      {{"replay", kGolden}, {kGolden, "metadata format", "a recorded call"}},
      {{"replay", kGolden, "--repeat", "0"}, {"--repeat"}},
      {{"replay", kGolden, "--transport", "carrier"}, {"--transport"}},
      {{"replay", kGolden, "--also", "nonsense"}, {"nonsense"}},
      {{"doctor", "--timeout", "0"}, {"--timeout"}},
      {Forward({"--hidden", "0.x", "--ids", "0.topk_ids"}), {"--ids", "--weights"}},
      {Forward({"--hidden", "0.x", "--weights", "0.topk_weights"}), {"--weights", "--ids"}},
      {Forward({"--hidden", "0.x", "--ids", "0.topk_ids", "--weights", "0.topk_weights", "--logits", "0.router_logits"}),
       {"--logits"}},
      {Forward({"--hidden", "0.x", "--max-rel", "0.1"}), {"--max-rel", "--expect"}},
      {Forward({"--hidden", "0.x", "--skip-rows", "1"}), {"--skip-rows", "--expect"}},
  });
}

TEST_CASE("Values out of range are refused with the range and the value") {
  CheckRefused({
      {{"explain", "--layer", "-1"}, {"--layer", "-1"}},
      {{"explain", "--layer", "x"}, {"--layer", "\"x\""}},
      {{"smoke", "--tokens", "65"}, {"--tokens", "64", "65"}},
      {{"bench", "--layer", "0", "--tokens", "0"}, {"--tokens", "0"}},
      {{"bench", "--layer", "0", "--seconds", "nan"}, {"--seconds", "nan"}},
      {{"bench", "--layer", "0", "--concurrency", "1,0"}, {"--concurrency", "\"0\""}},
      {{"--timeout", "0", "status"}, {"--timeout"}},
      {Forward({"--hidden", "0.x", "--dtype", "f8"}), {"--dtype", "f8", "bf16"}},
      {Forward({"--hidden", "0.x", "--expect", "0.y", "--max-rel", "nan"}), {"--max-rel", "nan"}},
  });
}

TEST_CASE("Addresses that cannot be are refused with the forms that can") {
  for (const char* address : {"nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:5x", ":50061",
                              "unix:", "http://127.0.0.1:50061", "::1:50061"}) {
    CheckRefused({{{"--server", address, "status"}, {address, "HOST:PORT", "unix:PATH"}}});
  }
  CheckRefused({{{"--server", "unix:/tmp/" + std::string(200, 'x'), "status"}, {"107"}}});
}

TEST_CASE("No server is a set-up error that names the address") {
  CheckRefused({
      {{"--server", "127.0.0.1:1", "status"}, {"UNAVAILABLE", "127.0.0.1:1"}},
      {{"--server", "unix:/nonexistent/moed.sock", "health"}, {"UNAVAILABLE", "unix:/nonexistent/moed.sock"}},
      {{"--server", "127.0.0.1:1", "bench", "--layer", "0"}, {"UNAVAILABLE", "127.0.0.1:1"}},
  });
}

TEST_CASE("Files of TLS and tokens that cannot be are refused before any call") {
  const std::string json = "tests/data/gptq-int4-g32-sym/config.json";
  CheckRefused({
      {{"--tls-ca", "/nonexistent.pem", "status"}, {"NOT_FOUND", "tls_ca", "/nonexistent.pem"}},
      {{"--tls-ca", "tests/data", "status"}, {"tls_ca", "tests/data"}},
      {{"--tls-ca", json, "status"}, {"INVALID_ARGUMENT", "tls_ca: wanted a PEM file with a CERTIFICATE", json}},
      {{"--tls-cert", "c.pem", "status"}, {"tls_cert: wanted tls_key with it"}},
      {{"--tls-key", "k.pem", "status"}, {"tls_key: wanted tls_cert with it"}},
      {{"--server", "unix:/tmp/none", "--tls-ca", json, "status"}, {"tls_ca: wanted HOST:PORT", "unix:/tmp/none"}},
      {{"--token-file", "/nonexistent", "health"}, {"NOT_FOUND", "token_file", "/nonexistent"}},
      {{"--token-file", json, "bench", "--layer", "0"}, {"token_file: wanted"}},
      {{"--token-file", "/dev/null", "status"}, {"token_file: wanted a line with a token", "/dev/null"}},
  });
  const Finished by_environment = RunToEnd({kMoectl, "status"}, {"MOED_TOKEN_FILE=/nonexistent"});
  CHECK(by_environment.exit_code == 2);
  CHECK(by_environment.FirstError().find("token_file: wanted a readable file, got '/nonexistent'") != std::string::npos);
}

TEST_CASE("MOED_SERVER names the server where --server does not") {
  const Finished by_environment = RunToEnd({kMoectl, "status"}, {"MOED_SERVER=127.0.0.1:2"});
  CHECK(by_environment.exit_code == 2);
  CHECK(by_environment.FirstError().find("127.0.0.1:2") != std::string::npos);
  const Finished by_option = RunToEnd({kMoectl, "status", "--server", "127.0.0.1:3"}, {"MOED_SERVER=127.0.0.1:2"});
  CHECK(by_option.FirstError().find("127.0.0.1:3") != std::string::npos);
}

TEST_CASE("A tensor that does not fit is refused by name with wanted and got, before any call") {
  CheckRefused({
      {Forward({"--hidden", "0.q"}), {"\"0.q\"", "wanted", "got", "0.topk_ids"}},
      {Forward({"--hidden", "0.topk_ids"}), {"\"0.topk_ids\"", "wanted dtype", "BF16", "got I32"}},
      {Forward({"--hidden", "0.x", "--ids", "0.x", "--weights", "0.topk_weights"}),
       {"\"0.x\"", "wanted dtype I32", "got BF16"}},
      {Forward({"--hidden", "0.x", "--ids", "0.topk_ids", "--weights", "0.router_logits"}),
       {"\"0.router_logits\"", "wanted shape [48, 2]", "got [48, 8]"}},
      {Forward({"--hidden", "0.x", "--expect", "0.topk_weights"}), {"\"0.topk_weights\"", "[48, 256]", "[48, 2]"}},
      {Forward({"--hidden", "0.x", "--expect-ids", "0.y"}), {"\"0.y\"", "wanted dtype I32", "got F32"}},
      {Forward({"--hidden", "0.x", "--expect", "0.y", "--skip-rows", "3,48"}), {"--skip-rows", "0 to 47", "48"}},
      {{"forward", "--layer", "0", "--input", "/nonexistent.safetensors", "--hidden", "x"}, {"/nonexistent.safetensors"}},
      {{"forward", "--layer", "0", "--input", "tests/data/README.md", "--hidden", "x"}, {"tests/data/README.md"}},
  });
}

}  // namespace moed::testing
