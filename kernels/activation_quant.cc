#include "kernels/activation_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/activation_quant_rules.h"

namespace moed {
namespace {

void FillNan(float* x, int64_t n) { std::fill(x, x + n, std::numeric_limits<float>::quiet_NaN()); }

void ScaleGroup(const ActivationScheme& scheme, float scale, float* x, int64_t n) {
  const bool full_range = scheme.mode == ActivationMode::kStatic;
  for (int64_t k = 0; k < n; ++k) x[k] = quant::RoundToElement(scheme.element, full_range, x[k] / scale) * scale;
}

void DynamicGroup(const ActivationScheme& scheme, float absmax, float* x, int64_t n) {
  if (!std::isfinite(absmax)) return FillNan(x, n);
  if (absmax == 0.0f) return;
  const float scale = quant::DynamicScale(scheme, absmax);
  if (scale == 0.0f) return std::fill(x, x + n, 0.0f), void();  // absmax underflows when divided
  ScaleGroup(scheme, scale, x, n);
}

// NVFP4: an E4M3 scale a group under the stored global scale.
void NvGroup(const ActivationScheme& scheme, float global, float* x, int64_t n) {
  const float absmax = AbsMax(x, n);
  if (!std::isfinite(absmax)) return FillNan(x, n);
  const float block = quant::NvBlockScale(global, absmax);
  for (int64_t k = 0; k < n; ++k) {
    x[k] = block == 0.0f ? 0.0f : quant::RoundToElement(scheme.element, false, x[k] * global / block) * block / global;
  }
}

}  // namespace

float AbsMax(const float* x, int64_t n) {
  float largest = 0.0f;
  for (int64_t k = 0; k < n; ++k) {
    const float magnitude = std::fabs(x[k]);
    if (!(magnitude <= largest)) largest = magnitude;  // NaN is taken, and then stays
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

bool SpansRows(const ActivationScheme& scheme) { return scheme.mode == ActivationMode::kDynamic && scheme.group.rows == 0; }

bool SpansRows(const QuantScheme& scheme) {
  return SpansRows(scheme.gate.input) || SpansRows(scheme.up.input) || SpansRows(scheme.down.input);
}

bool CanQuantize(const ActivationScheme& scheme) {
  if (scheme.mode == ActivationMode::kNone) return true;
  if (scheme.zero_points || scheme.group.rows > 1) return false;
  const bool known = scheme.element == ElementType::kInt8 || scheme.element == ElementType::kFp8E4m3 ||
                     scheme.element == ElementType::kFp4E2m1;
  if (!known) return false;
  if (scheme.mode == ActivationMode::kStatic) return scheme.element != ElementType::kFp4E2m1 && !scheme.global_scale;
  if (scheme.scale == ScaleType::kE4m3) return scheme.global_scale && scheme.group.cols > 0;
  if (scheme.scale == ScaleType::kE8m0) return scheme.element != ElementType::kInt8 && scheme.group.cols > 0;
  return scheme.element != ElementType::kFp4E2m1;
}

void QuantizeRow(const ActivationScheme& scheme, float stored, float absmax, float* x, int64_t n) {
  if (scheme.mode == ActivationMode::kNone) return;
  if (scheme.mode == ActivationMode::kStatic) return ScaleGroup(scheme, stored, x, n);
  if (SpansRows(scheme)) return DynamicGroup(scheme, absmax, x, n);
  const int64_t group = scheme.group.cols > 0 ? scheme.group.cols : n;
  for (int64_t first = 0; first < n; first += group) {
    const int64_t count = std::min(group, n - first);
    if (scheme.scale == ScaleType::kE4m3) {
      NvGroup(scheme, stored, x + first, count);
    } else {
      DynamicGroup(scheme, AbsMax(x + first, count), x + first, count);
    }
  }
}

}  // namespace moed
