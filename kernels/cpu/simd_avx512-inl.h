// AVX-512 F, BW, VL and DQ as a SIMD type for the kernels: 16 floats a vector, one vector a panel. See kernels-inl.h for what each operation means.
//
// Only for instruction-set files, whose flags include these extensions (see kernel_table.h).
#ifndef MOED_KERNELS_CPU_SIMD_AVX512_INL_H_
#define MOED_KERNELS_CPU_SIMD_AVX512_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline-inl.h"

namespace moed::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kPairsAtOnce = 2;
  static constexpr int kDirectRows = 4;
  static constexpr int kTileRows = 12;  // 12 rows x 2 vectors of sums, of 32 registers
  static constexpr int kDepth = 256;    // x 32 columns x 4 bytes = 32 KiB, of a 48 KiB L1

  static MOED_INLINE F Zero() { return _mm512_setzero_ps(); }
  static MOED_INLINE F Set(float value) { return _mm512_set1_ps(value); }
  static MOED_INLINE F Load(const float* at) { return _mm512_loadu_ps(at); }
  static MOED_INLINE F LoadBytes(const uint8_t* at) { return _mm512_loadu_ps(at); }
  static MOED_INLINE void Store(float* at, F value) { _mm512_storeu_ps(at, value); }
  static MOED_INLINE F Broadcast(const float* at) { return _mm512_set1_ps(*at); }
  static MOED_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static MOED_INLINE F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static MOED_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static MOED_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static MOED_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // For finite values of 1 and more, within about one unit in the last place: two steps of Newton's, since a division takes four times
  // as long.
  static MOED_INLINE F Reciprocal(F value) {
    F r = _mm512_rcp14_ps(value);
    r = _mm512_mul_ps(r, _mm512_fnmadd_ps(value, r, Set(2.0f)));
    return _mm512_mul_ps(r, _mm512_fnmadd_ps(value, r, Set(2.0f)));
  }
  // The instructions return their second operand when either is NaN.
  static MOED_INLINE F MinKeepNan(F limit, F x) { return _mm512_min_ps(limit, x); }
  static MOED_INLINE F MaxKeepNan(F limit, F x) { return _mm512_max_ps(limit, x); }
  static MOED_INLINE F Round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static MOED_INLINE F PowerOfTwo(F n) {
    const I exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }

  static MOED_INLINE I LoadWords(const uint8_t* at) { return _mm512_loadu_si512(at); }
  static MOED_INLINE void StoreWords(uint8_t* at, I words) { _mm512_storeu_si512(at, words); }
  static MOED_INLINE I ZeroWords() { return _mm512_setzero_si512(); }
  static MOED_INLINE I SetWords(int32_t value) { return _mm512_set1_epi32(value); }
  static MOED_INLINE I BroadcastWord(const uint8_t* at) {
    int32_t word;
    __builtin_memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
  }
  static MOED_INLINE I AndWords(I a, I b) { return _mm512_and_si512(a, b); }
  static MOED_INLINE I AddWords(I a, I b) { return _mm512_add_epi32(a, b); }
  static MOED_INLINE I MulWords(I a, I b) { return _mm512_mullo_epi32(a, b); }
  // Pairs of 16 x 16 bit products added in 32 bits.
  static MOED_INLINE I MaddHalves(I a, I b) { return _mm512_madd_epi16(a, b); }
  static MOED_INLINE I MulHalves(I a, I b) { return _mm512_mullo_epi16(a, b); }
  // The lower half of each word in both halves; the upper ones must be 0.
  static MOED_INLINE I TwiceHalf(I words) { return _mm512_or_si512(words, _mm512_slli_epi32(words, 16)); }
  // Pairs of u8 x s8 products added in 16 bits.
  static MOED_INLINE I MaddBytes(I weights, I x) { return _mm512_maddubs_epi16(weights, x); }
  // sum + products, of bytes in 16 bits and of halves in 32. Spelled out: with the intrinsics GCC 12 copies sums from register to
  // register in each step of a loop.
  static MOED_INLINE I AddMaddBytes(I sum, I weights, I x) {
    I product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(weights), "v"(x));
    return sum;
  }
  static MOED_INLINE I AddMaddHalves(I sum, I weights, I x) {
    I product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(weights), "v"(x));
    return sum;
  }
  template <int kBits>
  static MOED_INLINE I ShiftRightHalves(I words) { return _mm512_srli_epi16(words, kBits); }
  // Byte i of each 16 of the result: table[index byte i], indices below 16.
  static MOED_INLINE I LookUpBytes(const uint8_t* table, I indices) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), indices);
  }
  // 16 bytes at `at`, in the order of `table`.
  static MOED_INLINE void ShuffleBytes(uint8_t* at, const uint8_t* table) {
    __m128i* const bytes = reinterpret_cast<__m128i*>(at);
    _mm_storeu_si128(bytes, _mm_shuffle_epi8(_mm_loadu_si128(bytes), _mm_loadu_si128(reinterpret_cast<const __m128i*>(table))));
  }
  static MOED_INLINE I ToWords(F value) { return _mm512_cvtps_epi32(value); }
  static MOED_INLINE F ToFloats(I words) { return _mm512_cvtepi32_ps(words); }
  static MOED_INLINE F Abs(F value) { return _mm512_abs_ps(value); }
  static MOED_INLINE float Largest(F value) { return _mm512_reduce_max_ps(value); }
  static MOED_INLINE float Sum(F value) { return _mm512_reduce_add_ps(value); }
  // kLanes whole numbers as int8 or int16, in order.
  static MOED_INLINE void StoreInt8(uint8_t* at, F value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
  }
  static MOED_INLINE void StoreInt16(uint8_t* at, F value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(value)));
  }
  // (code - zero) * scale, rounded once.
  struct CodeScale {
    F scale, minus_zero;
  };
  static MOED_INLINE CodeScale MakeCodeScale(F scale, F zero) { return {scale, Sub(Zero(), Mul(scale, zero))}; }
  static MOED_INLINE F CodeWeight(F code, const CodeScale& scale) { return Fma(code, scale.scale, scale.minus_zero); }
  // The permutes look at the low four bits of each index only, so nibble i needs a shift and no mask.
  using NibbleScale = CodeScale;
  static MOED_INLINE NibbleScale MakeNibbleScale(F scale, F zero) { return MakeCodeScale(scale, zero); }
  static MOED_INLINE F NibbleWeight(I words, int i, const NibbleScale& scale) {
    const F codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return CodeWeight(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), codes), scale);
  }
  static MOED_INLINE F NibbleE2m1(I words, int i) {
    const F values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), values);
  }
  static MOED_INLINE F LoadU8(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  static MOED_INLINE F ByteCode(I words, int i) {
    const I shifted = i == 0 ? words : _mm512_srli_epi32(words, 8 * i);
    return _mm512_cvtepi32_ps(i == 3 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi32(0xFF)));
  }
  static MOED_INLINE F LowBf16(I words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
  static MOED_INLINE F HighBf16(I words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  // 2^(code - 127); code 0 is the subnormal 2^-127.
  static MOED_INLINE F LoadE8m0(const uint8_t* at) {
    const I wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(0x00400000)));
  }
  // Sign extension puts the sign into bits 15 and 14 of the shifted code; bit 14 belongs to the exponent.
  static MOED_INLINE F LoadSmallE4m3(const uint8_t* at) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBFFF))));
  }
  static MOED_INLINE F LoadBf16(const uint8_t* at) {
    const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static MOED_INLINE F LoadF16(const uint8_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  static MOED_INLINE void StoreF16(uint8_t* at, F value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Round to nearest even: add 0x7FFF plus the lowest kept bit; NaN keeps its upper half, made quiet.
  static MOED_INLINE void StoreBf16(uint8_t* at, F value) {
    const I bits = _mm512_castps_si512(value);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const I quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const I upper = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(upper));
  }
};

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_SIMD_AVX512_INL_H_
