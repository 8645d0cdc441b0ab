#include "tests/soak/soak_server.h"

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed::testing {
namespace {

constexpr std::chrono::seconds kReadyLimit(180), kStopLimit(60);  // hang guards

// The value of a line "KEY:  VALUE kB" of /proc/PID/status, in bytes.
int64_t StatusBytes(pid_t pid, const std::string& key) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

}  // namespace

ProcessNumbers NumbersOf(pid_t pid) {
  ProcessNumbers numbers;
  numbers.anonymous_bytes = StatusBytes(pid, "RssAnon");
  numbers.resident_bytes = StatusBytes(pid, "VmRSS");
  std::error_code ignored;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), ignored)) {
    ++numbers.files;
  }
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    ++numbers.mappings;
    numbers.sessions += line.find("memfd:moed") != std::string::npos;
  }
  return numbers;
}

absl::StatusOr<std::unique_ptr<SoakServer>> SoakServer::Start(const std::string& moed, const std::string& folder,
                                                              const std::vector<std::string>& models,
                                                              const std::vector<std::string>& more) {
  std::unique_ptr<SoakServer> server(new SoakServer());
  server->folder_ = folder;
  const std::string ready_file = folder + "/ready.json";
  std::vector<std::string> arguments = {
      moed,           "serve",   "--listen", "127.0.0.1:0", "--listen", server->unix_socket(), "--admin-listen", server->admin(),
      "--ready-file", ready_file};
  for (const std::string& model : models) arguments.insert(arguments.end(), {"--model", model});
  arguments.insert(arguments.end(), more.begin(), more.end());
  server->process_ = Process::Start(arguments);
  if (server->process_ == nullptr) return absl::InternalError(absl::StrCat(moed, ": could not be started"));
  const auto end = std::chrono::steady_clock::now() + kReadyLimit;
  nlohmann::json ready;
  while (!ready.is_object()) {
    if (!server->Running() || std::chrono::steady_clock::now() > end) {
      return absl::InternalError(absl::StrCat("moed did not become ready: ", server->Errors()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::ifstream file(ready_file);
    ready = nlohmann::json::parse(file, nullptr, false);
  }
  for (const auto& address : ready["addresses"]) {
    const std::string text = address.get<std::string>();
    if (text.rfind("127.0.0.1:", 0) == 0) server->tcp_ = text;
  }
  return server;
}

int SoakServer::Stop() {
  process_->Signal(SIGTERM);
  return process_->Wait(kStopLimit).value_or(-1);
}

}  // namespace moed::testing
