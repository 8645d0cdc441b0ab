// The text form of a policy: P[,layers:A-B=P][,layers:N=P][,scheme:ELEMENT=P].
#include <algorithm>
#include <array>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/oracle.h"

namespace moed {
namespace {

constexpr std::array kElements = {ElementType::kF32,     ElementType::kBf16,    ElementType::kF16,
                                  ElementType::kInt4,    ElementType::kInt8,    ElementType::kFp8E4m3,
                                  ElementType::kFp4E2m1, ElementType::kFp6E2m3, ElementType::kFp6E3m2};

absl::Status Wrong(const std::string& part, const std::string& wanted) {
  return absl::InvalidArgumentError(absl::StrCat("policy: wanted ", wanted, ", got \"", part, "\""));
}

// Takes `prefix` off the front of `text` when it is there.
bool TakePrefix(std::string* text, const std::string& prefix) {
  if (text->rfind(prefix, 0) != 0) return false;
  text->erase(0, prefix.size());
  return true;
}

std::vector<std::string> SplitAtCommas(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

absl::StatusOr<LayerPolicy> ParseOne(const std::string& text) {
  LayerPolicy policy;
  if (text == "auto") return policy;
  std::string name = text;
  if (TakePrefix(&name, "require:")) {
    policy.kind = LayerPolicy::Kind::kRequire;
  } else if (TakePrefix(&name, "prefer:")) {
    policy.kind = LayerPolicy::Kind::kPrefer;
  } else {
    return Wrong(text, "auto, require:NAME or prefer:NAME");
  }
  const bool good = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
  if (!good) return Wrong(text, "a backend name of a-z, 0-9 and _ after the colon");
  policy.backend = name;
  return policy;
}

// A layer number: digits only, small enough for any model.
std::optional<int> ParseLayer(const std::string& text) {
  if (text.empty() || text.size() > 6) return std::nullopt;
  int value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

absl::Status ParseLayers(const std::string& range, int* first, int* last) {
  const size_t dash = range.find('-');
  const auto low = ParseLayer(range.substr(0, dash));
  const auto high = dash == std::string::npos ? low : ParseLayer(range.substr(dash + 1));
  if (!low || !high || *low > *high) return Wrong(absl::StrCat("layers:", range), "layers:N or layers:A-B with A <= B");
  *first = *low;
  *last = *high;
  return absl::OkStatus();
}

absl::StatusOr<ElementType> ParseElement(const std::string& name) {
  std::string names;
  for (const ElementType element : kElements) {
    if (name == ElementName(element)) return element;
    absl::StrAppend(&names, names.empty() ? "" : ", ", ElementName(element));
  }
  return Wrong(absl::StrCat("scheme:", name), absl::StrCat("scheme: and one of ", names));
}

}  // namespace

absl::StatusOr<Policy> Policy::Parse(const std::string& text) {
  const std::vector<std::string> parts = SplitAtCommas(text);
  Policy policy;
  auto first = ParseOne(parts.front());
  if (!first.ok()) return first.status();
  policy.default_ = *first;
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    std::string selector = parts[i].substr(0, equals);
    Exception exception;
    if (equals == std::string::npos) return Wrong(parts[i], "layers:A-B=P or scheme:ELEMENT=P");
    if (TakePrefix(&selector, "layers:")) {
      exception.by_layer = true;
      auto status = ParseLayers(selector, &exception.first_layer, &exception.last_layer);
      if (!status.ok()) return status;
    } else if (TakePrefix(&selector, "scheme:")) {
      auto element = ParseElement(selector);
      if (!element.ok()) return element.status();
      exception.element = *element;
    } else {
      return Wrong(parts[i], "layers:A-B=P or scheme:ELEMENT=P");
    }
    auto what = ParseOne(parts[i].substr(equals + 1));
    if (!what.ok()) return what.status();
    exception.policy = *what;
    policy.exceptions_.push_back(exception);
  }
  return policy;
}

LayerPolicy Policy::For(int layer, ElementType element) const {
  for (auto it = exceptions_.rbegin(); it != exceptions_.rend(); ++it) {
    const bool hit = it->by_layer ? layer >= it->first_layer && layer <= it->last_layer : element == it->element;
    if (hit) return it->policy;
  }
  return default_;
}

std::vector<std::string> Policy::BackendNames() const {
  std::vector<std::string> names;
  const auto add = [&names](const LayerPolicy& policy) {
    if (policy.kind == LayerPolicy::Kind::kAuto) return;
    if (std::find(names.begin(), names.end(), policy.backend) == names.end()) names.push_back(policy.backend);
  };
  add(default_);
  for (const Exception& exception : exceptions_) add(exception.policy);
  return names;
}

}  // namespace moed
