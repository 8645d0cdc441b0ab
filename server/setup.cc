#include "server/setup.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/cpu_limits.h"
#include "kernels/device_info.h"

namespace moed {
namespace {

constexpr int kUsageError = 2;

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

absl::Status CheckPinning(const ServeOptions& options, const DeviceInfo& device) {
  if (!options.pin_threads || options.threads <= device.cores) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--pin-threads: wanted at most ", device.cores,
                                                 " threads, one for each usable processor, got --threads ", options.threads));
}

}  // namespace

absl::StatusOr<Policy> ReadPolicy(const std::string& text, const std::vector<const Backend*>& backends) {
  absl::StatusOr<Policy> policy = Policy::Parse(text);
  if (!policy.ok()) return Prefixed("--policy", policy.status());
  if (absl::Status status = CheckNames(*policy, backends); !status.ok()) return Prefixed("--policy", status);
  return policy;
}

ActivationChoice ReadActivations(const std::string& text) {
  if (text == "int8") return ActivationChoice::kInt8;
  return text == "none" ? ActivationChoice::kNone : ActivationChoice::kFile;
}

absl::StatusOr<std::unique_ptr<Engine>> SetUpEngine(const ServeOptions& options) {
  std::vector<const Backend*> backends = LinkedBackends();
  absl::StatusOr<Policy> policy = ReadPolicy(options.policy, backends);
  if (!policy.ok()) return policy.status();
  EngineOptions engine_options;
  engine_options.threads = options.threads;
  engine_options.pin_threads = options.pin_threads;
  engine_options.policy = *std::move(policy);
  engine_options.deterministic = options.deterministic;
  engine_options.activations = ReadActivations(options.activations);
  engine_options.first_expert = options.first_expert;
  engine_options.end_expert = options.end_expert;
  engine_options.max_tokens = options.max_tokens;
  engine_options.memory_limit = options.memory_limit;
  engine_options.lanes = options.lanes;
  engine_options.device = LinkedDevice();
  MaskGpu(options.gpu, &engine_options.device);
  if (absl::Status status = CheckPinning(options, engine_options.device); !status.ok()) return status;
  MaskFeatures(options.masked_features, &engine_options.device.isa);
  auto engine = std::make_unique<Engine>(std::move(engine_options), std::move(backends));
  for (const ModelOption& model : options.models) {
    absl::Status status = engine->Plan(model.name, model.path);
    if (!status.ok()) return Prefixed(absl::StrCat("model '", model.name, "'"), status);
  }
  if (options.bench_hidden > 0) {
    absl::Status status = engine->PlanBench(kBenchModel, options.bench_hidden);
    if (!status.ok()) return Prefixed("--bench-layer", status);
  }
  return engine;
}

std::vector<std::string> ThreadWarnings(const HostStatus& host) {
  std::vector<std::string> warnings;
  const std::string threads = absl::StrCat(host.threads, " threads are more than the ");
  if (host.threads > host.processors) {
    warnings.push_back(absl::StrCat(threads, host.processors, " usable processors: they will take turns"));
  }
  if (host.cpu_quota > 0 && host.threads > ThreadsFor(host.threads, host.cpu_quota).threads) {
    warnings.push_back(absl::StrCat(threads, QuotaText(host.cpu_quota),
                                    " processors of the cgroup's quota: all will be stopped when it is used up"));
  }
  return warnings;
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
