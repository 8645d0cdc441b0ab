#include "kernels/activation_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/number_formats.h"

namespace moed {
namespace {

constexpr float kInt8Max = 127.0f;
constexpr float kE4m3Max = 448.0f;
constexpr float kE2m1Max = 6.0f;

float LargestCode(ElementType element) {
  if (element == ElementType::kInt8) return kInt8Max;
  return element == ElementType::kFp8E4m3 ? kE4m3Max : kE2m1Max;
}

// Exponent of the largest power of two that the element holds.
int LargestExponent(ElementType element) { return element == ElementType::kFp8E4m3 ? 8 : 2; }

// The value of the code nearest to x (already divided by the scale).
float RoundToElement(ElementType element, bool full_range, float x) {
  if (element == ElementType::kFp8E4m3) return E4m3ToFloat(FloatToE4m3(x));
  if (element == ElementType::kFp4E2m1) return std::isnan(x) ? x : E2m1ToFloat(FloatToE2m1(x));
  if (std::isnan(x)) return x;
  return std::clamp(std::nearbyint(x), full_range ? -128.0f : -127.0f, 127.0f);
}

// floor(log2 a) and the significand in [1, 2), for finite a > 0.
int FloorLog2(float a, float* significand) {
  int exponent;
  *significand = 2.0f * std::frexp(a, &exponent);
  return exponent - 1;
}

float MxScale(const ActivationScheme& scheme, float absmax) {
  float significand;
  int exponent = FloorLog2(absmax, &significand) - LargestExponent(scheme.element);
  if (scheme.rule == ScaleRule::kMxEven && significand >= 1.75f) ++exponent;
  if (scheme.rule == ScaleRule::kMxCeil) {
    exponent = FloorLog2(absmax / LargestCode(scheme.element), &significand) + (significand > 1.0f ? 1 : 0);
  }
  return std::ldexp(1.0f, std::clamp(exponent, -127, 127));
}

// The scale of a dynamic group with largest magnitude `absmax` > 0.
float DynamicScale(const ActivationScheme& scheme, float absmax) {
  if (scheme.scale == ScaleType::kE8m0) return MxScale(scheme, absmax);
  const float scale = absmax / LargestCode(scheme.element);
  if (scheme.rule != ScaleRule::kAbsMaxPow2Up) return scale;
  float significand;
  const int exponent = FloorLog2(scale, &significand);
  return std::ldexp(1.0f, significand > 1.0f ? exponent + 1 : exponent);
}

void FillNan(float* x, int64_t n) { std::fill(x, x + n, std::numeric_limits<float>::quiet_NaN()); }

void ScaleGroup(const ActivationScheme& scheme, float scale, float* x, int64_t n) {
  const bool full_range = scheme.mode == ActivationMode::kStatic;
  for (int64_t k = 0; k < n; ++k) x[k] = RoundToElement(scheme.element, full_range, x[k] / scale) * scale;
}

void DynamicGroup(const ActivationScheme& scheme, float absmax, float* x, int64_t n) {
  if (!std::isfinite(absmax)) return FillNan(x, n);
  if (absmax == 0.0f) return;
  const float scale = DynamicScale(scheme, absmax);
  if (scale == 0.0f) return std::fill(x, x + n, 0.0f), void();  // absmax underflows when divided
  ScaleGroup(scheme, scale, x, n);
}

// NVFP4: an E4M3 scale a group under the stored global scale.
void NvGroup(const ActivationScheme& scheme, float global, float* x, int64_t n) {
  const float absmax = AbsMax(x, n);
  if (!std::isfinite(absmax)) return FillNan(x, n);
  const float block = E4m3ToFloat(FloatToE4m3(global * absmax / kE2m1Max));
  for (int64_t k = 0; k < n; ++k) {
    x[k] = block == 0.0f ? 0.0f : RoundToElement(scheme.element, false, x[k] * global / block) * block / global;
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
