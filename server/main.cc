// moed: serves the mixture-of-experts layers of a language model over gRPC.
//
//   moed serve --model /models/tiny --listen 127.0.0.1:50061
//   moed explain /models/tiny --device h200 --json
//   moed check --config moed.json
//   moed dequantize /models/tiny experts.safetensors
//   moed replay recordings --checkpoint /models/tiny
//
// Logs go to stdout. An error is the first line on stderr; exit codes are 0 ok, 1 a check failed, 2 usage or set-up.
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/backends.h"
#include "server/allocator.h"
#include "server/commands.h"
#include "server/options.h"
#include "server/replay.h"
#include "server/serve.h"
#include "server/setup.h"

namespace {

// gRPC and protobuf would write their own lines to stderr, whose first line belongs to our error.
void SendLibraryLogsToSpdlog() {
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel, const char*, int, const std::string& message) {
    spdlog::debug("protobuf: {}", message);
  });
  gpr_set_log_function([](gpr_log_func_args* args) {
    const auto level = args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::debug;
    spdlog::log(level, "grpc: {}", args->message);
  });
}

// Debian builds abseil so that each lock of gRPC's is looked up in a graph, under one lock for all threads, to report cycles.
void SwitchOffLockReports() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

int Print(const std::string& text) { return std::fputs(text.c_str(), stdout) < 0 ? 2 : 0; }

int Run(const moed::CommandLine& command) {
  switch (command.command) {
    case moed::Command::kPrint: return Print(command.text);
    case moed::Command::kVersion: return Print(command.text + moed::CudaBuild() + "\n");
    case moed::Command::kServe: return moed::RunServe(command.serve);
    case moed::Command::kExplain: return moed::RunExplain(command.explain);
    case moed::Command::kCheck: return moed::RunCheck(command.serve);
    case moed::Command::kDequantize: return moed::RunDequantize(command.dequantize);
    case moed::Command::kReplay: return moed::RunReplay(command.replay);
  }
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  moed::SetUpAllocator();
  SwitchOffLockReports();
  SendLibraryLogsToSpdlog();
  spdlog::set_level(spdlog::level::off);  // only serve logs; the other commands own their stdout
  const absl::StatusOr<moed::CommandLine> command =
      moed::ParseCommandLine(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
  if (!command.ok()) return moed::ReportFailure(command.status());
  return Run(*command);
}
