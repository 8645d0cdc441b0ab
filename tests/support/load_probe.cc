// A program that loads one checkpoint through the engine and says what that cost, for tests in which memory or a crash is
// the point: `load_probe PATH [--cut FILE BYTES] [--threads N]`. --cut shortens FILE to BYTES after planning and before
// loading, as a file that changes under the server does.
//
// Prints one JSON object: ok, error, and in KiB peak (the largest resident size since the start, over that at the start)
// and held (anonymous memory at the end, over that at the start). Pages of the program itself count in peak: a few MiB.
// Exit code 0 whether the load succeeded or not.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "server/allocator.h"

namespace {

// A line of /proc/self/status such as "VmHWM:    1234 kB".
int64_t StatusKib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::atoll(line.c_str() + key.size() + 1);
  }
  std::cerr << "load_probe: /proc/self/status has no " << key << "\n";
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  moed::SetUpAllocator();  // as in moed: what is freed stays resident
  std::string path, cut_file;
  int64_t cut_bytes = 0;
  moed::EngineOptions options;
  options.threads = 2;
  options.device = moed::ThisDevice();
  for (int at = 1; at < argc; ++at) {
    const std::string argument = argv[at];
    if (argument == "--cut" && at + 2 < argc) {
      cut_file = argv[++at];
      cut_bytes = std::atoll(argv[++at]);
    } else if (argument == "--threads" && at + 1 < argc) {
      options.threads = std::atoi(argv[++at]);
    } else {
      path = argument;
    }
  }
  const int64_t resident = StatusKib("VmRSS"), anonymous = StatusKib("RssAnon");
  nlohmann::json report;
  {
    moed::Engine engine(options, moed::LinkedBackends());
    absl::Status status = engine.Plan("m", path);
    if (status.ok() && !cut_file.empty() && truncate(cut_file.c_str(), cut_bytes) != 0) return 2;
    if (status.ok()) status = engine.Load("m", {});
    report["ok"] = status.ok();
    report["error"] = std::string(status.message());
    report["peak"] = StatusKib("VmHWM") - resident;
    report["held"] = StatusKib("RssAnon") - anonymous;
  }
  std::cout << report.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) << "\n";
  return 0;
}
