#include "engine/activations.h"

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

// One scale a token: largest magnitude / 127.
ActivationScheme Int8PerToken() {
  ActivationScheme input;
  input.mode = ActivationMode::kDynamic;
  input.element = ElementType::kInt8;
  input.scale = ScaleType::kF32;
  input.group = {1, 0};
  input.rule = ScaleRule::kAbsMax;
  return input;
}

bool TakesInt8(const LinearScheme& linear) {
  return IsInteger(linear.weights.element) || linear.weights.element == ElementType::kFp4E2m1;
}

}  // namespace

bool TakesInt8Activations(const QuantScheme& scheme) {
  return TakesInt8(scheme.gate) && TakesInt8(scheme.up) && TakesInt8(scheme.down);
}

QuantScheme WithActivations(QuantScheme scheme, ActivationChoice choice) {
  if (choice == ActivationChoice::kFile || (choice == ActivationChoice::kInt8 && !TakesInt8Activations(scheme))) return scheme;
  const ActivationScheme input = choice == ActivationChoice::kNone ? ActivationScheme() : Int8PerToken();
  scheme.gate.input = scheme.up.input = scheme.down.input = input;
  return scheme;
}

void ApplyActivations(ActivationChoice choice, std::span<LayerPlan> plans) {
  for (LayerPlan& plan : plans) {
    plan.routed.scheme = WithActivations(plan.routed.scheme, choice);
    plan.shared.scheme = WithActivations(plan.shared.scheme, choice);
  }
}

std::string KeptActivationsNote(ActivationChoice choice, std::span<const LayerPlan> plans) {
  if (choice != ActivationChoice::kInt8) return "";
  size_t layers = 0, shared = 0, all_shared = 0;
  for (const LayerPlan& plan : plans) {
    layers += !TakesInt8Activations(plan.routed.scheme);
    all_shared += plan.has_shared;
    shared += plan.has_shared && !TakesInt8Activations(plan.shared.scheme);
  }
  std::string kept;
  if (layers > 0) kept = absl::StrCat(layers, " of ", plans.size(), " layers");
  if (shared > 0) absl::StrAppend(&kept, kept.empty() ? "" : " and ", shared, " of ", all_shared, " shared experts");
  if (kept.empty()) return "";
  return absl::StrCat("int8 activations: ", kept, " keep what the file says, wanted int4, int8 or FP4 weights");
}

}  // namespace moed
