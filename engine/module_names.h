// Module names as checkpoints write them, and the lists of names and patterns in quantization configs.
//
// The same module has several spellings: tools rename prefixes ("model.", "language_model.model.") and, for mixtral, the
// block and its projections ("block_sparse_moe.experts.3.w1" is "mlp.experts.3.gate_proj"). A config may use one and the
// tensors another, so that names are compared in every spelling. Plain values and pure functions.
#ifndef MOED_ENGINE_MODULE_NAMES_H_
#define MOED_ENGINE_MODULE_NAMES_H_

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/glob.h"
#include "engine/pattern.h"

namespace moed {

// The spelling that all spellings of a module share: from "layers.N" on, without prefix, "mlp" for "block_sparse_moe",
// and for experts gate_proj, up_proj, down_proj for w1, w3, w2.
std::string CanonicalModule(const std::string& name);

// The rest of a canonical name inside its block: "layers.0.mlp.gate" -> "mlp.gate".
std::string InsideBlock(const std::string& canonical);

// Routers, shared-expert gates, embeddings and the head: no served scheme quantizes them, whatever a general rule says.
bool NeverQuantized(const std::string& canonical);

// The container of routed experts, one of them or one of their projections; shared experts are none.
bool InRoutedExperts(const std::string& canonical);

// The names that contain `canonical`, itself first: "layers.0.mlp", "layers.0", "layers".
std::vector<std::string> WithContainers(const std::string& canonical);

// One module that is asked for, in all of its spellings.
class ModuleQuery {
 public:
  // `mixtral_names`: the model is a mixtral, whose block and projections have two spellings.
  ModuleQuery(const std::string& name, bool mixtral_names);

  const std::string& name() const { return names_.front(); }
  const std::string& canonical() const { return canonical_; }
  // The spellings with the prefix as asked, and from "layers.N" on (none outside of the blocks).
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::string>& tails() const { return tails_; }
  // The spellings with the other usual prefixes.
  std::vector<std::string> WithOtherPrefixes() const;
  // Whether `pattern` matches, from the start, some spelling.
  bool Matches(const Pattern& pattern) const;

 private:
  std::vector<std::string> names_;
  std::vector<std::string> tails_;
  std::string canonical_;
};

// A glob over whole module names, in any spelling.
class ModuleGlob {
 public:
  // INVALID_ARGUMENT for a pattern that is too long.
  static absl::StatusOr<ModuleGlob> Compile(const std::string& text);
  bool Matches(const ModuleQuery& query) const;

 private:
  explicit ModuleGlob(Glob glob) : glob_(std::move(glob)) {}

  Glob glob_;
  bool from_layers_ = false;  // a usual prefix was cut off: compare from "layers.N" on
};

// A list of modules as the methods write them. Each method adds its entries in its own meaning.
class NameList {
 public:
  enum class Match : uint8_t { kNone, kClass, kPattern, kExact };  // in rising priority

  // All of these: INVALID_ARGUMENT for a bad pattern, or one for which `patterns` (of the whole config) is used up.
  // compressed-tensors: "re:" and a pattern, an exact name, or a class name. An exact name hits that module only, never what
  // it contains; every module that is asked for is of the class "Linear".
  absl::Status Add(const std::string& entry, PatternBudget* patterns);
  // ModelOpt and Quark: a glob over whole names; without wildcards an exact name. "re:" and a pattern as above.
  absl::Status AddGlob(const std::string& entry, PatternBudget* patterns);
  // AWQ, fp8, mxfp4: names, names of containers, or some components in a row ("gate", "mlp.gate", "model.layers.0.mlp").
  // The tools search for these as substrings, which would let "gate" hit gate_proj and "experts.1" hit experts.10; here only
  // whole components count. Where a tool meant the substring, the tensors show that the module is stored unquantized. With
  // wildcards, a glob over a module or a container of it.
  absl::Status AddPart(const std::string& entry, PatternBudget* patterns);

  // The strongest kind of entry that hits the module.
  Match Find(const ModuleQuery& query) const;
  bool Has(const ModuleQuery& query) const { return Find(query) != Match::kNone; }

 private:
  bool HasPart(const std::string& canonical) const;

  std::unordered_set<std::string> exact_;  // canonical
  std::unordered_set<std::string> parts_;  // canonical as far as an entry goes
  std::vector<Pattern> patterns_;
  std::vector<ModuleGlob> globs_;
  bool linear_ = false;
};

}  // namespace moed

#endif  // MOED_ENGINE_MODULE_NAMES_H_
