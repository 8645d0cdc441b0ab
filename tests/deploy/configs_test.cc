// The configurations that ship, the examples and those inside the manifests, through `moed check`. A checkpoint of tests/data
// stands for each model, files that are made here for certificates and tokens.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/certificates.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

constexpr char kMoed[] = "server/moed";
constexpr char kModel[] = "tests/data/gptq-int4-g32-sym";

// A folder with what configurations name below /etc/moed, as `tls/` and `tokens/`.
struct Secrets {
  TempDir folder;

  Secrets() {
    const Authority authority("moed authority");
    const Identity server = authority.Issue("server");
    const std::string tls = folder.MakeDir("tls"), tokens = folder.MakeDir("tokens");
    WriteFile(tls + "/ca.crt", authority.cert());
    WriteFile(tls + "/tls.crt", server.cert);
    WriteFile(tls + "/tls.key", server.key);
    WriteFile(tokens + "/tokens", "# team a\n0123456789abcdef0123456789abcdef\n");
    WriteFile(tokens + "/admin", "fedcba9876543210fedcba9876543210\n");
  }
};

// `moed check` of a configuration of which only places of models and secrets are others.
Finished Check(const std::string& config, const Secrets& secrets) {
  std::string here = std::regex_replace(config, std::regex("\"([^\"=]+)=/[^\"]*\""), std::string("\"$1=") + kModel + "\"");
  here = std::regex_replace(here, std::regex("/etc/moed/"), secrets.folder.path() + "/");
  const std::string file = secrets.folder.File("config.json");
  WriteFile(file, here);
  return RunToEnd({kMoed, "check", "--config", file});
}

void CheckAccepted(const std::string& name, const std::string& config, const Secrets& secrets) {
  const Finished finished = Check(config, secrets);
  INFO(name << ": " << finished.out << finished.err);
  CHECK(finished.exit_code == 0);
  CHECK(finished.out.find(kModel) != std::string::npos);
}

// The literal block `config.json: |` of a manifest, without its indentation of four.
std::string ConfigOf(const std::string& manifest) {
  std::istringstream lines(manifest);
  std::string line, config;
  bool inside = false;
  while (std::getline(lines, line)) {
    if (inside && line.rfind("    ", 0) != 0) break;
    if (inside) config += line.substr(4) + "\n";
    if (line == "  config.json: |") inside = true;
  }
  return config;
}

}  // namespace

TEST_CASE("moed check takes every example of a configuration") {
  const Secrets secrets;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("deploy/examples")) {
    names.push_back(entry.path().filename().string());
    CheckAccepted(entry.path().string(), ReadFile(entry.path().string()), secrets);
  }
  std::sort(names.begin(), names.end());
  CHECK(names == std::vector<std::string>{"container.json", "cpu.json", "gpu.json", "tls.json"});
}

TEST_CASE("moed check takes the configurations inside the Kubernetes manifests") {
  const Secrets secrets;
  for (const char* name : {"deploy/kubernetes/cpu.yaml", "deploy/kubernetes/gpu.yaml"}) {
    const std::string config = ConfigOf(ReadFile(name));
    INFO(name);
    REQUIRE(!config.empty());
    CheckAccepted(name, config, secrets);
  }
}

TEST_CASE("An example with a wrong key, or without the files that it names, is refused by that name") {
  const Secrets secrets;
  const std::string config = ReadFile("deploy/examples/tls.json");
  const Finished misspelt = Check(std::regex_replace(config, std::regex("\"grace\""), "\"grase\""), secrets);
  CHECK(misspelt.exit_code == 2);
  CHECK(misspelt.FirstError().find("grase") != std::string::npos);
  std::filesystem::remove(secrets.folder.File("tls/ca.crt"));
  const Finished missing = Check(config, secrets);
  CHECK(missing.exit_code == 2);
  CHECK(missing.FirstError().find("ca.crt") != std::string::npos);
}

}  // namespace moed::testing
