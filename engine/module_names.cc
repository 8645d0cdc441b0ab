#include "engine/module_names.h"

#include <algorithm>
#include <array>
#include <utility>

namespace moed {
namespace {

using Parts = std::vector<std::string>;

constexpr std::array<const char*, 4> kPrefixes = {"model.", "", "language_model.model.", "model.language_model."};
constexpr std::array<std::pair<const char*, const char*>, 3> kProjections = {
    {{"w1", "gate_proj"}, {"w3", "up_proj"}, {"w2", "down_proj"}}};

Parts Split(const std::string& name) {
  Parts parts(1);
  for (const char c : name) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

std::string Join(const Parts& parts, size_t from) {
  std::string name;
  for (size_t i = from; i < parts.size(); ++i) {
    if (i > from) name += '.';
    name += parts[i];
  }
  return name;
}

bool IsNumber(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Index of "layers" in front of a number; parts.size() when there is none.
size_t FindLayers(const Parts& parts) {
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (parts[i] == "layers" && IsNumber(parts[i + 1])) return i;
  }
  return parts.size();
}

// Rewrites block and projection names of experts, to the mlp spelling or away from it.
Parts Respelled(Parts parts, bool to_mlp, bool projections) {
  const bool expert = std::find(parts.begin(), parts.end(), "experts") != parts.end();
  for (std::string& part : parts) {
    if (part == (to_mlp ? "block_sparse_moe" : "mlp")) part = to_mlp ? "mlp" : "block_sparse_moe";
  }
  if (!expert || !projections) return parts;
  for (const auto& [w, proj] : kProjections) {
    if (parts.back() == (to_mlp ? w : proj)) {
      parts.back() = to_mlp ? proj : w;
      break;
    }
  }
  return parts;
}

void AddUnique(std::vector<std::string>* names, std::string name) {
  if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(std::move(name));
}

}  // namespace

std::string CanonicalModule(const std::string& name) {
  const Parts parts = Respelled(Split(name), /*to_mlp=*/true, /*projections=*/true);
  const size_t layers = FindLayers(parts);
  if (layers < parts.size()) return Join(parts, layers);
  // Outside of the blocks ("lm_head") or relative to one ("mlp.experts.0.gate_proj").
  return Join(parts, parts.front() == "model" && parts.size() > 1 ? 1 : 0);
}

std::string InsideBlock(const std::string& canonical) {
  const Parts parts = Split(canonical);
  const size_t layers = FindLayers(parts);
  return layers < parts.size() ? Join(parts, std::min(layers + 2, parts.size())) : canonical;
}

bool NeverQuantized(const std::string& canonical) {
  const Parts parts = Split(canonical);
  static const std::unordered_set<std::string> names = {"gate", "router", "shared_expert_gate", "embed_tokens", "lm_head"};
  return names.count(parts.back()) > 0;
}

ModuleQuery::ModuleQuery(const std::string& name, bool mixtral_names) : canonical_(CanonicalModule(name)) {
  names_.push_back(name);
  if (mixtral_names) {
    const Parts mlp = Respelled(Split(name), true, true);
    AddUnique(&names_, Join(mlp, 0));
    AddUnique(&names_, Join(Respelled(mlp, false, true), 0));
    AddUnique(&names_, Join(Respelled(mlp, false, false), 0));
  }
}

std::vector<std::string> ModuleQuery::WithOtherPrefixes() const {
  std::vector<std::string> others;
  for (const std::string& spelling : names_) {
    const Parts parts = Split(spelling);
    const size_t layers = FindLayers(parts);
    if (layers == parts.size()) continue;
    const std::string tail = Join(parts, layers);
    for (const char* prefix : kPrefixes) {
      std::string other = prefix + tail;
      if (other != spelling) others.push_back(std::move(other));
    }
  }
  return others;
}

bool ModuleQuery::Matches(const Pattern& pattern) const {
  const auto hits = [&pattern](const std::string& name) { return pattern.MatchesStart(name); };
  if (std::any_of(names_.begin(), names_.end(), hits)) return true;
  // ".*" swallows any prefix, so that the other prefixes can add nothing: saves most of the time on large models.
  if (pattern.text().rfind(".*", 0) == 0) return false;
  const std::vector<std::string> others = WithOtherPrefixes();
  return std::any_of(others.begin(), others.end(), hits);
}

absl::Status NameList::Add(const std::string& entry) {
  if (entry.rfind("re:", 0) == 0) {
    auto pattern = Pattern::Compile(entry.substr(3));
    if (!pattern.ok()) return pattern.status();
    patterns_.push_back(*std::move(pattern));
  } else if (entry == "Linear") {
    linear_ = true;
  } else {
    exact_.insert(CanonicalModule(entry));
  }
  return absl::OkStatus();
}

NameList::Match NameList::Find(const ModuleQuery& query) const {
  if (exact_.count(query.canonical()) > 0) return Match::kExact;
  for (const Pattern& pattern : patterns_) {
    if (query.Matches(pattern)) return Match::kPattern;
  }
  return linear_ ? Match::kClass : Match::kNone;
}

}  // namespace moed
