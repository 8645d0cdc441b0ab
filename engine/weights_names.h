// Tensor names: where a layer's experts, gate and shared expert are found in a checkpoint.
//
// Tools name the same tensors differently, so names are found by trying a table of patterns against what exists, not by
// one pattern a family. Pure lookups in the Checkpoint's table.
#ifndef MOED_ENGINE_WEIGHTS_NAMES_H_
#define MOED_ENGINE_WEIGHTS_NAMES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint.h"
#include "engine/model_config.h"

namespace moed {

// Module names of one expert's projections, such as "model.layers.0.mlp.experts.3.gate_proj".
struct ExpertModules {
  std::string gate;
  std::string up;
  std::string down;
};

// The experts of one layer as a naming scheme.
struct ExpertNaming {
  bool fused = false;        // all experts in a few tensors, named by FusedNamesOf
  std::string root;          // "model.layers.0.mlp.experts."
  std::string gate, up, down;  // last components, per expert: "gate_proj" or "w1"
  FusedLayout layout = FusedLayout::kRows;  // fused only: the family's

  ExpertModules Expert(int expert) const;
};

// Names of the tensors of fused experts. Where gate and up share one tensor, `up` is the same as `gate`; biases are empty
// where the layout has none.
struct FusedNames {
  std::string gate;
  std::string up;
  std::string down;
  std::string gate_up_bias;
  std::string down_bias;
};
FusedNames FusedNamesOf(const ExpertNaming& naming);

// "model.layers.7.", or the same with the prefix that this checkpoint uses for its text model.
std::string LayerPrefix(const Checkpoint& checkpoint, int layer);

// The naming that this checkpoint uses for the routed experts of `layer`; the family's own when no tensor matches any.
ExpertNaming FindExpertNaming(const ModelConfig& config, const Checkpoint& checkpoint, int layer);

// Modules of the shared expert of `layer`; the family's own when no tensor matches any.
ExpertModules SharedExpertModules(const ModelConfig& config, const Checkpoint& checkpoint, int layer);

// Names of the gate's tensors; empty where the family has none.
struct GateNames {
  std::string weight;
  std::string bias;
  std::string correction_bias;
  std::string shared_gate;  // [1, H]
};
GateNames FindGateNames(const ModelConfig& config, const Checkpoint& checkpoint, int layer);

// The tensor suffixes by which a module's storage is recognised: ".weight", ".qweight", ".weight_packed".
const std::vector<std::string>& StorageSuffixes();

// NOT_FOUND with the count of missing tensors and the `first` names of them; `what` says of what.
absl::Status MissingTensors(const std::string& what, const std::vector<std::string>& first, size_t count);

}  // namespace moed

#endif  // MOED_ENGINE_WEIGHTS_NAMES_H_
