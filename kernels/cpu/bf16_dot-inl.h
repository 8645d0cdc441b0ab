// What bf16 products share (dot-inl.h): decoders of weights into pairs of bf16, and rows of bf16.
//
// Codes become bf16 exactly (int4 and int8 less their middle, FP4, FP8); a group's scale multiplies its sum of products, so nothing
// of a weight is rounded. Only with AVX-512 and its BF16 extension.
#ifndef MOED_KERNELS_CPU_BF16_DOT_INL_H_
#define MOED_KERNELS_CPU_BF16_DOT_INL_H_

#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moed::cpu {
namespace {

struct Bf16Sums {
  using S = Avx512;
  using Acc = __m512;
  static constexpr bool kExact = false;
  static constexpr int64_t kChunkFeatures = kChunk;
  static constexpr int kPerWord = 2;
  static MOED_INLINE int64_t Step(int64_t /*group*/) { return kBlockDepth; }
  // Two products a lane are added to the sum; subnormal factors and sums count as 0.
  // Spelled out: GCC 12 copies the sums of the intrinsic from register to register and back in each step of a loop.
  static MOED_INLINE Acc Dot(Acc acc, __m512i weights, __m512i x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(x));
    return acc;
  }
  static MOED_INLINE Acc ZeroAcc() { return _mm512_setzero_ps(); }
  static MOED_INLINE Acc AddAcc(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static MOED_INLINE Acc LoadAcc(const uint8_t* at) { return _mm512_loadu_ps(at); }
  static MOED_INLINE void StoreAcc(uint8_t* at, Acc acc) { _mm512_storeu_ps(at, acc); }
  static MOED_INLINE Acc ZeroFactor(__m512 zero, float base) { return _mm512_sub_ps(S::Set(base), zero); }
  static MOED_INLINE Acc ZeroTimesSum(Acc zero, const uint8_t* sum, bool /*small*/) {
    return _mm512_mul_ps(zero, S::Broadcast(reinterpret_cast<const float*>(sum)));
  }
  // Decoded codes are less the constant already.
  static MOED_INLINE Acc ConstantTimesSum(const uint8_t* /*sum*/) { return _mm512_setzero_ps(); }
  static MOED_INLINE __m512 ToFloat(Acc acc) { return acc; }
};

// ---- Decoders: 16 output features of one block of 8 input features, as 4 vectors of pairs. ----

// Nibbles s and s + 4 of every word, looked up in a table that is there twice: the permute looks at five bits of each index, the
// nibble and one bit of the next.
struct NibbleTable {
  static MOED_INLINE void Words(const uint8_t* block, __m512i table, __m512i* out) {
    const __m512i words = _mm512_loadu_si512(block);
    out[0] = _mm512_permutexvar_epi16(words, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
  }
  static MOED_INLINE __m512i Twice(const uint16_t* table) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)));
  }
};

struct NibblePairs {
  static constexpr int64_t kBlockBytes = kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 8.0f;
  static MOED_INLINE void Words(const uint8_t* block, int /*lane*/, __m512i* out) {
    // code - 8 as bf16
    alignas(32) static constexpr uint16_t kCodes[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                                        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
    NibbleTable::Words(block, NibbleTable::Twice(kCodes), out);
  }
};

struct Fp4Pairs {
  static constexpr int64_t kBlockBytes = kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int /*lane*/, __m512i* out) {
    alignas(32) static constexpr uint16_t kCodes[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                                        0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
    NibbleTable::Words(block, NibbleTable::Twice(kCodes), out);
  }
};

// Lane i of the result: `even` and `odd` of lane i as bf16, side by side.
MOED_INLINE __m512i PairsOf(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves);
}

struct BytePairs {
  static constexpr int64_t kBlockBytes = 2 * kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 128.0f;
  // Byte i of each word less 128.
  template <int kByte>
  static MOED_INLINE __m512 Code(__m512i words) {
    const __m512i signs = _mm512_xor_si512(words, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(signs, 24 - 8 * kByte), 24));
  }
  static MOED_INLINE void Words(const uint8_t* block, int /*lane*/, __m512i* out) {
    for (int q = 0; q < 2; ++q) {
      const __m512i words = _mm512_loadu_si512(block + q * kWordRow);
      out[2 * q] = PairsOf(Code<0>(words), Code<1>(words));
      out[2 * q + 1] = PairsOf(Code<2>(words), Code<3>(words));
    }
  }
};

struct Fp8Pairs {
  static constexpr int64_t kBlockBytes = 2 * kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = kSmallE4m3;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int /*lane*/, __m512i* out) {
    for (int p = 0; p < 4; ++p) {
      const uint8_t* row = block + 2 * p * kPanelWidth;
      out[p] = PairsOf(Avx512::LoadSmallE4m3(row), Avx512::LoadSmallE4m3(row + kPanelWidth));
    }
  }
};

// Packed bf16 is pairs already.
struct PlainPairs {
  static constexpr int64_t kBlockBytes = 4 * kWordRow;
  static constexpr bool kWords = true;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int /*lane*/, __m512i* out) {
    for (int p = 0; p < 4; ++p) out[p] = _mm512_loadu_si512(block + p * kWordRow);
  }
};

// kRows: of a tile that goes straight from the packed codes, 0 where no tile does.
template <class T, class Tiles, int kRows>
MOED_INLINE void MultiplyBf16(const DotArgs& args) {
  // Words that need no decoding gain something by the direct way only where memory is the limit.
  constexpr int kDecoded = 16, kAsTheyAre = 2;
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyWords<T, NibblePairs, Tiles, kRows, kDecoded>(args);
    case ElementType::kFp4E2m1: return MultiplyWords<T, Fp4Pairs, Tiles, kRows, kDecoded>(args);
    case ElementType::kInt8: return MultiplyWords<T, BytePairs, Tiles, kRows, kDecoded>(args);
    case ElementType::kFp8E4m3: return MultiplyWords<T, Fp8Pairs, Tiles, kRows, kDecoded>(args);
    default: return MultiplyWords<T, PlainPairs, Tiles, kRows, kAsTheyAre>(args);
  }
}

// ---- Rows. ----

// Eight features of a row, as bf16, in the order of the weights' pairs; returns their sum as rounded.
MOED_INLINE float StoreBlock(RowOrder order, const float* x, uint8_t* out) {
  const __m128i plain = reinterpret_cast<__m128i>(_mm256_cvtneps_pbh(_mm256_loadu_ps(x)));
  const __m128i pairs = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), order == RowOrder::kNatural ? plain : _mm_shuffle_epi8(plain, pairs));
  const __m256 rounded = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(plain), 16));
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(rounded), _mm256_extractf128_ps(rounded, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}

void MakeBf16Row(const RowArgs& args) {
  const RowFormat& format = *args.format;
  for (int64_t i = 0; i < format.bytes; i += 64) _mm512_storeu_si512(args.out + i, _mm512_setzero_si512());
  float* sums = reinterpret_cast<float*>(args.out + format.sums_offset);
  for (int64_t k = 0; k < format.depth;) {
    const int64_t end = Smaller(k + format.group, format.depth);
    float sum = 0.0f;
    for (; k < end; k += kBlockDepth) sum += StoreBlock(format.order, args.x + k, args.out + 2 * k);
    *sums++ = sum;
  }
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_BF16_DOT_INL_H_
