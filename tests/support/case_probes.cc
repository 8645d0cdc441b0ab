#include "tests/support/case_probes.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "kernels/backends.h"
#include "tests/support/judge.h"

namespace moed::testing {

ModelSpec ProbeSpec(const CaseScheme& scheme, float a, float b, int64_t hidden, int64_t intermediate) {
  ModelSpec spec = SpecOf(scheme, 1, 1, hidden, intermediate);
  spec.weights = PcWeights(hidden, intermediate, a, b);
  spec.experts.scale_dtype = StDtype::kF32;
  if (spec.experts.format == ExpertFormat::kPacked && spec.experts.bits == 4) spec.experts.scale_divisor = 4;
  return spec;
}

float ProbeValue(CaseEngine& engine, int64_t hidden, const Probe& probe) {
  CaseInput input{.rows = 1, .ids = {probe.expert}, .weights = {1.0f}, .dtype = probe.dtype};
  input.x.assign(static_cast<size_t>(hidden), probe.rest);
  input.x[0] = probe.x0;
  const std::vector<float> y = engine.Rows(input);
  for (size_t at = 1; at < y.size(); ++at) {
    INFO("output " << at << " is " << y[at] << ", output 0 is " << y[0]);
    REQUIRE(y[at] == y[0]);
  }
  return y[0];
}

void PatchConfig(CheckpointBuilder* builder, const std::string& patch) {
  nlohmann::json config = nlohmann::json::parse(builder->GetFile("config.json"));
  config.merge_patch(nlohmann::json::parse(patch));
  builder->SetConfig(config.dump());
}

std::vector<float> PickRows(const std::vector<float>& y, int64_t cols, const std::vector<int64_t>& order) {
  std::vector<float> picked;
  for (int64_t row : order) {
    REQUIRE((row + 1) * cols <= static_cast<int64_t>(y.size()));
    picked.insert(picked.end(), y.begin() + row * cols, y.begin() + (row + 1) * cols);
  }
  return picked;
}

void CheckWithin(const std::vector<float>& y, const std::vector<float>& want, int64_t cols, double bound) {
  const Judgement judgement = Judge(y, want, cols, bound);
  INFO(judgement.reason);
  CHECK(judgement.passed);
}

namespace {

LoadResult Try(const std::string& path, const std::string& policy, EngineOptions options, bool load) {
  options.threads = 2;
  if (options.device.name.empty()) options.device = ThisDevice();
  const absl::StatusOr<Policy> parsed = Policy::Parse(policy);
  if (!parsed.ok()) return {parsed.status(), {}};
  options.policy = *parsed;
  Engine engine(std::move(options), LinkedBackends());
  LoadResult result;
  result.status = engine.Plan("m", path);
  if (result.status.ok() && load) result.status = engine.Load("m", {});
  result.models = engine.Status();
  return result;
}

}  // namespace

LoadResult TryPlan(const std::string& path, const std::string& policy, EngineOptions options) {
  return Try(path, policy, std::move(options), false);
}

LoadResult TryLoad(const std::string& path, const std::string& policy, EngineOptions options) {
  return Try(path, policy, std::move(options), true);
}

std::string MessageOf(const absl::Status& status) { return {status.message().data(), status.message().size()}; }

bool Mentions(const absl::Status& status, const std::string& part) { return MessageOf(status).find(part) != std::string::npos; }

}  // namespace moed::testing
