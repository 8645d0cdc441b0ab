// The dot-product kernels, written once over an instruction type T; included by each instruction-set file.
//
// T provides: S (the SIMD type of kernels-inl.h), Acc (a vector of 32-bit sums), kExact (integer sums, which may be split without
// changing a bit), kPerWord (factors in a word: 4 or 2), kChunkFeatures, Step (features that it multiplies at once), and the operations
// used below. As in kernels-inl.h, all code is in an anonymous namespace and uses no library function.
//
// A few rows go straight from the packed codes (dot_direct-inl.h). For more of them a pair of panels is worked off in chunks of up
// to kChunk input features, so that its words stay in the L1 cache: scales and codes of the chunk are decoded into scratch once
// (codes that are words already are read where they lie), then a register tile of up to kMaxRows rows x 32 output features runs
// over all rows. The order of sums depends on the weights only, so a row's result is the same in any company.
#ifndef MOED_KERNELS_CPU_DOT_INL_H_
#define MOED_KERNELS_CPU_DOT_INL_H_

#include <cstdint>

#include "kernels/cpu/dot_direct-inl.h"

namespace moed::cpu {
namespace {

// ---- All rows: Tiles::RunAll(args, chunk, tile) of a type Tiles. ----

// Shape: a type whose Run<kRows> computes one tile of so many rows.
template <class Shape, int kRows>
MOED_INLINE void RunTile(int64_t rows, const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Shape::template Run<kRows>(args, chunk, first, tile);
    RunTile<Shape, kRows - 1>(rows, args, chunk, first, tile);
  }
}

// Part `part` of `parts` of the next chunk's codes, into the second-level cache: decoding meets them cold otherwise, and waits.
MOED_INLINE void FetchNext(const Chunk& chunk, int64_t part, int64_t parts) {
  const int64_t begin = chunk.next_bytes * part / parts / 64 * 64, end = chunk.next_bytes * (part + 1) / parts / 64 * 64;
  for (int64_t at = begin; at < end; at += 64) {
    __builtin_prefetch(chunk.next[0] + at, 0, 2);
    __builtin_prefetch(chunk.next[1] + at, 0, 2);
  }
}

// As few tiles of up to kMaxRows rows as will do, as equal as can be.
template <class Shape, int kMaxRows>
struct EvenTiles {
  static MOED_INLINE void RunAll(const DotArgs& args, const Chunk& chunk, float* tile) {
    const int64_t tiles = (args.count + kMaxRows - 1) / kMaxRows;
    int64_t first = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t rows = (args.count - first + tiles - t - 1) / (tiles - t);
      FetchNext(chunk, t, tiles);
      RunTile<Shape, kMaxRows>(rows, args, chunk, first, tile);
      first += rows;
    }
  }
};

template <class T>
struct WordShape {
  template <int kRows>
  static MOED_INLINE void Run(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
    WordTile<T, kRows>(args, chunk, first, tile);
  }
};

template <class T>
struct GroupShape {
  template <int kRows>
  static MOED_INLINE void Run(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
    GroupTile<T, kRows>(args, chunk, first, tile);
  }
};

// Groups so short that adding their sums to memory each time takes longer than a lower tile.
constexpr int64_t kShortGroup = 32;

// Tiles of a type T with a one-word product, of up to kMaxRows rows; of up to kGroupRows for short groups, whose second set of sums
// has to fit into the registers (0: it does not).
template <class T, int kMaxRows, int kGroupRows>
struct WordTiles {
  static MOED_INLINE void RunAll(const DotArgs& args, const Chunk& chunk, float* tile) {
    if constexpr (kGroupRows > 0) {
      if (chunk.features <= kShortGroup && chunk.begins) return EvenTiles<GroupShape<T>, kGroupRows>::RunAll(args, chunk, tile);
    }
    EvenTiles<WordShape<T>, kMaxRows>::RunAll(args, chunk, tile);
  }
};

// ---- All chunks, all pairs. ----

// From this many rows on arithmetic takes long enough to fetch the next weights meanwhile.
constexpr int64_t kFetchRows = 4;

// Where the codes after this chunk begin: further on in both panels, or in the next pair.
MOED_INLINE void PlanFetch(const PanelFormat& format, const uint8_t* weights, bool last_pair, Chunk* chunk) {
  const int64_t features = (chunk->segments - 1) * chunk->features + chunk->last_features;
  const bool last_chunk = chunk->k + features >= format.depth;
  if (last_chunk && last_pair) return;
  const int64_t groups = chunk->segments > 1 ? chunk->segments : 0;
  chunk->next_bytes = features / kBlockDepth * format.block_bytes + groups * (format.scale_bytes + format.zero_bytes);
  for (int p = 0; p < 2; ++p) {
    const uint8_t* panel = weights + p * format.panel_bytes;
    chunk->next[p] = last_chunk ? panel + 2 * format.panel_bytes : PackedCodes(format, *chunk, panel, 0) + chunk->next_bytes;
  }
}

// Up to kUpTo rows straight from the packed codes, in tiles of up to kRows (0: none): decoding anew for each tile then takes less
// time than writing decoded words to the cache and reading them. More rows by way of the cache.
template <class T, class D, class Tiles, int kRows, int kUpTo>
void MultiplyWords(const DotArgs& args) {
  if constexpr (kRows > 0) {
    if (args.count <= kUpTo) return MultiplyDirect<DotProducts<T, D, kRows, 2>>(args);
  }
  const PanelFormat& format = *args.format;
  const int64_t step = T::Step(format.group);
  const int64_t padded = RoundUpTo(Smaller(format.group, T::kChunkFeatures), step);
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    const uint8_t* weights = args.weights + pair * 2 * format.panel_bytes;
    float* tile = args.tile + pair * args.count * kPairWidth;
    for (int64_t k = 0; k < format.depth;) {
      Chunk chunk = NextChunk(format, k, padded, T::kChunkFeatures);
      chunk.carry = args.scratch + kCarryAt;
      LoadScales<T, D>(format, weights, args.scratch, &chunk);
      LoadCodes<T, D>(format, weights, step, args.scratch, &chunk);
      if (args.count >= kFetchRows) PlanFetch(format, weights, pair + 1 == args.pairs, &chunk);
      Tiles::RunAll(args, chunk, tile);
      k += (chunk.segments - 1) * chunk.features + chunk.last_features;
    }
    if constexpr (T::kExact) ScaleRows<T>(args, tile);
  }
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_INL_H_
