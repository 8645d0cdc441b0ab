// The register tile of the dot-product kernels (dot-inl.h): a few rows times the 32 output features of a pair, over the words of a
// chunk.
#ifndef MOED_KERNELS_CPU_DOT_TILE_INL_H_
#define MOED_KERNELS_CPU_DOT_TILE_INL_H_

#include <cstdint>

#include "kernels/cpu/dot_chunk-inl.h"

namespace moed::cpu {
namespace {

// Sums of so many int8 codes fit into 16 bits.
constexpr int64_t kSmallGroup = 128;

// Calls body(r, c) for every row and vector of a tile.
template <int kRows, int kColumns, class Body>
MOED_INLINE void ForTile(const Body& body) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) body(r, c);
  }
}

// Sums of segment `s` before their first product: minus the zero point times the row's sum, or what was carried here.
template <class T, int kRows, int kColumns>
MOED_INLINE void Begin(const DotArgs& args, const Chunk& chunk, int64_t s, int64_t first, typename T::Acc (&acc)[kRows][kColumns]) {
  constexpr int kLanes = T::S::kLanes;
  const int64_t sum = args.row->sums_offset + 4 * (chunk.group + s);
  const uint8_t* carried = chunk.carry + first * kPairWidth * 4;
  if (!chunk.begins) {
    ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::LoadAcc(carried + (r * kPairWidth + c * kLanes) * 4); });
  } else if (chunk.zeros != nullptr) {
    const uint8_t* zeros = chunk.zeros + s * kPairWidth * 4;
    const bool small = args.format->group <= kSmallGroup;
    ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::ZeroTimesSum(T::LoadAcc(zeros + c * kLanes * 4), args.rows[first + r] + sum, small); });
  } else {
    ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::ConstantTimesSum(args.rows[first + r] + sum); });
  }
}

// Adds complete sums, times their scales, to the tile, which starts at the first group; carries incomplete ones.
template <class T, int kRows, int kColumns>
MOED_INLINE void End(const Chunk& chunk, int64_t s, int64_t first, float* tile, typename T::Acc (&acc)[kRows][kColumns]) {
  using S = typename T::S;
  uint8_t* carried = chunk.carry + first * kPairWidth * 4;
  const float* scales = chunk.scales + s * kPairWidth;
  float* out = tile + first * kPairWidth;
  if (!chunk.ends) {
    ForTile<kRows, kColumns>([&](int r, int c) { T::StoreAcc(carried + (r * kPairWidth + c * S::kLanes) * 4, acc[r][c]); });
  } else if (chunk.group + s == 0) {
    ForTile<kRows, kColumns>([&](int r, int c) {
      S::Store(out + r * kPairWidth + c * S::kLanes, S::Fma(T::ToFloat(acc[r][c]), S::Load(scales + c * S::kLanes), S::Zero()));
    });
  } else {
    ForTile<kRows, kColumns>([&](int r, int c) {
      float* at = out + r * kPairWidth + c * S::kLanes;
      S::Store(at, S::Fma(T::ToFloat(acc[r][c]), S::Load(scales + c * S::kLanes), S::Load(at)));
    });
  }
}

// Calls body(Index<0>()), body(Index<1>()), ... : numbers that are known to the compiler.
template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class Body>
MOED_INLINE void ForEach(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>());
    ForEach<kCount, kFirst + 1>(body);
  }
}

template <class T>
MOED_INLINE typename T::S::I WeightsOf(const uint8_t* const* w, int64_t i, int c) {
  constexpr int kLanes = T::S::kLanes;
  return T::S::LoadWords(w[c * kLanes / kPanelWidth] + i * kWordRow + c * kLanes % kPanelWidth * 4);
}

// One word of every row times one word of every output feature. The rows' words stay in registers meanwhile, the weights come one
// vector at a time (the other way round GCC 12 spills).
template <class T, int kRows, int kColumns>
MOED_INLINE void WordStep(const uint8_t* const* w, const uint8_t* const* x, int64_t i, typename T::Acc (&acc)[kRows][kColumns]) {
  typename T::S::I factors[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) factors[r] = T::S::BroadcastWord(x[r] + 4 * i);
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) {
    const typename T::S::I weights = WeightsOf<T>(w, i, c);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r][c] = T::Dot(acc[r][c], weights, factors[r]);
  }
}

// Sums of segment `s` for rows [first, first + kRows), started by Begin.
template <class T, int kRows, int kColumns>
MOED_INLINE void SegmentSums(const DotArgs& args, const Chunk& chunk, int64_t s, int64_t first, typename T::Acc (&acc)[kRows][kColumns]) {
  // Independent sums where a few rows alone would wait for each other, as far as there are registers (32 of 512 bits, 16 of 256).
  constexpr int kSums = kRows * kColumns, kRoom = T::S::kLanes / 2;
  constexpr int kSplit = !T::kExact || 2 * kSums > kRoom ? 1 : kSums == 2 ? 4 : 2;
  typename T::Acc more[kSplit][kRows][kColumns];
#pragma GCC unroll 4
  for (int u = 1; u < kSplit; ++u) ForTile<kRows, kColumns>([&](int r, int c) { more[u][r][c] = T::ZeroAcc(); });
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = args.rows[first + r] + (chunk.k + s * chunk.features) / T::kPerWord * 4;
  const uint8_t* w[2] = {chunk.codes[0] + s * chunk.segment_bytes, chunk.codes[1] + s * chunk.segment_bytes};
  const int64_t words = chunk.of(s) / T::kPerWord;
  int64_t i = 0;
  for (; i + kSplit <= words; i += kSplit) {
    WordStep<T>(w, x, i, acc);
#pragma GCC unroll 4
    for (int u = 1; u < kSplit; ++u) WordStep<T>(w, x, i + u, more[u]);
  }
  for (; i < words; ++i) WordStep<T>(w, x, i, acc);
#pragma GCC unroll 4
  for (int u = 1; u < kSplit; ++u) {
    ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = T::AddAcc(acc[r][c], more[u][r][c]); });
  }
}

// Rows [first, first + kRows) times all segments of a chunk.
template <class T, int kRows>
MOED_TILE void WordTile(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
  constexpr int kColumns = kPairWidth / T::S::kLanes;
  for (int64_t s = 0; s < chunk.segments; ++s) {
    typename T::Acc acc[kRows][kColumns];
    Begin<T>(args, chunk, s, first, acc);
    SegmentSums<T>(args, chunk, s, first, acc);
    End<T>(chunk, s, first, tile, acc);
  }
}

// The same for whole groups, with the scaled sums in registers from the first segment to the last.
template <class T, int kRows>
MOED_TILE void GroupTile(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
  using S = typename T::S;
  constexpr int kColumns = kPairWidth / S::kLanes;
  typename S::F sum[kRows][kColumns];
  float* out = tile + first * kPairWidth;
  if (chunk.group == 0) {
    ForTile<kRows, kColumns>([&](int r, int c) { sum[r][c] = S::Zero(); });
  } else {
    ForTile<kRows, kColumns>([&](int r, int c) { sum[r][c] = S::Load(out + r * kPairWidth + c * S::kLanes); });
  }
  for (int64_t s = 0; s < chunk.segments; ++s) {
    typename T::Acc acc[kRows][kColumns];
    Begin<T>(args, chunk, s, first, acc);
    SegmentSums<T>(args, chunk, s, first, acc);
    const float* scales = chunk.scales + s * kPairWidth;
    ForTile<kRows, kColumns>([&](int r, int c) { sum[r][c] = S::Fma(T::ToFloat(acc[r][c]), S::Load(scales + c * S::kLanes), sum[r][c]); });
  }
  ForTile<kRows, kColumns>([&](int r, int c) { S::Store(out + r * kPairWidth + c * S::kLanes, sum[r][c]); });
}

// Rows' own scales, after all groups.
template <class T>
MOED_INLINE void ScaleRows(const DotArgs& args, float* tile) {
  using S = typename T::S;
  for (int64_t r = 0; r < args.count; ++r) {
    const typename S::F scale = S::Broadcast(reinterpret_cast<const float*>(args.rows[r] + args.row->scale_offset));
    for (int c = 0; c < kPairWidth; c += S::kLanes) {
      float* at = tile + r * kPairWidth + c;
      S::Store(at, S::Mul(S::Load(at), scale));
    }
  }
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_TILE_INL_H_
