// The arithmetic of activation quantization for one group, as scalar code that the host and accelerators compile alike. The rules in
// words are in activation_quant.h.
#ifndef MOED_KERNELS_ACTIVATION_QUANT_RULES_H_
#define MOED_KERNELS_ACTIVATION_QUANT_RULES_H_

#include <cmath>

#include "kernels/host_device.h"
#include "kernels/number_formats.h"
#include "kernels/quant.h"

namespace moed::quant {

inline constexpr float kInt8Max = 127.0f;
inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kE2m1Max = 6.0f;

MOED_HD inline float LargestCode(ElementType element) {
  if (element == ElementType::kInt8) return kInt8Max;
  return element == ElementType::kFp8E4m3 ? kE4m3Max : kE2m1Max;
}

// Exponent of the largest power of two that the element holds.
MOED_HD inline int LargestExponent(ElementType element) { return element == ElementType::kFp8E4m3 ? 8 : 2; }

// The value of the code nearest to x (already divided by the scale).
MOED_HD inline float RoundToElement(ElementType element, bool full_range, float x) {
  if (element == ElementType::kFp8E4m3) return E4m3ToFloat(FloatToE4m3(x));
  if (element == ElementType::kFp4E2m1) return std::isnan(x) ? x : E2m1ToFloat(FloatToE2m1(x));
  if (std::isnan(x)) return x;
  return std::fmin(std::fmax(std::nearbyint(x), full_range ? -128.0f : -127.0f), 127.0f);
}

// floor(log2 a) and the significand in [1, 2), for finite a > 0.
MOED_HD inline int FloorLog2(float a, float* significand) {
  int exponent;
  *significand = 2.0f * std::frexp(a, &exponent);
  return exponent - 1;
}

MOED_HD inline float MxScale(const ActivationScheme& scheme, float absmax) {
  float significand;
  int exponent = FloorLog2(absmax, &significand) - LargestExponent(scheme.element);
  if (scheme.rule == ScaleRule::kMxEven && significand >= 1.75f) ++exponent;
  if (scheme.rule == ScaleRule::kMxCeil) {
    exponent = FloorLog2(absmax / LargestCode(scheme.element), &significand) + (significand > 1.0f ? 1 : 0);
  }
  return std::ldexp(1.0f, exponent < -127 ? -127 : exponent > 127 ? 127 : exponent);
}

// The scale of a dynamic group with largest magnitude `absmax` > 0.
MOED_HD inline float DynamicScale(const ActivationScheme& scheme, float absmax) {
  if (scheme.scale == ScaleType::kE8m0) return MxScale(scheme, absmax);
  const float scale = absmax / LargestCode(scheme.element);
  if (scheme.rule != ScaleRule::kAbsMaxPow2Up) return scale;
  float significand;
  const int exponent = FloorLog2(scale, &significand);
  return std::ldexp(1.0f, significand > 1.0f ? exponent + 1 : exponent);
}

// NVFP4: the block's scale, an E4M3 value, under the stored global scale; `absmax` is finite.
MOED_HD inline float NvBlockScale(float global, float absmax) { return E4m3ToFloat(FloatToE4m3(global * absmax / kE2m1Max)); }

}  // namespace moed::quant

#endif  // MOED_KERNELS_ACTIVATION_QUANT_RULES_H_
