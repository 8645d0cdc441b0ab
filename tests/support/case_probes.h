// Beside case_calls.h: probe layers whose outputs are known numbers, checkpoints with changed configs, and loads that may be
// refused.
//
//   const CaseScheme& scheme = CaseSchemeNamed("fp8");
//   const CaseModel model(ProbeSpec(scheme, 1.0f, 2.0f, 64, 176), scheme);
//   CaseEngine engine(model, "cpu_generic");
//   CHECK(ProbeValue(engine, 64, {.x0 = 1.0f}) == Approx(1.46212).epsilon(0.005));
// Set-up errors fail the test. Not thread-safe.
#ifndef MOED_TESTS_SUPPORT_CASE_PROBES_H_
#define MOED_TESTS_SUPPORT_CASE_PROBES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/support/case_calls.h"

namespace moed::testing {

// PC(a, b): one expert, top-1, qwen3_moe. Scales of int8 and FP8 weights are float32, so that a and b are exact.
ModelSpec ProbeSpec(const CaseScheme& scheme, float a, float b, int64_t hidden, int64_t intermediate);

struct Probe {
  float x0 = 1.0f;    // x[0]
  float rest = 0.0f;  // all other elements of x
  int expert = 0;
  DType dtype = DType::kF32;
};
// The value that every output of a probe layer has for one row, sent to one expert with weight 1. Fails the test when the
// outputs differ from each other.
float ProbeValue(CaseEngine& engine, int64_t hidden, const Probe& probe);

// Merges JSON text into config.json, objects key by key; null removes a key.
void PatchConfig(CheckpointBuilder* builder, const std::string& patch);

// Rows `order` of y [.., cols].
std::vector<float> PickRows(const std::vector<float>& y, int64_t cols, const std::vector<int64_t>& order);

// Fails the test unless each row of y lies within `bound` of the same row of `want`, both [.., cols].
void CheckWithin(const std::vector<float>& y, const std::vector<float>& want, int64_t cols, double bound);

struct LoadResult {
  absl::Status status;              // the first error
  std::vector<ModelStatus> models;  // afterwards; none when the plan was refused
};
// Plans the checkpoint in `path` for options.device, by default this one: no weight is read, and the device need not be here.
LoadResult TryPlan(const std::string& path, const std::string& policy = "auto", EngineOptions options = {});
// The same, and loads it when it could be planned: the device must be this one, or have fewer features.
LoadResult TryLoad(const std::string& path, const std::string& policy = "auto", EngineOptions options = {});

// The message of a status, and whether it holds `part`.
std::string MessageOf(const absl::Status& status);
bool Mentions(const absl::Status& status, const std::string& part);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_CASE_PROBES_H_
