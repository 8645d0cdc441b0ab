// CPU kernels in portable C++: 4 floats a vector, four vectors a panel. Fused multiply-add is a multiplication and an addition
// here, so results differ from the other files in the last bits.
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/number_formats.h"

namespace moed::cpu {
namespace {

// GCC's and Clang's vector type: the compiler maps it to the registers that the baseline has.
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

struct Portable {
  using F = Floats;
  using I = Ints;
  static constexpr int kLanes = 4;
  static constexpr int kPairsAtOnce = 1;
  static constexpr int kDirectRows = 3;
  static constexpr int kTileRows = 1;  // 8 vectors of sums, of the 16 registers of SSE2
  static constexpr int kDepth = 128;

  // A vector of op(0), op(1), ...
  template <typename Op>
  static MOED_INLINE F Map(const Op& op) {
    return F{op(0), op(1), op(2), op(3)};
  }

  static MOED_INLINE F Zero() { return F{}; }
  static MOED_INLINE F Set(float value) { return F{value, value, value, value}; }
  static MOED_INLINE F Load(const float* at) {
    F value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  static MOED_INLINE F LoadBytes(const uint8_t* at) {
    F value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  static MOED_INLINE void Store(float* at, F value) { std::memcpy(at, &value, sizeof(value)); }
  static MOED_INLINE F Broadcast(const float* at) { return Set(*at); }
  static MOED_INLINE F Add(F a, F b) { return a + b; }
  static MOED_INLINE F Sub(F a, F b) { return a - b; }
  static MOED_INLINE F Mul(F a, F b) { return a * b; }
  static MOED_INLINE F Div(F a, F b) { return a / b; }
  static MOED_INLINE F Fma(F a, F b, F c) { return a * b + c; }
  static MOED_INLINE F Reciprocal(F value) { return 1.0f / value; }
  static MOED_INLINE F MinKeepNan(F limit, F x) { return limit < x ? limit : x; }
  static MOED_INLINE F MaxKeepNan(F limit, F x) { return limit > x ? limit : x; }
  static MOED_INLINE F Round(F x) { return Map([&](int i) { return std::nearbyint(x[i]); }); }
  static MOED_INLINE F PowerOfTwo(F n) {
    return Map([&](int i) {
      const int exponent = n[i] == n[i] ? static_cast<int>(n[i]) + 127 : 127;  // NaN: any finite factor will do
      return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    });
  }

  static MOED_INLINE I LoadWords(const uint8_t* at) {
    I words;
    std::memcpy(&words, at, sizeof(words));
    return words;
  }
  // (code - zero) * scale.
  struct CodeScale {
    F scale, zero;
  };
  static MOED_INLINE CodeScale MakeCodeScale(F scale, F zero) { return {scale, zero}; }
  static MOED_INLINE F CodeWeight(F code, const CodeScale& scale) { return (code - scale.zero) * scale.scale; }
  using NibbleScale = CodeScale;
  static MOED_INLINE NibbleScale MakeNibbleScale(F scale, F zero) { return {scale, zero}; }
  static MOED_INLINE F NibbleWeight(I words, int i, const NibbleScale& scale) {
    return CodeWeight(__builtin_convertvector((words >> (4 * i)) & 15, F), scale);
  }
  static MOED_INLINE F NibbleE2m1(I words, int i) {
    return Map([&](int lane) { return E2m1ToFloat(static_cast<uint8_t>((words[lane] >> (4 * i)) & 15)); });
  }
  static MOED_INLINE F LoadU8(const uint8_t* at) { return Map([&](int i) { return static_cast<float>(at[i]); }); }
  static MOED_INLINE F ByteCode(I words, int i) { return __builtin_convertvector((words >> (8 * i)) & 255, F); }
  static MOED_INLINE F LowBf16(I words) { return std::bit_cast<F>(words << 16); }
  static MOED_INLINE F HighBf16(I words) { return std::bit_cast<F>(words & static_cast<int32_t>(0xFFFF0000u)); }
  // 2^(code - 127); code 0 is the subnormal 2^-127.
  static MOED_INLINE F LoadE8m0(const uint8_t* at) {
    return Map([&](int i) { return std::bit_cast<float>(at[i] == 0 ? 0x00400000u : static_cast<uint32_t>(at[i]) << 23); });
  }
  static MOED_INLINE F LoadSmallE4m3(const uint8_t* at) {
    return Map([&](int i) { return F16ToFloat(static_cast<uint16_t>((at[i] & 0x80) << 8 | (at[i] & 0x7F) << 7)); });
  }
  static MOED_INLINE uint16_t Half(const uint8_t* at, int i) {
    uint16_t bits;
    std::memcpy(&bits, at + 2 * i, 2);
    return bits;
  }
  static MOED_INLINE F LoadBf16(const uint8_t* at) { return Map([&](int i) { return Bf16ToFloat(Half(at, i)); }); }
  static MOED_INLINE F LoadF16(const uint8_t* at) { return Map([&](int i) { return F16ToFloat(Half(at, i)); }); }
  static MOED_INLINE void StoreF16(uint8_t* at, F value) {
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t bits = FloatToF16(value[i]);
      std::memcpy(at + 2 * i, &bits, 2);
    }
  }
  static MOED_INLINE void StoreBf16(uint8_t* at, F value) {
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t bits = FloatToBf16(value[i]);
      std::memcpy(at + 2 * i, &bits, 2);
    }
  }
};

}  // namespace

const KernelTable& PortableKernels() {
  static constexpr KernelTable table = MakeTable<Portable>();
  return table;
}

float GeluExact(float gate) { return gate * 0.5f * (1.0f + std::erf(gate * 0.70710678118654752f)); }

}  // namespace moed::cpu
