#include "server/payload.h"

#include <bit>
#include <cstring>

namespace moed {
namespace {

// The compiler makes a second version of these loops for processors with AVX2 and picks one when the program starts.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOED_ALSO_AVX2 __attribute__((target_clones("avx2", "default")))
#else
#define MOED_ALSO_AVX2
#endif

inline uint16_t Bf16Of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : rounded);
}

// The four exponent and three mantissa bits where a float32 has them, with its bias; the eight codes below the normal ones are multiples
// of 2^-9. (As float32 these would be subnormal numbers on the way, which processors take a hundred cycles for.)
inline float E4m3Of(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t small = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  // Chosen by masks, so that the loop has no branch.
  const uint32_t is_small = 0u - static_cast<uint32_t>(magnitude < 8), is_nan = 0u - static_cast<uint32_t>(magnitude == 0x7F);
  const uint32_t bits = (small & is_small) | (normal & ~is_small) | (0x7FC00000u & is_nan);
  return std::bit_cast<float>(bits | static_cast<uint32_t>(code & 0x80) << 24);
}

MOED_ALSO_AVX2 void ExpandF8(const uint8_t* codes, float scale, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Bf16Of(E4m3Of(codes[i]) * scale);
}

MOED_ALSO_AVX2 void ExpandI8(const uint8_t* codes, float scale, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Bf16Of(static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
}

}  // namespace

void ExpandPayload(PayloadCode code, const uint8_t* codes, std::span<const char> scales, int64_t cols, uint16_t* out) {
  const int64_t rows = static_cast<int64_t>(scales.size() / sizeof(float));
  for (int64_t row = 0; row < rows; ++row) {
    float scale;
    std::memcpy(&scale, scales.data() + row * static_cast<int64_t>(sizeof(float)), sizeof(scale));
    (code == PayloadCode::kF8E4m3 ? ExpandF8 : ExpandI8)(codes + row * cols, scale, cols, out + row * cols);
  }
}

void RepeatRows(const std::byte* in, int64_t rows, size_t row_bytes, int64_t times, std::byte* out) {
  for (int64_t row = 0; row < rows; ++row, in += row_bytes) {
    for (int64_t i = 0; i < times && row_bytes > 0; ++i, out += row_bytes) std::memcpy(out, in, row_bytes);
  }
}

}  // namespace moed
