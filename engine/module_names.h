// Module names as checkpoints write them, and the lists of names and patterns in quantization configs.
//
// The same module has several spellings: tools rename prefixes ("model.", "language_model.model.") and, for mixtral, the
// block and its projections ("block_sparse_moe.experts.3.w1" is "mlp.experts.3.gate_proj"). A config may use one and the
// tensors another, so that names are compared in every spelling. Plain values and pure functions.
#ifndef MOED_ENGINE_MODULE_NAMES_H_
#define MOED_ENGINE_MODULE_NAMES_H_

#include <string>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "engine/pattern.h"

namespace moed {

// The spelling that all spellings of a module share: from "layers.N" on, without prefix, "mlp" for "block_sparse_moe",
// and for experts gate_proj, up_proj, down_proj for w1, w3, w2.
std::string CanonicalModule(const std::string& name);

// The rest of a canonical name inside its block: "layers.0.mlp.gate" -> "mlp.gate".
std::string InsideBlock(const std::string& canonical);

// Routers, shared-expert gates, embeddings and the head: no served scheme quantizes them, whatever a general rule says.
bool NeverQuantized(const std::string& canonical);

// One module that is asked for, in all of its spellings.
class ModuleQuery {
 public:
  // `mixtral_names`: the model is a mixtral, whose block and projections have two spellings.
  ModuleQuery(const std::string& name, bool mixtral_names);

  const std::string& name() const { return names_.front(); }
  const std::string& canonical() const { return canonical_; }
  // Whether `pattern` matches, from the start, some spelling.
  bool Matches(const Pattern& pattern) const;

 private:
  std::vector<std::string> WithOtherPrefixes() const;

  std::vector<std::string> names_;  // with the prefix as asked, that spelling first
  std::string canonical_;
};

// A list of exact names, "re:" patterns and class names, as compressed-tensors has them.
class NameList {
 public:
  enum class Match : uint8_t { kNone, kClass, kPattern, kExact };  // in rising priority

  // INVALID_ARGUMENT for a bad pattern.
  absl::Status Add(const std::string& entry);
  // The strongest kind of entry that hits the module. Every module that is asked for is of the class "Linear". An exact
  // name hits that module only, never what it contains.
  Match Find(const ModuleQuery& query) const;

 private:
  std::unordered_set<std::string> exact_;  // canonical
  std::vector<Pattern> patterns_;
  bool linear_ = false;
};

}  // namespace moed

#endif  // MOED_ENGINE_MODULE_NAMES_H_
