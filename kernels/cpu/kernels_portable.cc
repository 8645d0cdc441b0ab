// CPU kernels in portable C++: 16 floats as an array that the compiler may vectorize with whatever the baseline has. Fused
// multiply-add is a multiplication and an addition here, so results differ from the other files in the last bits.
#include <cmath>
#include <cstring>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/number_formats.h"

namespace moed::cpu {
namespace {

struct Portable {
  static constexpr int kLanes = 16;
  struct F {
    float v[kLanes];
  };
  struct I {
    uint32_t v[kLanes];
  };
  static constexpr int kPairsAtOnce = 1;
  static constexpr int kDirectRows = 3;
  static constexpr int kTileRows = 2;
  static constexpr int kDepth = 128;

  // Applies `op` lane by lane.
  template <typename Op>
  static MOED_INLINE F Map(const Op& op) {
    F out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = op(i);
    return out;
  }

  static MOED_INLINE F Zero() { return Set(0.0f); }
  static MOED_INLINE F Set(float value) { return Map([&](int) { return value; }); }
  static MOED_INLINE F Load(const float* at) { return Map([&](int i) { return at[i]; }); }
  static MOED_INLINE F LoadBytes(const uint8_t* at) {
    F out;
    std::memcpy(out.v, at, sizeof(out.v));
    return out;
  }
  static MOED_INLINE void Store(float* at, const F& value) { std::memcpy(at, value.v, sizeof(value.v)); }
  static MOED_INLINE F Broadcast(const float* at) { return Set(*at); }
  static MOED_INLINE F Add(const F& a, const F& b) { return Map([&](int i) { return a.v[i] + b.v[i]; }); }
  static MOED_INLINE F Sub(const F& a, const F& b) { return Map([&](int i) { return a.v[i] - b.v[i]; }); }
  static MOED_INLINE F Mul(const F& a, const F& b) { return Map([&](int i) { return a.v[i] * b.v[i]; }); }
  static MOED_INLINE F Div(const F& a, const F& b) { return Map([&](int i) { return a.v[i] / b.v[i]; }); }
  static MOED_INLINE F Fma(const F& a, const F& b, const F& c) {
    return Map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static MOED_INLINE F MinKeepNan(const F& limit, const F& x) {
    return Map([&](int i) { return limit.v[i] < x.v[i] ? limit.v[i] : x.v[i]; });
  }
  static MOED_INLINE F MaxKeepNan(const F& limit, const F& x) {
    return Map([&](int i) { return limit.v[i] > x.v[i] ? limit.v[i] : x.v[i]; });
  }
  static MOED_INLINE F Round(const F& x) { return Map([&](int i) { return std::nearbyint(x.v[i]); }); }
  static MOED_INLINE F PowerOfTwo(const F& n) {
    return Map([&](int i) {
      const int exponent = n.v[i] == n.v[i] ? static_cast<int>(n.v[i]) + 127 : 127;  // NaN: any finite factor will do
      return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    });
  }

  static MOED_INLINE I LoadWords(const uint8_t* at) {
    I out;
    std::memcpy(out.v, at, sizeof(out.v));
    return out;
  }
  static MOED_INLINE F Nibble(const I& words, int i) {
    return Map([&](int lane) { return static_cast<float>(static_cast<int32_t>(words.v[lane] << (28 - 4 * i)) >> 28); });
  }
  static MOED_INLINE uint16_t Half(const uint8_t* at, int i) {
    uint16_t bits;
    std::memcpy(&bits, at + 2 * i, 2);
    return bits;
  }
  static MOED_INLINE F LoadBf16(const uint8_t* at) { return Map([&](int i) { return Bf16ToFloat(Half(at, i)); }); }
  static MOED_INLINE F LoadF16(const uint8_t* at) { return Map([&](int i) { return F16ToFloat(Half(at, i)); }); }
  static MOED_INLINE void StoreF16(uint8_t* at, const F& value) {
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t bits = FloatToF16(value.v[i]);
      std::memcpy(at + 2 * i, &bits, 2);
    }
  }
  static MOED_INLINE void StoreBf16(uint8_t* at, const F& value) {
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t bits = FloatToBf16(value.v[i]);
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
