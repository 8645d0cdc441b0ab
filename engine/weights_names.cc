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

constexpr const char* kRoots[] = {"mlp.experts.", "block_sparse_moe.experts."};
constexpr ProjectionNames kProjections[] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};

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
  if (config.family == Family::kGptOss) return {true, prefix + "mlp.experts.", "", "", ""};
  if (config.family == Family::kMixtral) return {false, prefix + "block_sparse_moe.experts.", "w1", "w3", "w2"};
  return {false, prefix + "mlp.experts.", "gate_proj", "up_proj", "down_proj"};
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

std::string LayerPrefix(const Checkpoint& checkpoint, int layer) {
  // Every decoder layer has a norm after attention, whatever tool wrote the file.
  for (const char* root : {"model.layers.", "model.language_model.layers.", "language_model.model.layers."}) {
    const std::string prefix = absl::StrCat(root, layer, ".");
    if (checkpoint.Find(prefix + "post_attention_layernorm.weight")) return prefix;
  }
  return absl::StrCat("model.layers.", layer, ".");
}

ExpertNaming FindExpertNaming(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const std::string prefix = LayerPrefix(checkpoint, layer);
  const ExpertNaming own = FamilyNaming(config, prefix);
  if (own.fused && checkpoint.Find(own.root + "gate_up_proj")) return own;
  for (const char* root : kRoots) {
    for (const ProjectionNames& names : kProjections) {
      const ExpertNaming naming = {false, prefix + root, names.gate, names.up, names.down};
      if (Matches(checkpoint, naming, config.num_experts)) return naming;
    }
  }
  return own;
}

ExpertModules SharedExpertModules(const Checkpoint& checkpoint, int layer) {
  const std::string base = LayerPrefix(checkpoint, layer) + "mlp.shared_experts.";
  return {base + "gate_proj", base + "up_proj", base + "down_proj"};
}

GateNames FindGateNames(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const std::string prefix = LayerPrefix(checkpoint, layer);
  std::string module = prefix + (config.family == Family::kGptOss ? "mlp.router" : "mlp.gate");
  if (!checkpoint.Find(module + ".weight") && config.family == Family::kMixtral) module = prefix + "block_sparse_moe.gate";
  GateNames names;
  names.weight = module + ".weight";
  if (config.router_bias) names.bias = module + ".bias";
  if (config.router.correction_bias) names.correction_bias = module + ".e_score_correction_bias";
  return names;
}

absl::Status MissingTensors(const std::string& what, const std::vector<std::string>& missing) {
  std::string text = absl::StrCat(what, ": ", missing.size(), " tensors are missing: ");
  const size_t shown = std::min<size_t>(missing.size(), 10);
  for (size_t at = 0; at < shown; ++at) absl::StrAppend(&text, at == 0 ? "" : ", ", missing[at]);
  if (shown < missing.size()) absl::StrAppend(&text, ", and ", missing.size() - shown, " more");
  return absl::NotFoundError(text);
}

}  // namespace moed
