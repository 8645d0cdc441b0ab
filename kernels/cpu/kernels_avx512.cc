// CPU kernels for AVX-512 (F, BW, VL, DQ): 16 floats a vector, one vector a panel.
#include <immintrin.h>

#include "kernels/cpu/kernels-inl.h"

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
  // The instructions return their second operand when either is NaN.
  static MOED_INLINE F MinKeepNan(F limit, F x) { return _mm512_min_ps(limit, x); }
  static MOED_INLINE F MaxKeepNan(F limit, F x) { return _mm512_max_ps(limit, x); }
  static MOED_INLINE F Round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static MOED_INLINE F PowerOfTwo(F n) {
    const I exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }

  static MOED_INLINE I LoadWords(const uint8_t* at) { return _mm512_loadu_si512(at); }
  // The permute looks at the low four bits of each index only, so nibble i needs a shift and no mask.
  using NibbleScale = F;
  static MOED_INLINE NibbleScale MakeNibbleScale(F scale) { return scale; }
  static MOED_INLINE F NibbleWeight(I words, int i, F scale) {
    const F values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return Mul(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), values), scale);
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

const KernelTable& Avx512Kernels() {
  static constexpr KernelTable table = MakeTable<Avx512>();
  return table;
}

}  // namespace moed::cpu
