// Products by AMX tiles (dot-inl.h): 16 rows of x times 16 output features of a panel and 64 bytes of codes in one instruction.
//
// A tile of weights is 16 rows of words as they are packed or decoded, a tile of x 16 records' codes; so records of an expert must
// follow each other in memory, and up to 15 after the last are read (and their results ignored). Two tiles of x meet two of weights
// in four tiles of sums. Sums of a segment are stored and scaled in vectors. The instructions want a configured tile unit: configured
// and released by each Multiply, on the thread that runs it.
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
  // The intrinsic of GCC 12 says that it reads 8 of the 64 bytes.
  asm volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

constexpr int64_t kSumStride = kPairWidth * 4;  // bytes of a row of sums

// The tiles of sums of `kTall` times 16 rows and two panels, from and to sums[16 * kTall][32] (32-bit each).
template <int kTall>
MOED_INLINE void LoadSums(const uint8_t* sums) {
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, sums + kSumStride / 2, kSumStride);
  if constexpr (kTall == 2) {
    _tile_loadd(2, sums + kTileRows * kSumStride, kSumStride);
    _tile_loadd(3, sums + kTileRows * kSumStride + kSumStride / 2, kSumStride);
  }
}

template <int kTall>
MOED_INLINE void StoreSums(uint8_t* sums) {
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kSumStride / 2, kSumStride);
  if constexpr (kTall == 2) {
    _tile_stored(2, sums + kTileRows * kSumStride, kSumStride);
    _tile_stored(3, sums + kTileRows * kSumStride + kSumStride / 2, kSumStride);
  }
}

// Adds the products of a segment. Op::MultiplyN() adds to tile of sums N (the compiler wants the numbers of tiles spelled out).
template <class Op, int kTall>
MOED_INLINE void AddProducts(const uint8_t* const* w, const uint8_t* x, int64_t x_stride, int64_t steps, int64_t words) {
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
}

// Scales the complete sums of segment `s` into the tile: rows [first, first + rows).
template <class T>
MOED_INLINE void ScaleSums(const DotArgs& args, const Chunk& chunk, int64_t s, int64_t first, int64_t rows, const uint8_t* sums,
                           float* tile) {
  constexpr int kColumns = kPairWidth / T::S::kLanes;
  Chunk whole = chunk;
  whole.begins = true;  // what earlier chunks of the group gave is in the sums
  for (int64_t r = 0; r < rows; ++r) {
    typename T::Acc acc[1][kColumns];
    Begin<T>(args, whole, s, first + r, acc);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) acc[0][c] = T::AddAcc(acc[0][c], T::LoadAcc(sums + r * kSumStride + c * T::S::kLanes * 4));
    End<T>(whole, s, first + r, tile, acc);
  }
}

// Rows [first, first + rows) of a chunk, at most 32. Sums of a group that goes on wait where the vector kernels keep theirs.
template <class T, class Op, int kTall>
MOED_INLINE void AmxTile(const DotArgs& args, const Chunk& chunk, int64_t first, int64_t rows, float* tile) {
  uint8_t* const sums = chunk.carry + first * kSumStride;
  const int64_t step = T::Step(args.format->group), words = step / T::kPerWord;
  for (int64_t s = 0; s < chunk.segments; ++s) {
    const uint8_t* w[2] = {chunk.codes[0] + s * chunk.segment_bytes, chunk.codes[1] + s * chunk.segment_bytes};
    const uint8_t* x = args.rows[first] + (chunk.k + s * chunk.features) / T::kPerWord * 4;
    if (chunk.begins) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      LoadSums<kTall>(sums);
    }
    AddProducts<Op, kTall>(w, x, args.row->bytes, (chunk.of(s) + step - 1) / step, words);
    StoreSums<kTall>(sums);
    if (chunk.ends) ScaleSums<T>(args, chunk, s, first, rows, sums, tile);
  }
}

template <class T, class Op>
struct AmxTiles {
  static MOED_INLINE void RunAll(const DotArgs& args, const Chunk& chunk, float* tile) {
    // Loads of tiles do not tell GCC 12 that they read memory: what was decoded has to be there before the first.
    asm volatile("" : : : "memory");
    const int64_t tiles = (args.count + 2 * kTileRows - 1) / (2 * kTileRows);
    for (int64_t t = 0, first = 0; t < tiles; ++t, first += 2 * kTileRows) {
      FetchNext(chunk, t, tiles);
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
