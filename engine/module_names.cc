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
  size_t first = 0;
  while (parts[first] == "model" && first + 1 < parts.size()) ++first;
  return Join(parts, first);
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

bool InRoutedExperts(const std::string& canonical) {
  const Parts parts = Split(canonical);
  return std::find(parts.begin(), parts.end(), "experts") != parts.end();
}

std::vector<std::string> WithContainers(const std::string& canonical) {
  std::vector<std::string> names = {canonical};
  for (size_t dot = canonical.rfind('.'); dot != std::string::npos && dot > 0; dot = canonical.rfind('.', dot - 1)) {
    names.push_back(canonical.substr(0, dot));
  }
  return names;
}

ModuleQuery::ModuleQuery(const std::string& name, bool mixtral_names) : canonical_(CanonicalModule(name)) {
  names_.push_back(name);
  if (mixtral_names) {
    const Parts mlp = Respelled(Split(name), true, true);
    AddUnique(&names_, Join(mlp, 0));
    AddUnique(&names_, Join(Respelled(mlp, false, true), 0));
    AddUnique(&names_, Join(Respelled(mlp, false, false), 0));
  }
  for (const std::string& spelling : names_) {
    const Parts parts = Split(spelling);
    const size_t layers = FindLayers(parts);
    if (layers < parts.size()) tails_.push_back(Join(parts, layers));
  }
}

std::vector<std::string> ModuleQuery::WithOtherPrefixes() const {
  std::vector<std::string> others;
  for (const std::string& tail : tails_) {
    for (const char* prefix : kPrefixes) {
      std::string other = prefix + tail;
      if (std::find(names_.begin(), names_.end(), other) == names_.end()) others.push_back(std::move(other));
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

absl::StatusOr<ModuleGlob> ModuleGlob::Compile(const std::string& text) {
  for (const std::string prefix : kPrefixes) {
    if (text.rfind(prefix + "layers.", 0) != 0) continue;
    auto glob = Glob::Compile(text.substr(prefix.size()));
    if (!glob.ok()) return glob.status();
    ModuleGlob tail(*std::move(glob));
    tail.from_layers_ = true;
    return tail;
  }
  auto glob = Glob::Compile(text);
  if (!glob.ok()) return glob.status();
  return ModuleGlob(*std::move(glob));
}

bool ModuleGlob::Matches(const ModuleQuery& query) const {
  const auto hits = [this](const std::string& name) { return glob_.Matches(name); };
  if (from_layers_) return std::any_of(query.tails().begin(), query.tails().end(), hits);
  if (std::any_of(query.names().begin(), query.names().end(), hits)) return true;
  if (glob_.text().rfind('*', 0) == 0) return false;  // has swallowed any prefix already
  const std::vector<std::string> others = query.WithOtherPrefixes();
  return std::any_of(others.begin(), others.end(), hits);
}

absl::Status NameList::Add(const std::string& entry, PatternBudget* patterns) {
  if (entry.rfind("re:", 0) == 0) {
    auto pattern = Pattern::Compile(entry.substr(3), patterns);
    if (!pattern.ok()) return pattern.status();
    patterns_.push_back(*std::move(pattern));
  } else if (entry == "Linear") {
    linear_ = true;
  } else {
    exact_.insert(CanonicalModule(entry));
  }
  return absl::OkStatus();
}

absl::Status NameList::AddGlob(const std::string& entry, PatternBudget* patterns) {
  if (entry.rfind("re:", 0) == 0) return Add(entry, patterns);
  if (!HasWildcard(entry)) {
    exact_.insert(CanonicalModule(entry));
    return absl::OkStatus();
  }
  auto glob = ModuleGlob::Compile(entry);
  if (!glob.ok()) return glob.status();
  globs_.push_back(*std::move(glob));
  return absl::OkStatus();
}

absl::Status NameList::AddPart(const std::string& entry, PatternBudget* patterns) {
  if (entry.rfind("re:", 0) == 0) return Add(entry, patterns);
  if (HasWildcard(entry)) {
    if (auto status = AddGlob(entry, patterns); !status.ok()) return status;
    return AddGlob(entry + ".*", patterns);
  }
  const size_t first = entry.find_first_not_of('.');
  if (first == std::string::npos) return absl::OkStatus();
  parts_.insert(CanonicalModule(entry.substr(first, entry.find_last_not_of('.') + 1 - first)));
  return absl::OkStatus();
}

// Looks every run of whole components up: their number is small, that of the entries may not be.
bool NameList::HasPart(const std::string& canonical) const {
  if (parts_.empty()) return false;
  for (size_t from = 0; from < canonical.size();) {
    for (size_t dot = canonical.find('.', from);; dot = canonical.find('.', dot + 1)) {
      if (parts_.count(canonical.substr(from, dot == std::string::npos ? dot : dot - from)) > 0) return true;
      if (dot == std::string::npos) break;
    }
    const size_t next = canonical.find('.', from);
    if (next == std::string::npos) break;
    from = next + 1;
  }
  return false;
}

NameList::Match NameList::Find(const ModuleQuery& query) const {
  if (exact_.count(query.canonical()) > 0 || HasPart(query.canonical())) return Match::kExact;
  for (const ModuleGlob& glob : globs_) {
    if (glob.Matches(query)) return Match::kPattern;
  }
  for (const Pattern& pattern : patterns_) {
    if (query.Matches(pattern)) return Match::kPattern;
  }
  return linear_ ? Match::kClass : Match::kNone;
}

}  // namespace moed
