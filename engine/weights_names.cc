#include "engine/weights_names.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

struct ProjectionNames {
  const char* gate;
  const char* up;
  const char* down;
};

// Blocks in which tools write experts one by one, whatever the family.
constexpr const char* kRoots[] = {"mlp.experts.", "block_sparse_moe.experts.", "feed_forward.experts."};
constexpr ProjectionNames kProjections[] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
constexpr const char* kSharedRoots[] = {"mlp.shared_experts.", "mlp.shared_expert.", "block_sparse_moe.shared_experts.",
                                        "feed_forward.shared_expert."};
constexpr const char* kRouters[] = {"mlp.gate", "mlp.router", "block_sparse_moe.gate"};

// Prefixes of layers, and tensors by which a layer is recognised: every decoder layer has a norm after attention, every MoE
// layer a router, whatever tool wrote the file.
constexpr const char* kLayerRoots[] = {"model.layers.", "model.language_model.layers.", "language_model.model.layers.",
                                       "transformer.blocks."};
constexpr const char* kMarkers[] = {"post_attention_layernorm.weight",      "mlp.gate.weight",
                                    "mlp.router.weight",                    "block_sparse_moe.gate.weight",
                                    "block_sparse_moe.router.layer.weight", "feed_forward.router.weight",
                                    "ffn.router.layer.weight"};

std::string PrefixOr(const Checkpoint& checkpoint, int layer, const std::string& fallback) {
  for (const char* root : kLayerRoots) {
    const std::string prefix = absl::StrCat(root, layer, ".");
    for (const char* marker : kMarkers) {
      if (checkpoint.Find(prefix + marker)) return prefix;
    }
  }
  return absl::StrCat(fallback, layer, ".");
}

bool HasStorage(const Checkpoint& checkpoint, const std::string& module) {
  for (const std::string& suffix : StorageSuffixes()) {
    if (checkpoint.Find(module + suffix)) return true;
  }
  return false;
}

bool Matches(const Checkpoint& checkpoint, const ExpertNaming& naming, int experts) {
  for (int expert = 0; expert < experts; ++expert) {
    const ExpertModules modules = naming.Expert(expert);
    for (const std::string& module : {modules.gate, modules.up, modules.down}) {
      if (HasStorage(checkpoint, module)) return true;
    }
  }
  return false;
}

// The family's own naming, used to say what is missing when nothing matches.
ExpertNaming FamilyNaming(const ModelConfig& config, const std::string& prefix) {
  const ProjectionNames& names = kProjections[config.names.w123 ? 1 : 0];
  const std::string root = prefix + config.names.experts;
  if (config.names.fused) return {true, root, "", "", "", config.names.layout};
  return {false, root, names.gate, names.up, names.down};
}

bool HasFused(const Checkpoint& checkpoint, const ExpertNaming& naming) {
  const FusedNames names = FusedNamesOf(naming);
  return checkpoint.Find(names.gate) || checkpoint.Find(names.down);
}

}  // namespace

ExpertModules ExpertNaming::Expert(int expert) const {
  const std::string base = absl::StrCat(root, expert, ".");
  return {base + gate, base + up, base + down};
}

const std::vector<std::string>& StorageSuffixes() {
  static const std::vector<std::string>* const suffixes =
      new std::vector<std::string>{".weight", ".qweight", ".weight_packed"};
  return *suffixes;
}

FusedNames FusedNamesOf(const ExpertNaming& naming) {
  const std::string& root = naming.root;
  switch (naming.layout) {
    case FusedLayout::kLinear:
      return {root + "input_linear.weight", root + "input_linear.weight", root + "output_linear.weight", "", ""};
    case FusedLayout::kStacked:
      return {root + "w1", root + "v1", root + "w2", "", ""};
    case FusedLayout::kInterleavedColumns:
      return {root + "gate_up_proj", root + "gate_up_proj", root + "down_proj", root + "gate_up_proj_bias",
              root + "down_proj_bias"};
    case FusedLayout::kRows:
    case FusedLayout::kColumns:
      break;
  }
  return {root + "gate_up_proj", root + "gate_up_proj", root + "down_proj", "", ""};
}

std::string LayerPrefix(const Checkpoint& checkpoint, int layer) { return PrefixOr(checkpoint, layer, "model.layers."); }

ExpertNaming FindExpertNaming(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const std::string prefix = PrefixOr(checkpoint, layer, config.names.layers);
  const ExpertNaming own = FamilyNaming(config, prefix);
  if (own.fused && HasFused(checkpoint, own)) return own;
  for (const char* root : kRoots) {
    for (const ProjectionNames& names : kProjections) {
      const ExpertNaming naming = {false, prefix + root, names.gate, names.up, names.down};
      if (Matches(checkpoint, naming, config.num_experts)) return naming;
    }
  }
  if (own.fused) return own;
  // Families that are written one by one may come as the fused tensors that transformers holds in memory.
  for (const std::string root : {config.names.experts, "mlp.experts."}) {
    const ExpertNaming fused = {true, prefix + root, "", "", "", config.names.layout};
    if (HasFused(checkpoint, fused)) return fused;
  }
  return own;
}

ExpertModules SharedExpertModules(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const std::string prefix = PrefixOr(checkpoint, layer, config.names.layers);
  const std::string own = config.names.shared;
  const auto modules = [&prefix](const std::string& root) -> ExpertModules {
    const std::string base = prefix + root;
    return {base + "gate_proj", base + "up_proj", base + "down_proj"};
  };
  const auto exists = [&checkpoint](const ExpertModules& m) {
    return HasStorage(checkpoint, m.gate) || HasStorage(checkpoint, m.up) || HasStorage(checkpoint, m.down);
  };
  if (exists(modules(own))) return modules(own);
  for (const char* root : kSharedRoots) {
    if (exists(modules(root))) return modules(root);
  }
  return modules(own);
}

GateNames FindGateNames(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const std::string prefix = PrefixOr(checkpoint, layer, config.names.layers);
  std::string router = config.names.router;
  for (const char* other : kRouters) {
    if (checkpoint.Find(prefix + router + ".weight")) break;
    if (checkpoint.Find(absl::StrCat(prefix, other, ".weight"))) router = other;
  }
  GateNames names;
  names.weight = prefix + router + ".weight";
  if (config.router_bias) names.bias = prefix + router + ".bias";
  if (config.router.correction_bias) {
    const std::string own = prefix + config.names.correction_bias;
    const std::string beside = prefix + router + ".e_score_correction_bias";
    names.correction_bias = !checkpoint.Find(own) && checkpoint.Find(beside) ? beside : own;
  }
  if (config.shared_gate) {
    // "mlp.shared_expert." has its gate in "mlp.shared_expert_gate".
    std::string shared = config.names.shared;
    shared.pop_back();
    names.shared_gate = prefix + shared + "_gate.weight";
  }
  return names;
}

absl::Status MissingTensors(const std::string& what, const std::vector<std::string>& first, size_t count) {
  std::string text = absl::StrCat(what, ": ", count, " tensors are missing: ");
  for (size_t at = 0; at < first.size(); ++at) absl::StrAppend(&text, at == 0 ? "" : ", ", first[at]);
  if (first.size() < count) absl::StrAppend(&text, ", and ", count - first.size(), " more");
  return absl::NotFoundError(text);
}

}  // namespace moed
