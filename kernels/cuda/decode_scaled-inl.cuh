// Chunks of packed weights to the bf16 operand of Hopper's products, each code with its scale in one instruction after it was
// masked.
//
// The bits of a code are a bf16 number as they lie, without an exponent put above them. A half whose exponent field is 0 or 1 is
// its bits times 2^-133, subnormal or not, so a field of an integer code that ends below bit 8 is the code times 2^-133, or 2^-129
// four bits further up; of a float code (sign, exponent, mantissa moved to bf16's own places) it is the code's value by the
// difference of the biases. A fused multiply-add takes off the zero point and scales, and is exact but for its one rounding.
// Scales are multiplied by the inverse of that unit for it and divided by 2^kLift, so that they stay finite: operands are weights
// times 2^-kLift, and sums are multiplied by 2^kLift in the end.
#ifndef MOED_KERNELS_CUDA_DECODE_SCALED_INL_CUH_
#define MOED_KERNELS_CUDA_DECODE_SCALED_INL_CUH_

#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// The factor of sums of such operands.
template <Codes kCodes>
constexpr float LiftOf() {
  return kCodes == Codes::kBf16 ? 1.0f : 1 << kLift;
}

// A field of the registers `reg` counts 2^-this.
template <Codes kCodes>
constexpr int UnitPower(int reg) {
  return kCodes == Codes::kInt4 ? (reg % 2 == 0 ? 133 : 129) : kCodes == Codes::kInt8 ? 133 : BiasPower(kCodes);
}

// 2^power twice as bf16, of a power that has a normal number.
constexpr uint32_t PowerPair(int power) {
  return static_cast<uint32_t>(power + 127) << 7 | static_cast<uint32_t>(power + 127) << 23;
}

// What a weight's scale is multiplied by to be that of the field of register `reg`.
template <Codes kCodes>
__device__ inline float ScaleFactor(int reg) {
  return Bits(static_cast<uint32_t>(UnitPower<kCodes>(reg) - kLift + 127) << 23);
}

// The field of register `reg` of step `step` of a chunk.
template <Codes kCodes>
__device__ inline uint32_t FieldOf(const uint4& chunk, int step, int reg) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (kCodes == Codes::kInt4) {
    const uint32_t word = reg < 2 ? words[step] : words[step] >> 8;
    return word & (reg % 2 == 0 ? 0x000F000Fu : 0x00F000F0u);
  } else if constexpr (kCodes == Codes::kFp4) {
    // One multiplication moves a nibble to two places, its sign to the top of its half and its other bits to where they belong;
    // what else it moves lies apart, and is masked.
    const uint32_t word = reg < 2 ? words[step] : words[step] >> 8;
    const uint32_t moved = reg % 2 == 0 ? (word & 0x000F000Fu) * 0x1040u : (word & 0x00F000F0u) * 0x0104u;
    return moved & 0x81C081C0u;
  } else if constexpr (kCodes == Codes::kInt8) {
    return __byte_perm(words[step * 2 + reg / 2], 0, reg % 2 == 0 ? 0x4240 : 0x4341);
  } else if constexpr (BitsOf(kCodes) == 8) {
    return DecodeBytes<kCodes, false>(make_uint2(words[step * 2], words[step * 2 + 1]), reg, 0);
  } else {
    return words[reg];
  }
}

// a * b + c of both bf16 of a word.
__device__ inline uint32_t MultiplyAddPair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// What fields of one feature become operands by: its scale (ScaleFactor, as bf16 twice) and its zero point. `kZeros`: codes have
// zero points of their own.
template <Codes kCodes, bool kZeros>
struct FieldScale {
  uint32_t scale, zero;

  // Of register 0 or 1, codes without zero points; `scale`: twice.
  __device__ static FieldScale Of(int reg, uint32_t scale) {
    static_assert(!kZeros);
    // The middle in the field's unit, negative: exact times a scale.
    constexpr uint32_t kMiddle[2] = {kCodes == Codes::kInt4 ? 0x80088008u : 0x80808080u, 0x80808080u};
    return {scale, IsInteger(kCodes) ? MultiplyPair(scale, kMiddle[reg % 2]) : 0u};
  }
  // `field`: the zero point where a code would be, twice.
  __device__ static FieldScale Of(uint32_t scale, uint32_t field) { return {scale, field}; }

  __device__ uint32_t Apply(uint32_t field) const {
    // A scale times a zero point has more bits than a bf16 number: two operations, of which the first is exact.
    if constexpr (kZeros) return MultiplyPair(SubtractPair(field, zero), scale);
    if constexpr (IsInteger(kCodes)) return MultiplyAddPair(field, scale, zero);
    return MultiplyPair(field, scale);
  }
};

// A zero point where the codes of register `reg` have theirs.
template <Codes kCodes>
__device__ inline uint32_t ZeroField(int reg, uint32_t zero) {
  return kCodes == Codes::kInt4 && reg % 2 == 1 ? zero << 4 : zero;
}

// A code less its zero point times 2^-kLift, exact, from its field in register `reg`. `zero`: that of its feature as ZeroTerm
// gives it.
template <Codes kCodes>
__device__ inline uint32_t UnscaledOf(uint32_t field, int reg, uint32_t zero) {
  const uint32_t unit = PowerPair(UnitPower<kCodes>(reg) - kLift);
  if constexpr (IsInteger(kCodes)) return MultiplyAddPair(field, unit, zero);
  return MultiplyPair(field, unit);
}

// Minus a zero point times 2^-kLift, twice.
__device__ inline uint32_t ZeroTerm(int zero) {
  const float term = static_cast<float>(-zero) * Bits(static_cast<uint32_t>(127 - kLift) << 23);
  return PackBf16(term, term);
}
// The same of the middle of integer codes, which have no zero points then.
template <Codes kCodes>
constexpr uint32_t MiddleTerm() {
  return 0x80008000u | PowerPair((kCodes == Codes::kInt4 ? 3 : 7) - kLift);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_DECODE_SCALED_INL_CUH_
