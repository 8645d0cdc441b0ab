// AVX2, FMA and F16C as a SIMD type for the kernels: 8 floats a vector, two vectors a panel. See kernels-inl.h for what each operation means.
//
// Only for instruction-set files, whose flags include these extensions (see kernel_table.h).
#ifndef MOED_KERNELS_CPU_SIMD_AVX2_INL_H_
#define MOED_KERNELS_CPU_SIMD_AVX2_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline-inl.h"

namespace moed::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kPairsAtOnce = 1;
  static constexpr int kDirectRows = 2;  // 2 rows x 4 vectors of sums, of 16 registers; a third row would spill
  static constexpr int kTileRows = 3;
  static constexpr int kDepth = 128;     // x 32 columns x 4 bytes = 16 KiB: half of a 32 KiB L1

  static MOED_INLINE F Zero() { return _mm256_setzero_ps(); }
  static MOED_INLINE F Set(float value) { return _mm256_set1_ps(value); }
  static MOED_INLINE F Load(const float* at) { return _mm256_loadu_ps(at); }
  static MOED_INLINE F LoadBytes(const uint8_t* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
  static MOED_INLINE void Store(float* at, F value) { _mm256_storeu_ps(at, value); }
  static MOED_INLINE F Broadcast(const float* at) { return _mm256_broadcast_ss(at); }
  static MOED_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static MOED_INLINE F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static MOED_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static MOED_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static MOED_INLINE F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static MOED_INLINE F Reciprocal(F value) { return Div(Set(1.0f), value); }
  // The instructions return their second operand when either is NaN.
  static MOED_INLINE F MinKeepNan(F limit, F x) { return _mm256_min_ps(limit, x); }
  static MOED_INLINE F MaxKeepNan(F limit, F x) { return _mm256_max_ps(limit, x); }
  static MOED_INLINE F Round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static MOED_INLINE F PowerOfTwo(F n) {
    const I exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }

  static MOED_INLINE I LoadWords(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const I*>(at)); }
  static MOED_INLINE void StoreWords(uint8_t* at, I words) { _mm256_storeu_si256(reinterpret_cast<I*>(at), words); }
  static MOED_INLINE I ZeroWords() { return _mm256_setzero_si256(); }
  static MOED_INLINE I SetWords(int32_t value) { return _mm256_set1_epi32(value); }
  static MOED_INLINE I BroadcastWord(const uint8_t* at) {
    int32_t word;
    __builtin_memcpy(&word, at, 4);
    return _mm256_set1_epi32(word);
  }
  static MOED_INLINE I AndWords(I a, I b) { return _mm256_and_si256(a, b); }
  static MOED_INLINE I AddWords(I a, I b) { return _mm256_add_epi32(a, b); }
  static MOED_INLINE I MulWords(I a, I b) { return _mm256_mullo_epi32(a, b); }
  // Pairs of 16 x 16 bit products added in 32 bits.
  static MOED_INLINE I MaddHalves(I a, I b) { return _mm256_madd_epi16(a, b); }
  static MOED_INLINE I MulHalves(I a, I b) { return _mm256_mullo_epi16(a, b); }
  // The lower half of each word in both halves; the upper ones must be 0.
  static MOED_INLINE I TwiceHalf(I words) { return _mm256_or_si256(words, _mm256_slli_epi32(words, 16)); }
  // Pairs of u8 x s8 products added in 16 bits.
  static MOED_INLINE I MaddBytes(I weights, I x) { return _mm256_maddubs_epi16(weights, x); }
  // sum + products, of bytes in 16 bits and of halves in 32. Spelled out: with the intrinsics GCC 12 copies sums from register to
  // register in each step of a loop.
  static MOED_INLINE I AddMaddBytes(I sum, I weights, I x) {
    I product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(weights), "x"(x));
    return sum;
  }
  static MOED_INLINE I AddMaddHalves(I sum, I weights, I x) {
    I product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(weights), "x"(x));
    return sum;
  }
  template <int kBits>
  static MOED_INLINE I ShiftRightHalves(I words) { return _mm256_srli_epi16(words, kBits); }
  // Byte i of each 16 of the result: table[index byte i], indices below 16.
  static MOED_INLINE I LookUpBytes(const uint8_t* table, I indices) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), indices);
  }
  // 16 bytes at `at`, in the order of `table`.
  static MOED_INLINE void ShuffleBytes(uint8_t* at, const uint8_t* table) {
    __m128i* const bytes = reinterpret_cast<__m128i*>(at);
    _mm_storeu_si128(bytes, _mm_shuffle_epi8(_mm_loadu_si128(bytes), _mm_loadu_si128(reinterpret_cast<const __m128i*>(table))));
  }
  static MOED_INLINE I ToWords(F value) { return _mm256_cvtps_epi32(value); }
  static MOED_INLINE F ToFloats(I words) { return _mm256_cvtepi32_ps(words); }
  static MOED_INLINE F Abs(F value) { return _mm256_andnot_ps(Set(-0.0f), value); }
  static MOED_INLINE float Largest(F value) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
  }
  static MOED_INLINE float Sum(F value) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
  }
  // kLanes whole numbers as int8 or int16, in order.
  static MOED_INLINE __m128i Int16s(F value) {
    const I words = _mm256_cvtps_epi32(value);
    return _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  static MOED_INLINE void StoreInt8(uint8_t* at, F value) {
    const __m128i halves = Int16s(value);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(halves, halves));
  }
  static MOED_INLINE void StoreInt16(uint8_t* at, F value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), Int16s(value));
  }
  // A nibble is isolated where it lies, which gives code * 16^i (i < 4, after one shift for the upper four), so the scale is
  // kept divided by 16^i: w = code * scale - zero * scale in one fused operation, which rounds (code - zero) * scale once, as the
  // multiplication would (for scales above 2^-114, where dividing by 16^3 is exact).
  struct NibbleScale {
    F by_place[4];
    F minus_zero;
  };
  static MOED_INLINE NibbleScale MakeNibbleScale(F scale, F zero) {
    return {{scale, Mul(scale, Set(0x1p-4f)), Mul(scale, Set(0x1p-8f)), Mul(scale, Set(0x1p-12f))}, Sub(Zero(), Mul(scale, zero))};
  }
  static MOED_INLINE F NibbleWeight(I words, int i, const NibbleScale& scale) {
    const I half = i < 4 ? words : _mm256_srli_epi32(words, 16);
    const I code = _mm256_and_si256(half, _mm256_set1_epi32(0xF << (4 * (i % 4))));
    return Fma(_mm256_cvtepi32_ps(code), scale.by_place[i % 4], scale.minus_zero);
  }
  // The permute looks at the low three bits of each index: the magnitude; the sign is bit 3 of the nibble.
  static MOED_INLINE F NibbleE2m1(I words, int i) {
    const F magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const F magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(words, 4 * i));
    const I sign = _mm256_and_si256(_mm256_slli_epi32(words, 28 - 4 * i), _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
  }
  // (code - zero) * scale, rounded once.
  struct CodeScale {
    F scale, minus_zero;
  };
  static MOED_INLINE CodeScale MakeCodeScale(F scale, F zero) { return {scale, Sub(Zero(), Mul(scale, zero))}; }
  static MOED_INLINE F CodeWeight(F code, const CodeScale& scale) { return Fma(code, scale.scale, scale.minus_zero); }
  static MOED_INLINE F LoadU8(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  }
  static MOED_INLINE F ByteCode(I words, int i) {
    const I shifted = i == 0 ? words : _mm256_srli_epi32(words, 8 * i);
    return _mm256_cvtepi32_ps(i == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi32(0xFF)));
  }
  static MOED_INLINE F LowBf16(I words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
  static MOED_INLINE F HighBf16(I words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  // 2^(code - 127); code 0 is the subnormal 2^-127.
  static MOED_INLINE F LoadE8m0(const uint8_t* at) {
    const I wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(0x00400000)));
  }
  // Sign extension puts the sign into bits 15 and 14 of the shifted code; bit 14 belongs to the exponent.
  static MOED_INLINE F LoadSmallE4m3(const uint8_t* at) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xBFFF))));
  }
  static MOED_INLINE F LoadBf16(const uint8_t* at) {
    const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static MOED_INLINE F LoadF16(const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static MOED_INLINE void StoreF16(uint8_t* at, F value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Round to nearest even: add 0x7FFF plus the lowest kept bit; NaN keeps its upper half, made quiet.
  static MOED_INLINE void StoreBf16(uint8_t* at, F value) {
    const I bits = _mm256_castps_si256(value);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const I quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const I upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(packed));
  }
};

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_SIMD_AVX2_INL_H_
