#include "tests/support/load_child.h"

#include <chrono>
#include <nlohmann/json.hpp>

#include "tests/support/process.h"

namespace moed::testing {

LoadOutcome LoadInChild(const std::string& path, const std::vector<std::string>& more, int limit_seconds) {
  std::vector<std::string> arguments = {"tests/support/load_probe", path};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Finished child = RunToEnd(arguments, {}, std::chrono::seconds(limit_seconds));
  LoadOutcome outcome;
  const nlohmann::json report = nlohmann::json::parse(child.out, nullptr, false);
  outcome.finished = child.exit_code == 0 && report.is_object();
  if (!outcome.finished) {
    outcome.trouble = "exit code " + std::to_string(child.exit_code) + ": " + child.out + child.err;
    return outcome;
  }
  outcome.ok = report["ok"];
  outcome.error = report["error"];
  outcome.peak = report["peak"].get<int64_t>() * 1024;
  outcome.held = report["held"].get<int64_t>() * 1024;
  return outcome;
}

}  // namespace moed::testing
