// Weights of short groups for AMX tiles (amx_group-inl.h): packed codes become words of signed bytes, less their zero points, and
// scales float32, a chunk of a few groups at a time, in either half of the scratch. Zero points of int4 are at most 16, those of
// int8 128 for all: what is left fits into a byte.
#ifndef MOED_KERNELS_CPU_AMX_DECODE_INL_H_
#define MOED_KERNELS_CPU_AMX_DECODE_INL_H_

#include <immintrin.h>

#include "kernels/cpu/int8_dot-inl.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moed::cpu {
namespace {

// Tiles of sums that take turns: the segments of a chunk are padded to a multiple of them.
constexpr int kTilesOfSums = 4;
// Features of a chunk, at most: two of them stay in the L1 cache beside what they are multiplied with.
constexpr int64_t kGroupChunk = 256;

struct GroupSums : IntegerSums<Avx512> {
  static constexpr int kPerWord = 4;
  static MOED_INLINE int64_t Step(int64_t group) { return group; }
};

// ---- Decoders: one block of 8 input features of a panel as two rows of words. `zero` has the zero point of each output feature
// in all four bytes of its word. ----

template <class D>
struct SignedQuads {
  static constexpr int64_t kBlockBytes = D::kBlockBytes;
  static constexpr float kFactor = D::kFactor;
  static MOED_INLINE void Words(const uint8_t* block, __m512i zero, __m512i* out) {
    D::Words(block, 0, out);
    out[0] = _mm512_sub_epi8(out[0], zero);
    out[1] = _mm512_sub_epi8(out[1], zero);
  }
};

alignas(16) constexpr int8_t kFp4Signed[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct SignedFp4 {
  static constexpr int64_t kBlockBytes = kWordRow;
  static constexpr float kFactor = 0.5f;
  static MOED_INLINE void Words(const uint8_t* block, __m512i /*zero*/, __m512i* out) {
    NibbleQuads<Avx512>::Words(block, 0, out);
    const uint8_t* const table = reinterpret_cast<const uint8_t*>(kFp4Signed);
    out[0] = Avx512::LookUpBytes(table, out[0]);
    out[1] = Avx512::LookUpBytes(table, out[1]);
  }
};

// ---- Chunks. ----

MOED_INLINE int64_t LongestGroupChunk(int64_t group) { return kGroupChunk / group / kTilesOfSums * kTilesOfSums * group; }
MOED_INLINE int64_t FeaturesOf(const Chunk& chunk) { return (chunk.segments - 1) * chunk.features + chunk.last_features; }

// Where the words and scales of a chunk go.
MOED_INLINE void PlaceGroups(uint8_t* scratch, int half, Chunk* chunk) {
  constexpr int64_t kHalfPanel = kGroupChunk / GroupSums::kPerWord * kWordRow, kHalfScales = kGroupChunk / kBlockDepth * kPairWidth;
  static_assert(4 * kHalfPanel <= 2 * kPanelCodes && 2 * kHalfScales * 4 <= kZerosAt - kScalesAt);
  chunk->segment_bytes = chunk->features / GroupSums::kPerWord * kWordRow;
  for (int p = 0; p < 2; ++p) chunk->codes[p] = scratch + kCodesAt + (2 * half + p) * kHalfPanel;
  chunk->scales = reinterpret_cast<const float*>(scratch + kScalesAt) + half * kHalfScales;
}

// Decodes one panel of a chunk, a few segments with each Run; segments of nothing, whose scales are 0, follow the last one.
template <class D>
class GroupDecoder {
 public:
  MOED_INLINE GroupDecoder(const PanelFormat& format, const uint8_t* weights, const Chunk& chunk, int panel)
      : format_(format), panel_(weights + panel * format.panel_bytes), group_(panel_ + format.group_offset(chunk.group)),
        features_(chunk.features), left_(FeaturesOf(chunk)), padded_(RoundUpTo(chunk.segments, kTilesOfSums)),
        words_(const_cast<uint8_t*>(chunk.codes[panel])), scales_(const_cast<float*>(chunk.scales) + panel * kPanelWidth) {}

  MOED_INLINE void Run() {
    if (padded_ == 0) return;
    for (int i = 0; i < kTilesOfSums; ++i) DecodeOne();
    padded_ -= kTilesOfSums;
  }
  MOED_INLINE void Finish() {
    while (padded_ > 0) Run();
  }

 private:
  MOED_INLINE void DecodeOne() {
    uint8_t* const end = words_ + features_ / GroupSums::kPerWord * kWordRow;
    __m512 scale = _mm512_setzero_ps();
    if (left_ > 0) {
      GroupScales<GroupSums, D, 1>(format_, panel_, group_, &scale);
      FetchAhead(group_, format_.group_bytes());
      const uint8_t* block = group_ + format_.scale_bytes;
      const __m512i zero = Zero(block);
      block += format_.zero_bytes;
      group_ += format_.group_bytes();
      for (int64_t k = Smaller(features_, left_); k > 0; k -= kBlockDepth, block += D::kBlockBytes, words_ += 2 * kWordRow) {
        __m512i words[2];
        D::Words(block, zero, words);
        Avx512::StoreWords(words_, words[0]);
        Avx512::StoreWords(words_ + kWordRow, words[1]);
      }
      left_ -= features_;
    }
    for (; words_ < end; words_ += kWordRow) Avx512::StoreWords(words_, Avx512::ZeroWords());
    _mm512_storeu_ps(scales_, scale);
    scales_ += kPairWidth;
  }

  MOED_INLINE __m512i Zero(const uint8_t* zeros) const {
    if (format_.zero_bytes == 0) return _mm512_set1_epi8(static_cast<char>(static_cast<uint8_t>(format_.zero)));
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    return _mm512_mullo_epi32(words, _mm512_set1_epi32(0x01010101));  // a byte into each byte of its word
  }

  const PanelFormat& format_;
  const uint8_t* const panel_;
  const uint8_t* group_;
  const int64_t features_;  // of a segment
  int64_t left_;            // features that are not decoded yet
  int64_t padded_;          // segments likewise
  uint8_t* words_;
  float* scales_;
};

struct NoDecoder {
  MOED_INLINE void Run() {}
};

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_AMX_DECODE_INL_H_
