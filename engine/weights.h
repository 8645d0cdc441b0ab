// From a checkpoint's tensors to what a layer needs: the canonical experts, the gate and the shared expert.
//
// The only place that knows tensor names and packed layouts. PlanLayer looks at headers alone (plus tensors of at most
// 64 KiB where a fact lives in their bytes), finds every tensor of the layer, checks dtype and shape of each against the
// config, and returns a plan; readers made from the plan then read bytes on demand, from any number of threads.
#ifndef MOED_ENGINE_WEIGHTS_H_
#define MOED_ENGINE_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint.h"
#include "engine/model_config.h"
#include "kernels/expert_weights.h"
#include "kernels/moe_kernel.h"

namespace moed {

// The server's own gate, in float32 whatever the file stores.
struct GateWeights {
  std::vector<float> weight;           // [E, H]
  std::vector<float> bias;             // [E], or empty
  std::vector<float> correction_bias;  // [E], or empty
  std::vector<float> shared_gate;      // [H], of the shared expert, or empty
};

// One layer, found and checked, not yet read.
struct LayerPlan {
  int layer = 0;
  MoeDesc routed;                                // num_experts, shapes, scheme; max_tokens and deterministic left at default
  std::shared_ptr<const ExpertReader> experts;   // of the routed experts; keeps pointing into the Checkpoint
  bool has_shared = false;
  MoeDesc shared;                                // one expert, top_k 1
  std::shared_ptr<const ExpertReader> shared_expert;
  uint64_t file_bytes = 0;                       // of routed and shared experts' tensors, as stored
  std::vector<const TensorInfo*> used;           // every tensor of the layer that a reader reads, the gate's included
  std::vector<std::string> notes;                // disagreements between config and tensors that do not matter
};

// Finds and checks all tensors of MoE layer `layer`. INVALID_ARGUMENT: a tensor with the wrong dtype or shape (names
// file, tensor, wanted, got); NOT_FOUND: missing tensors (count and the first ten names); both before a weight is read.
// `checkpoint` must outlive the plan.
absl::StatusOr<LayerPlan> PlanLayer(const ModelConfig& config, const Checkpoint& checkpoint, int layer);

// Reads the gate of `layer`. Errors as PlanLayer; a value that is not finite is INVALID_ARGUMENT, but for -Inf in a correction
// bias: that expert ranks last.
absl::StatusOr<GateWeights> ReadGate(const ModelConfig& config, const Checkpoint& checkpoint, int layer);

// INVALID_ARGUMENT when the checkpoint holds tensors that look like experts' and that no plan reads (count and the first ten
// names): a renamed, extra or half-converted expert must not be ignored. Layers past the model's last one (multi-token
// prediction) do not count. `plans` are those of all MoE layers.
absl::Status CheckNoUnknownExperts(const ModelConfig& config, const Checkpoint& checkpoint, std::span<const LayerPlan> plans);

}  // namespace moed

#endif  // MOED_ENGINE_WEIGHTS_H_
