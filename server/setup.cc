#include "server/setup.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/device_info.h"

namespace moed {
namespace {

constexpr int kUsageError = 2;

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

}  // namespace

absl::StatusOr<Policy> ReadPolicy(const std::string& text, const std::vector<const Backend*>& backends) {
  absl::StatusOr<Policy> policy = Policy::Parse(text);
  if (!policy.ok()) return Prefixed("--policy", policy.status());
  if (absl::Status status = CheckNames(*policy, backends); !status.ok()) return Prefixed("--policy", status);
  return policy;
}

absl::StatusOr<std::unique_ptr<Engine>> SetUpEngine(const ServeOptions& options) {
  std::vector<const Backend*> backends = LinkedBackends();
  absl::StatusOr<Policy> policy = ReadPolicy(options.policy, backends);
  if (!policy.ok()) return policy.status();
  EngineOptions engine_options;
  engine_options.threads = options.threads;
  engine_options.policy = *std::move(policy);
  engine_options.deterministic = options.deterministic;
  engine_options.activations = options.activations == "none" ? ActivationChoice::kNone : ActivationChoice::kFile;
  engine_options.first_expert = options.first_expert;
  engine_options.end_expert = options.end_expert;
  engine_options.max_tokens = options.max_tokens;
  engine_options.memory_limit = options.memory_limit;
  engine_options.device = ThisDevice();
  MaskFeatures(options.masked_features, &engine_options.device.isa);
  auto engine = std::make_unique<Engine>(std::move(engine_options), std::move(backends));
  for (const ModelOption& model : options.models) {
    absl::Status status = engine->Plan(model.name, model.path);
    if (!status.ok()) return Prefixed(absl::StrCat("model '", model.name, "'"), status);
  }
  return engine;
}

int ReportFailure(const absl::Status& status) {
  std::string text = "error: ";
  for (const char c : status.message()) {
    text += c;
    if (c == '\n') text += "  ";
  }
  text += '\n';
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
  return kUsageError;
}

}  // namespace moed
