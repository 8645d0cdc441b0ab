// What `explain` says: for each layer its scheme, the chosen backend, and every other backend with all of its reasons.
//
// Made from config and headers alone; no weight is read. The same report serves `moed explain` (any device) and the
// Explain call of a running server.
#ifndef MOED_ENGINE_EXPLAIN_H_
#define MOED_ENGINE_EXPLAIN_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/activations.h"
#include "engine/memory_need.h"
#include "engine/oracle.h"
#include "engine/weights.h"

namespace moed {

struct LayerExplanation {
  int layer = 0;
  std::string scheme;             // that runs, in words
  std::string choice;             // backend name; empty when no backend fits
  std::string note;               // of the oracle, or why nothing fits the policy
  uint64_t bytes = 0;             // that the chosen backend will hold
  uint64_t workspace_bytes = 0;   // of one call: the larger one of the routed experts' and the shared expert's
  MemoryNeed need;                // the same by memory
  std::string shared_scheme;      // of the shared expert; empty when there is none
  std::string shared_choice;
  std::vector<BackendVerdict> backends;
};

struct ExplainReport {
  std::string device;
  std::vector<LayerExplanation> layers;
  MemoryNeed need;   // of all layers
  int lanes = kDefaultLanes;  // each has a workspace on the GPU
  bool fits = true;  // every layer has a backend, and all of them fit into the device's memories
};

// Plans every MoE layer of the model and checks that no expert tensor is left over. Errors as PlanLayer and
// CheckNoUnknownExperts. `checkpoint` must outlive the plans.
absl::StatusOr<std::vector<LayerPlan>> PlanModel(const ModelConfig& config, const Checkpoint& checkpoint);

// Explains planned layers; workspace is for calls of up to `max_tokens` rows, on the GPU for each of `lanes`. NOT_FOUND for an
// unknown backend name in the policy.
absl::StatusOr<ExplainReport> ExplainPlans(std::span<const LayerPlan> plans, const DeviceInfo& device,
                                           std::span<const Backend* const> backends, const Policy& policy, int64_t max_tokens,
                                           int lanes);

// Explains the checkpoint in `path` (all MoE layers, or only `layer` when >= 0) as it would run with `activations`. Errors: as
// ReadModelConfig, Checkpoint::Open and PlanLayer; NOT_FOUND for a layer that is no MoE layer or an unknown backend name in the
// policy.
absl::StatusOr<ExplainReport> ExplainCheckpoint(const std::string& path, const DeviceInfo& device,
                                                std::span<const Backend* const> backends, const Policy& policy,
                                                ActivationChoice activations, int layer, int64_t max_tokens,
                                                int lanes = kDefaultLanes);

}  // namespace moed

#endif  // MOED_ENGINE_EXPLAIN_H_
