// The dot-product kernels' way for a few rows (dot-inl.h): straight from the packed codes.
#ifndef MOED_KERNELS_CPU_DOT_DIRECT_INL_H_
#define MOED_KERNELS_CPU_DOT_DIRECT_INL_H_

#include <cstdint>

#include "kernels/cpu/dot_tile-inl.h"

namespace moed::cpu {
namespace {

// A few rows straight from the packed codes, with no way through memory: kPairs pairs side by side, for enough independent sums
// where they cannot be split.
template <class T, class D, int kRows, int kPairs>
struct DirectRows {
  using S = typename T::S;
  static constexpr int kLanes = S::kLanes;
  static constexpr int kColumns = kPairs * kPairWidth / kLanes;
  static constexpr int kBlockRows = kBlockDepth / T::kPerWord;
  static constexpr int kSplit = T::kExact && kRows * kColumns * 4 <= S::kLanes ? 2 : 1;
  using Sums = typename T::Acc[kRows][kColumns];

  const DotArgs& args;
  const uint8_t* const* rows;
  const uint8_t* weights;  // first pair
  float* tile;             // [kPairs][kRows][32]
  int64_t ahead;           // distance of what is fetched meanwhile; 0: nothing

  static MOED_INLINE int Lane(int c) { return c * kLanes % kPanelWidth; }
  MOED_INLINE const uint8_t* Panel(int c) const { return weights + c * kLanes / kPanelWidth * args.format->panel_bytes; }
  MOED_INLINE const uint8_t* Group(int c, int64_t group) const { return Panel(c) + args.format->group_offset(group); }
  MOED_INLINE uint8_t* Carry(int r, int c) const { return args.scratch + kCarryAt + (r * kColumns + c) * kLanes * 4; }
  MOED_INLINE float* Out(int r, int c) const {
    return tile + (c * kLanes / kPairWidth * kRows + r) * kPairWidth + c * kLanes % kPairWidth;
  }

  MOED_INLINE void Begin(const Chunk& chunk, int64_t group, Sums& acc) const {
    const PanelFormat& format = *args.format;
    const int64_t sum = args.row->sums_offset + 4 * group;
    if (!chunk.begins) {
      ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::LoadAcc(Carry(r, c)); });
    } else if (format.zero_bytes > 0) {
      ForTile<kRows, kColumns>([&](int r, int c) {
        acc[r][c] = T::ZeroTimesSum(ZeroOf<T, D>(format, Group(c, group), Lane(c)), rows[r] + sum, format.group <= kSmallGroup);
      });
    } else {
      ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::ConstantTimesSum(rows[r] + sum); });
    }
  }

  // Blocks of segment `s`, into sums that take turns.
  MOED_INLINE void Blocks(const Chunk& chunk, int64_t s, Sums (&acc)[kSplit]) const {
    const int64_t x = (chunk.k + s * chunk.features) / T::kPerWord * 4;
    const int64_t codes = PackedCodes(*args.format, chunk, weights, s) - weights;
    for (int64_t block = 0; block < chunk.of(s) / kBlockDepth; ++block) {
      for (int p = 0; p < 2 * kPairs && ahead > 0; ++p) {
        FetchAhead(weights + p * args.format->panel_bytes + codes + block * args.format->block_bytes, args.format->block_bytes, ahead);
      }
      Block(codes + block * args.format->block_bytes, x + block * kBlockRows * 4, acc);
    }
  }

  // One block of weights at `codes` of each panel, words of x at `x` of each row. What there is less of stays in registers: the words
  // of two vectors of weights, or those of the rows.
  MOED_INLINE void Block(int64_t codes, int64_t x, Sums (&acc)[kSplit]) const {
    if constexpr (kColumns == 2) {
      typename S::I words[kColumns][kBlockRows];
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) D::Words(Panel(c) + codes, Lane(c), words[c]);
#pragma GCC unroll 4
      for (int i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const typename S::I factor = S::BroadcastWord(rows[r] + x + 4 * i);
#pragma GCC unroll 2
          for (int c = 0; c < kColumns; ++c) acc[i % kSplit][r][c] = T::Dot(acc[i % kSplit][r][c], words[c][i], factor);
        }
      }
    } else {
      typename S::I factors[kRows][kBlockRows];
      ForTile<kRows, kBlockRows>([&](int r, int i) { factors[r][i] = S::BroadcastWord(rows[r] + x + 4 * i); });
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        typename S::I words[kBlockRows];
        D::Words(Panel(c) + codes, Lane(c), words);
#pragma GCC unroll 4
        for (int i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 2
          for (int r = 0; r < kRows; ++r) acc[i % kSplit][r][c] = T::Dot(acc[i % kSplit][r][c], words[i], factors[r][i]);
        }
      }
    }
  }

  MOED_INLINE void End(const Chunk& chunk, int64_t group, const Sums& acc) const {
    if (!chunk.ends) return ForTile<kRows, kColumns>([&](int r, int c) { T::StoreAcc(Carry(r, c), acc[r][c]); });
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const typename S::F scale = ScaleOf<T, D>(*args.format, Panel(c), Group(c, group), Lane(c));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename S::F before = group == 0 ? S::Zero() : S::Load(Out(r, c));
        S::Store(Out(r, c), S::Fma(T::ToFloat(acc[r][c]), scale, before));
      }
    }
  }

  MOED_INLINE void Run() const {
    const int64_t padded = RoundUpTo(Smaller(args.format->group, T::kChunkFeatures), kBlockDepth);
    for (int64_t k = 0; k < args.format->depth;) {
      const Chunk chunk = NextChunk(*args.format, k, padded, T::kChunkFeatures);
      for (int64_t s = 0; s < chunk.segments; ++s) {
        Sums acc[kSplit];
        Begin(chunk, chunk.group + s, acc[0]);
        if constexpr (kSplit == 2) ForTile<kRows, kColumns>([&](int r, int c) { acc[1][r][c] = T::ZeroAcc(); });
        Blocks(chunk, s, acc);
        if constexpr (kSplit == 2) ForTile<kRows, kColumns>([&](int r, int c) { acc[0][r][c] = T::AddAcc(acc[0][r][c], acc[1][r][c]); });
        End(chunk, chunk.group + s, acc[0]);
      }
      k += (chunk.segments - 1) * chunk.features + chunk.last_features;
    }
  }
};

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_DIRECT_INL_H_
