#include "tests/support/schemes.h"

namespace moed::testing {

WeightScheme Weights(ElementType element, ScaleType scale, GroupShape group, bool zero_points) {
  WeightScheme scheme;
  scheme.element = element;
  scheme.scale = scale;
  scheme.group = group;
  scheme.zero_points = zero_points;
  return scheme;
}

ActivationScheme Input(ActivationMode mode, ElementType element, ScaleType scale, GroupShape group, ScaleRule rule) {
  ActivationScheme scheme;
  scheme.mode = mode;
  scheme.element = element;
  scheme.scale = scale;
  scheme.group = group;
  scheme.rule = rule;
  return scheme;
}

ActivationScheme Int8(ActivationMode mode, int32_t rows) { return Input(mode, ElementType::kInt8, ScaleType::kF32, {rows, 0}); }

std::vector<WeightScheme> WeightSchemes() {
  std::vector<WeightScheme> all;
  for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
    for (ScaleType scale : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
      for (GroupShape group : {GroupShape{1, 32}, GroupShape{1, 0}, GroupShape{0, 0}, GroupShape{1, 20}}) {
        all.push_back(Weights(element, scale, group));
        all.push_back(all.back());
        all.back().zero_points = true;
      }
    }
    all.push_back(Weights(element, ScaleType::kF16, {1, 32}));
    all.back().act_order = true;
    all.push_back(all.back());
    all.back().zero_points = true;
  }
  for (GroupShape group : {GroupShape{0, 0}, GroupShape{1, 0}, GroupShape{128, 128}, GroupShape{64, 32}}) {
    all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, group));
    all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kBf16, group));
  }
  for (ElementType element : {ElementType::kFp4E2m1, ElementType::kFp8E4m3, ElementType::kFp6E2m3, ElementType::kFp6E3m2}) {
    all.push_back(Weights(element, ScaleType::kE8m0, {1, 32}));
  }
  for (GlobalScale global : {GlobalScale::kMultiplier, GlobalScale::kDivisor}) {
    all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}));
    all.back().global_scale = global;
  }
  all.push_back(Weights(ElementType::kInt4, ScaleType::kF32, {1, 0}));  // two-stage int4
  all.back().global_scale = GlobalScale::kMultiplier;
  return all;
}

std::vector<ActivationScheme> InputSchemes() {
  using Mode = ActivationMode;
  std::vector<ActivationScheme> all = {
      Input(Mode::kDynamic, ElementType::kInt8, ScaleType::kF32, {1, 0}),
      Input(Mode::kDynamic, ElementType::kInt8, ScaleType::kF32, {1, 32}),
      Input(Mode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 0}),
      Input(Mode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 128}),
      Input(Mode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 128}, ScaleRule::kAbsMaxPow2Up),
      Input(Mode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}),
      Input(Mode::kStatic, ElementType::kInt8, ScaleType::kF32, {0, 0}),
      Input(Mode::kStatic, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}),
  };
  for (ScaleRule rule : {ScaleRule::kMxFloor, ScaleRule::kMxEven, ScaleRule::kMxCeil}) {
    all.push_back(Input(Mode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}, rule));
    all.push_back(Input(Mode::kDynamic, ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}, rule));
  }
  all.push_back(Input(Mode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}));
  all.back().global_scale = true;
  return all;
}

double SameRuleBound(ElementType element) {
  if (element == ElementType::kInt8) return 0.02;
  return element == ElementType::kFp8E4m3 ? 0.06 : 0.10;
}

}  // namespace moed::testing
