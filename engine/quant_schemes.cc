#include "engine/quant_schemes.h"

#include "absl/strings/str_cat.h"

namespace moed {

using Container = DeclaredScheme::Container;

void Declaration::Refuse(const std::string& key, const std::string& value, const std::string& served) {
  if (refusal.empty()) refusal = absl::StrCat(key, ": ", value, " is not supported (served: ", served, ")");
}

absl::StatusOr<DeclaredScheme> Declaration::For(const std::string& module) const {
  if (refusal.empty()) return scheme;
  return absl::InvalidArgumentError(absl::StrCat(refusal, ", and it applies to ", module));
}

std::string Quoted(const std::string& text) { return absl::StrCat("\"", text, "\""); }

GroupShape InputGroup(int64_t group_size) { return {1, group_size > 0 ? static_cast<int32_t>(group_size) : 0}; }

ActivationScheme DynamicInput(ElementType element, GroupShape group, ScaleRule rule) {
  ActivationScheme input;
  input.mode = ActivationMode::kDynamic;
  input.element = element;
  input.group = group;
  input.rule = rule;
  return input;
}

ActivationScheme StaticInput(ElementType element) {
  ActivationScheme input;
  input.mode = ActivationMode::kStatic;
  input.element = element;
  input.group = {0, 0};
  return input;
}

ActivationScheme MxInput(ElementType element, ScaleRule rule) {
  ActivationScheme input = DynamicInput(element, {1, 32}, rule);
  input.scale = ScaleType::kE8m0;
  return input;
}

ActivationScheme NvFp4Input() {
  ActivationScheme input = DynamicInput(ElementType::kFp4E2m1, {1, 16});
  input.scale = ScaleType::kE4m3;
  input.global_scale = true;
  return input;
}

DeclaredScheme ByteWeights(ElementType element, GroupShape group) {
  DeclaredScheme declared;
  declared.container = IsInteger(element) ? Container::kInt8 : Container::kFp8;
  declared.linear.weights.element = element;
  declared.linear.weights.group = group;
  return declared;
}

DeclaredScheme MxWeights(ElementType element) {
  DeclaredScheme declared;
  declared.container = element == ElementType::kFp4E2m1 ? Container::kFp4 : Container::kFp8;
  declared.linear.weights.element = element;
  declared.linear.weights.scale = ScaleType::kE8m0;
  declared.linear.weights.group = {1, 32};
  return declared;
}

DeclaredScheme NvFp4Weights(GlobalScale global) {
  DeclaredScheme declared;
  declared.container = Container::kFp4;
  declared.linear.weights.element = ElementType::kFp4E2m1;
  declared.linear.weights.scale = ScaleType::kE4m3;
  declared.linear.weights.group = {1, 16};
  declared.linear.weights.global_scale = global;
  return declared;
}

}  // namespace moed
