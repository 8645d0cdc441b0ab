#include "tests/client/running_server.h"

#include <stdlib.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace moed::testing {
namespace {

constexpr std::chrono::seconds kReadyLimit(180);  // a hang guard: loading takes well under a second

std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

bool Exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

bool WaitFor(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::string RunningServer::ready_file() const { return folder_ + "/ready.json"; }

RunningServer::RunningServer(const std::vector<std::string>& models, const std::vector<std::string>& more,
                             const std::vector<std::string>& launcher) {
  // A short path, since a UNIX socket's has to fit into 107 bytes.
  std::string pattern = "/tmp/moed-XXXXXX";
  REQUIRE(mkdtemp(pattern.data()) != nullptr);
  folder_ = pattern;
  unix_ = "unix:" + folder_ + "/moed.sock";
  std::vector<std::string> arguments = launcher;
  arguments.insert(arguments.end(),
                   {kMoed, "serve", "--listen", "127.0.0.1:0", "--listen", unix_, "--ready-file", ready_file()});
  for (const std::string& model : models) arguments.insert(arguments.end(), {"--model", model});
  arguments.insert(arguments.end(), more.begin(), more.end());
  process_ = Process::Start(arguments);
  REQUIRE(process_ != nullptr);
  WaitUntilReady();
}

RunningServer::~RunningServer() {
  process_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void RunningServer::WaitUntilReady() {
  const auto end = std::chrono::steady_clock::now() + kReadyLimit;
  nlohmann::json ready;
  while (!ready.is_object()) {
    if (!process_->Running() || std::chrono::steady_clock::now() > end) {
      FAIL("moed did not become ready; stderr:\n" << process_->Stderr() << "\nstdout:\n" << process_->Stdout());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ready = nlohmann::json::parse(ReadWhole(ready_file()), nullptr, false);
  }
  REQUIRE(ready.contains("addresses"));
  REQUIRE(ready["pid"] == process_->pid());
  for (const auto& address : ready["addresses"]) {
    const std::string text = address.get<std::string>();
    if (text.rfind("unix:", 0) != 0 && tcp_.empty()) tcp_ = text;
  }
  REQUIRE(tcp_.rfind("127.0.0.1:", 0) == 0);
  REQUIRE(tcp_ != "127.0.0.1:0");
}

Finished RunningServer::Moectl(const std::vector<std::string>& arguments) const {
  std::vector<std::string> all = {kMoectl, "--server", tcp_};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return RunToEnd(all);
}

nlohmann::json RunningServer::MoectlJson(const std::vector<std::string>& arguments, int exit_code) const {
  std::vector<std::string> all = arguments;
  all.push_back("--json");
  const Finished finished = Moectl(all);
  INFO("stdout: " << finished.out << "\nstderr: " << finished.err);
  REQUIRE(finished.exit_code == exit_code);
  nlohmann::json document = nlohmann::json::parse(finished.out, nullptr, false);
  REQUIRE(document.is_object());
  return document;
}

}  // namespace moed::testing
