// Scales and zero points of a group of packed weights, as vectors of float32; shared by all kernels (see kernels-inl.h).
#ifndef MOED_KERNELS_CPU_SCALE_INL_H_
#define MOED_KERNELS_CPU_SCALE_INL_H_

#include <cstdint>

#include "kernels/cpu/inline-inl.h"
#include "kernels/cpu/packed_layout.h"

namespace moed::cpu {
namespace {

// An E4M3 code whose exponent and significand are put into those of a half float is the value divided by 2^(15 - 7), subnormals
// included: that is what S::LoadSmallE4m3 gives, and this is what it has to be multiplied with.
constexpr float kSmallE4m3 = 256.0f;

// ---- Scales of a group, for the output features [lane, lane + kLanes) of a panel. ----

template <class S>
MOED_INLINE typename S::F LoadScale(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
  typename S::F scale;
  switch (format.scale) {
    case ScaleType::kF16: scale = S::LoadF16(group + 2 * lane); break;
    case ScaleType::kBf16: scale = S::LoadBf16(group + 2 * lane); break;
    case ScaleType::kE8m0: scale = S::LoadE8m0(group + lane); break;
    case ScaleType::kE4m3: scale = S::Mul(S::LoadSmallE4m3(group + lane), S::Set(kSmallE4m3)); break;
    default: scale = S::LoadBytes(group + 4 * lane); break;
  }
  if (format.header_bytes == 0) return scale;
  const typename S::F global = S::LoadBytes(panel + 4 * lane);
  return format.divide_by_global ? S::Div(scale, global) : S::Mul(scale, global);
}

template <class S>
MOED_INLINE typename S::F LoadZero(const PanelFormat& format, const uint8_t* group, int lane) {
  return format.zero_bytes > 0 ? S::LoadU8(group + format.scale_bytes + lane) : S::Set(format.zero);
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_SCALE_INL_H_
