// Products by AMX tiles (dot-inl.h): 16 rows of x times 16 output features of a panel and 64 bytes of codes in one instruction.
//
// A tile of weights is 16 rows of words as they are packed or decoded, a tile of x 16 records' codes; so records of an expert must
// follow each other in memory, and up to 15 after the last are read (and their results ignored). Two tiles of x meet two of weights
// in four tiles of sums. Sums of a segment are stored and scaled in vectors. The instructions want a configured tile unit: configured and released by each Multiply, on the thread that runs it.
#ifndef MOED_KERNELS_CPU_AMX_DOT_INL_H_
#define MOED_KERNELS_CPU_AMX_DOT_INL_H_

#include <immintrin.h>

#include "kernels/cpu/dot-inl.h"

namespace moed::cpu {
namespace {

constexpr int64_t kTileRows = 16;

// LDTILECFG's operand (Intel SDM, palette 1): tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// For `words` words of x, and as many rows of weights, in one instruction.
MOED_INLINE void Configure(int64_t words) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? 4 * words : kWordRow);
    config.rows[t] = static_cast<uint8_t>(t < 6 ? kTileRows : words);
  }
  _tile_loadconfig(&config);
}

// Sums of one segment: two panels, `kTall` times 16 rows, to sums[16 * kTall][32] (32-bit each).
// Op::MultiplyN() adds to tile of sums N (the compiler wants the numbers of tiles spelled out).
template <class Op, int kTall>
MOED_INLINE void TileSums(const uint8_t* const* w, const uint8_t* x, int64_t x_stride, int64_t steps, int64_t words, uint8_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i) {
    _tile_loadd(6, w[0] + i * words * kWordRow, kWordRow);
    _tile_loadd(4, x + i * words * 4, x_stride);
    Op::Multiply0();
    _tile_loadd(7, w[1] + i * words * kWordRow, kWordRow);
    Op::Multiply1();
    if constexpr (kTall == 2) {
      _tile_loadd(5, x + i * words * 4 + kTileRows * x_stride, x_stride);
      Op::Multiply2();
      Op::Multiply3();
    }
  }
  constexpr int64_t kStride = kPairWidth * 4;
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kStride / 2, kStride);
  if constexpr (kTall == 2) {
    _tile_stored(2, sums + kTileRows * kStride, kStride);
    _tile_stored(3, sums + kTileRows * kStride + kStride / 2, kStride);
  }
}

// Rows [first, first + rows) of a chunk, at most 32.
template <class T, class Op, int kTall>
MOED_INLINE void AmxTile(const DotArgs& args, const Chunk& chunk, int64_t first, int64_t rows, float* tile) {
  constexpr int kColumns = kPairWidth / T::S::kLanes;
  alignas(64) uint8_t sums[kTall * kTileRows * kPairWidth * 4];
  const int64_t step = T::Step(args.format->group), words = step / T::kPerWord;
  for (int64_t s = 0; s < chunk.segments; ++s) {
    const uint8_t* w[2] = {chunk.codes[0] + s * chunk.segment_bytes, chunk.codes[1] + s * chunk.segment_bytes};
    const uint8_t* x = args.rows[first] + (chunk.k + s * chunk.features) / T::kPerWord * 4;
    TileSums<Op, kTall>(w, x, args.row->bytes, (chunk.of(s) + step - 1) / step, words, sums);
    for (int64_t r = 0; r < rows; ++r) {
      typename T::Acc acc[1][kColumns];
      Begin<T>(args, chunk, s, first + r, acc);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        acc[0][c] = T::AddAcc(acc[0][c], T::LoadAcc(sums + (r * kPairWidth + c * T::S::kLanes) * 4));
      }
      End<T>(args, chunk, s, first + r, tile, acc);
    }
  }
}

template <class T, class Op>
struct AmxTiles {
  static MOED_INLINE void RunAll(const DotArgs& args, const Chunk& chunk, float* tile) {
    for (int64_t first = 0; first < args.count; first += 2 * kTileRows) {
      const int64_t rows = Smaller(2 * kTileRows, args.count - first);
      if (rows > kTileRows) {
        AmxTile<T, Op, 2>(args, chunk, first, rows, tile);
      } else {
        AmxTile<T, Op, 1>(args, chunk, first, rows, tile);
      }
    }
  }
};

// One multiply by tiles: Kernel(args) with the tile unit configured for T and released after.
template <class T, class Kernel>
MOED_INLINE void WithTiles(const DotArgs& args, const Kernel& kernel) {
  Configure(T::Step(args.format->group) / T::kPerWord);
  kernel(args);
  _tile_release();
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_AMX_DOT_INL_H_
