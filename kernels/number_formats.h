// Number formats: scalar conversions between float and every small format that checkpoints use.
//
// Single source of truth: every table, every SIMD decoder and every test is checked against these functions. All
// functions are pure, portable and exact in the decoding direction; encoders round to nearest, ties to even.
// Layouts: IEEE 754 binary16; bfloat16 (the upper half of binary32); OCP FP8 E4M3 ("fn": no infinities, NaN 0x7F/0xFF);
// OCP MX formats FP4 E2M1, FP6 E2M3 / E3M2 and the scale format E8M0.
#ifndef MOED_KERNELS_NUMBER_FORMATS_H_
#define MOED_KERNELS_NUMBER_FORMATS_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/host_device.h"

namespace moed {

// bfloat16 bits -> float: the bits are the upper half of the float.
MOED_HD inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// float -> bfloat16 bits, round to nearest even. NaN stays NaN (quiet); overflow becomes infinity.
MOED_HD inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// binary16 bits -> float (exact, subnormals included).
MOED_HD inline float F16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1F;
  const uint32_t mantissa = bits & 0x3FF;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// float -> binary16 bits, round to nearest even; magnitudes that round to 65,520 or more become infinity.
MOED_HD inline uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00);  // 65,520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half, in units of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(scaled)));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

// FP8 E4M3 code -> float. 0x7F and 0xFF are NaN; the largest finite value is 448.
MOED_HD inline float E4m3ToFloat(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 0xF;
  const uint32_t mantissa = code & 7;
  if (exponent == 0xF && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, static_cast<int>(exponent) - 7);
  return (code & 0x80) ? -magnitude : magnitude;
}

// float -> FP8 E4M3 code, round to nearest even, saturating at +-448; NaN becomes 0x7F. -0 keeps its sign.
MOED_HD inline uint8_t FloatToE4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7E;
  int exponent = -6;  // of the lowest binade; below it codes are multiples of 2^-9
  if (magnitude >= 0x1p-6f) std::frexp(magnitude, &exponent), --exponent;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 8..16, or 0..8 when subnormal
  // Adding the steps to the code of the binade carries into the exponent by itself.
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + steps));
}

// FP4 E2M1 code (low 4 bits) -> float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the negatives (8 is -0).
MOED_HD inline float E2m1ToFloat(uint8_t code) {
  constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitude[code & 7];
  return (code & 8) ? -magnitude : magnitude;
}

// float -> FP4 E2M1 code, round to nearest, ties to the even code, saturating at +-6. NaN becomes 7. -0 keeps its sign.
MOED_HD inline uint8_t FloatToE2m1(float value) {
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  const float a = std::fabs(value);
  // Midpoints between neighbours; a tie belongs to the even code, so every other comparison is strict.
  if (a <= 0.25f) return sign;
  if (a < 0.75f) return sign | 1;
  if (a <= 1.25f) return sign | 2;
  if (a < 1.75f) return sign | 3;
  if (a <= 2.5f) return sign | 4;
  if (a < 3.5f) return sign | 5;
  if (a <= 5.0f) return sign | 6;
  return sign | 7;
}

// FP6 E2M3 code (low 6 bits, bias 1) -> float; the largest magnitude is 7.5.
MOED_HD inline float E2m3ToFloat(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 3;
  const uint32_t mantissa = code & 7;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) / 8.0f
                                        : std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, static_cast<int>(exponent) - 1);
  return (code & 0x20) ? -magnitude : magnitude;
}

// FP6 E3M2 code (low 6 bits, bias 3) -> float; the largest magnitude is 28.
MOED_HD inline float E3m2ToFloat(uint8_t code) {
  const uint32_t exponent = (code >> 2) & 7;
  const uint32_t mantissa = code & 3;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) / 16.0f
                                        : std::ldexp(1.0f + static_cast<float>(mantissa) / 4.0f, static_cast<int>(exponent) - 3);
  return (code & 0x20) ? -magnitude : magnitude;
}

// E8M0 scale byte -> float: 2^(b-127). Byte 0 is the subnormal 2^-127, byte 255 is NaN.
MOED_HD inline float E8m0ToFloat(uint8_t byte) {
  if (byte == 0) return std::bit_cast<float>(0x00400000u);
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

}  // namespace moed

#endif  // MOED_KERNELS_NUMBER_FORMATS_H_
