// Products by AMX tiles for short groups (amx_dot-inl.h has the long ones): one tile product is a whole group.
//
// 16 rows of x times the 16 output features of a panel are one tile of sums for each group; it is stored, converted and scaled
// into 16 vectors that stay in registers over the groups of a chunk. A product takes three times as long as it occupies the tile
// unit, so four tiles take turns: while one group is multiplied, the one before the last is stored and the one before that scaled.
// Nothing stops this stream, neither a new panel nor new rows nor a new chunk; meanwhile the weights of the next chunk are
// decoded.
//
// Weights are signed here: the zero point is taken off while they are decoded, so that a group's sum needs no correction. Integer
// sums are exact and are scaled in ascending order of groups: the bits are those of every other integer product. As in
// amx_dot-inl.h records of x follow each other, and up to 15 after the last are read, and of each up to 192 bytes beyond its
// codes, which meet weights of 0.
#ifndef MOED_KERNELS_CPU_AMX_GROUP_INL_H_
#define MOED_KERNELS_CPU_AMX_GROUP_INL_H_

#include <immintrin.h>

#include "kernels/cpu/amx_decode-inl.h"
#include "kernels/cpu/amx_dot-inl.h"

namespace moed::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRows * kWordRow;

// What does not change in a call.
struct GroupSizes {
  int64_t x_stride;  // from row to row
  int64_t x_step;    // from segment to segment
  int64_t w_step;
  uint8_t* sums;     // kTilesOfSums * kTileBytes
};

// At most 16 rows times a panel, over the segments of a chunk.
struct GroupUnit {
  const uint8_t* x = nullptr;      // codes of the first row
  const uint8_t* w = nullptr;      // words of the panel
  const float* scales = nullptr;   // of the panel; kPairWidth from segment to segment
  int64_t segments = 0;            // a multiple of kTilesOfSums
  float* out = nullptr;            // of the first row; kPairWidth from row to row
  int64_t rows = 0;
  bool begins = false;             // else the sums of earlier chunks are in `out`
};

// Where the next product reads.
struct GroupAt {
  const uint8_t* x;
  const uint8_t* w;
};

// Tile of sums kTile = the products of a segment. Spelled out: GCC's intrinsics take no numbers of tiles but literal ones.
template <int kTile>
MOED_INLINE void GroupProduct(const GroupSizes& sizes, GroupAt& at) {
  asm volatile(
      "tilezero %%tmm%c[sums]\n\t"
      "tileloadd (%[x],%[x_stride],1), %%tmm%c[rows]\n\t"
      "tileloadd (%[w],%[w_stride],1), %%tmm%c[weights]\n\t"
      "tdpbssd %%tmm%c[weights], %%tmm%c[rows], %%tmm%c[sums]"
      :
      : [sums] "i"(kTile), [rows] "i"(4 + kTile % 2), [weights] "i"(6 + kTile % 2), [x] "r"(at.x), [x_stride] "r"(sizes.x_stride),
        [w] "r"(at.w), [w_stride] "r"(kWordRow)
      : "memory");
  at.x += sizes.x_step;
  at.w += sizes.w_step;
}

// With an address of its own for each tile some would wait in vector registers, and come back from there behind the products.
template <int kTile>
MOED_INLINE void StoreGroup(const GroupSizes& sizes) {
  asm volatile("tilestored %%tmm%c[sums], %c[at](%[to],%[stride],1)"
               :
               : [sums] "i"(kTile), [at] "i"(kTile * kTileBytes), [to] "r"(sizes.sums), [stride] "r"(kWordRow)
               : "memory");
}

template <int kTile, int kHeight>
MOED_INLINE void ScaleGroup(const GroupSizes& sizes, const float*& scales, __m512 (&sum)[kHeight]) {
  const __m512 scale = _mm512_loadu_ps(scales);
#pragma GCC unroll 16
  for (int r = 0; r < kHeight; ++r) {
    const __m512i group = _mm512_loadu_si512(sizes.sums + kTile * kTileBytes + r * kWordRow);
    sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(group), scale, sum[r]);
    asm("" : "+v"(sum[r]));  // else GCC 12 puts off the last additions, and their operands onto the stack
  }
  scales += kPairWidth;
}

// The first three products of a unit, of which one is stored: what GroupRows starts from.
MOED_INLINE void BeginGroups(const GroupSizes& sizes, const GroupUnit& unit) {
  GroupAt at = {unit.x, unit.w};
  GroupProduct<0>(sizes, at);
  GroupProduct<1>(sizes, at);
  GroupProduct<2>(sizes, at);
  StoreGroup<0>(sizes);
}

template <int kTile, int kHeight>
MOED_INLINE void GroupStep(const GroupSizes& sizes, GroupAt& at, const float*& scales, __m512 (&sum)[kHeight]) {
  GroupProduct<kTile>(sizes, at);
  StoreGroup<(kTile + 2) % kTilesOfSums>(sizes);
  ScaleGroup<(kTile + 1) % kTilesOfSums>(sizes, scales, sum);
}

// The sums of a unit's rows. All of them are the usual case, and conditions for each would cost as much as a product.
template <int kHeight>
MOED_INLINE void LoadRows(const GroupUnit& unit, __m512 (&sum)[kHeight]) {
#pragma GCC unroll 16
  for (int r = 0; r < kHeight; ++r) sum[r] = _mm512_setzero_ps();
  if (unit.begins) return;
  if (unit.rows == kHeight) {
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r) sum[r] = _mm512_loadu_ps(unit.out + r * kPairWidth);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r) {
      if (r < unit.rows) sum[r] = _mm512_loadu_ps(unit.out + r * kPairWidth);
    }
  }
}

template <int kHeight>
MOED_INLINE void StoreRows(int64_t rows, const __m512 (&sum)[kHeight], float* out) {
  if (rows == kHeight) {
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r) _mm512_storeu_ps(out + r * kPairWidth, sum[r]);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r) {
      if (r < rows) _mm512_storeu_ps(out + r * kPairWidth, sum[r]);
    }
  }
}

// A unit begun by BeginGroups, to its end; begins `next`. kHeight is unit.rows rounded up.
template <int kHeight, class Decoder>
MOED_TILE void GroupRows(const GroupSizes& all_sizes, const GroupUnit& unit, const GroupUnit& next, Decoder* decoder) {
  const GroupSizes sizes = all_sizes;  // in registers
  float* const out = unit.out;
  const int64_t rows = unit.rows;
  __m512 sum[kHeight];
  LoadRows(unit, sum);
  GroupAt at = {unit.x + 3 * sizes.x_step, unit.w + 3 * sizes.w_step};
  const float* scales = unit.scales;
  // No condition inside: one for each step took a fifth of the time.
  for (int64_t left = unit.segments - kTilesOfSums; left > 0; left -= kTilesOfSums) {
    decoder->Run();
    GroupStep<3>(sizes, at, scales, sum);
    GroupStep<0>(sizes, at, scales, sum);
    GroupStep<1>(sizes, at, scales, sum);
    GroupStep<2>(sizes, at, scales, sum);
  }
  decoder->Run();
  GroupStep<3>(sizes, at, scales, sum);
  at = {next.x, next.w};
  GroupStep<0>(sizes, at, scales, sum);
  GroupStep<1>(sizes, at, scales, sum);
  GroupStep<2>(sizes, at, scales, sum);
  StoreRows(rows, sum, out);
}

template <class Decoder>
MOED_INLINE void RunGroupRows(const GroupSizes& sizes, const GroupUnit& unit, const GroupUnit& next, Decoder* decoder) {
  switch ((unit.rows + 3) / 4) {
    case 1: return GroupRows<4>(sizes, unit, next, decoder);
    case 2: return GroupRows<8>(sizes, unit, next, decoder);
    case 3: return GroupRows<12>(sizes, unit, next, decoder);
    default: return GroupRows<16>(sizes, unit, next, decoder);
  }
}

// One product: all chunks of all pairs in a line, and in each of them all rows, both panels of 16 rows one after the other.
template <class D>
struct GroupStream {
  const DotArgs& args;
  const PanelFormat& format;
  const int64_t longest;  // features of a chunk

  // A chunk in one of the two halves of the scratch.
  struct Place {
    Chunk chunk;
    int64_t pair;
  };

  MOED_INLINE Place PlaceAt(int64_t pair, int64_t k, int half) const {
    Place place = {NextChunk(format, k, format.group, longest), pair};
    PlaceGroups(args.scratch, half, &place.chunk);
    return place;
  }
  MOED_INLINE const uint8_t* Weights(const Place& place) const { return args.weights + place.pair * 2 * format.panel_bytes; }

  MOED_INLINE bool Last(const Place& place) const {
    return place.pair + 1 == args.pairs && place.chunk.k + FeaturesOf(place.chunk) >= format.depth;
  }
  MOED_INLINE Place After(const Place& place, int half) const {
    const int64_t k = place.chunk.k + FeaturesOf(place.chunk);
    return k < format.depth ? PlaceAt(place.pair, k, half) : PlaceAt(place.pair + 1, 0, half);
  }

  MOED_INLINE GroupUnit UnitOf(const Place& place, int64_t first, int panel) const {
    GroupUnit unit;
    unit.x = args.rows[first] + place.chunk.k;
    unit.w = place.chunk.codes[panel];
    unit.scales = place.chunk.scales + panel * kPanelWidth;
    unit.segments = RoundUpTo(place.chunk.segments, kTilesOfSums);
    unit.out = args.tile + (place.pair * args.count + first) * kPairWidth + panel * kPanelWidth;
    unit.rows = Smaller(kTileRows, args.count - first);
    unit.begins = place.chunk.group == 0;
    return unit;
  }

  // All rows of a chunk; decodes the one after it meanwhile, and ends with that one begun: the same again when there is no other.
  MOED_INLINE void RunChunk(const GroupSizes& sizes, const Place& place, const Place& after, bool last) const {
    const int64_t tiles = (args.count + kTileRows - 1) / kTileRows;
    Chunk ahead = after.chunk;  // its codes are read now, those behind them are fetched
    if (!last) PlanFetch(format, Weights(after), after.pair + 1 == args.pairs, &ahead);
    for (int64_t t = 0, first = 0; t < tiles; ++t, first += kTileRows) {
      FetchNext(ahead, t, tiles);
      for (int panel = 0; panel < 2; ++panel) {
        const bool ends = panel == 1 && t + 1 == tiles;
        const GroupUnit unit = UnitOf(place, first, panel);
        const GroupUnit next = ends ? UnitOf(after, 0, 0) : UnitOf(place, first + (panel == 1 ? kTileRows : 0), 1 - panel);
        if (t == 0 && !last) {
          GroupDecoder<D> decoder(format, Weights(after), after.chunk, panel);
          RunGroupRows(sizes, unit, next, &decoder);
          decoder.Finish();
        } else {
          NoDecoder none;
          RunGroupRows(sizes, unit, next, &none);
        }
      }
    }
  }

  MOED_INLINE void Run() const {
    const int64_t w_step = format.group / GroupSums::kPerWord * kWordRow;
    const GroupSizes sizes = {args.row->bytes, format.group, w_step, args.scratch + kCarryAt};
    Place place = PlaceAt(0, 0, 0);
    for (int panel = 0; panel < 2; ++panel) GroupDecoder<D>(format, Weights(place), place.chunk, panel).Finish();
    BeginGroups(sizes, UnitOf(place, 0, 0));
    for (int half = 1;; half = 1 - half) {
      const bool last = Last(place);
      const Place after = last ? place : After(place, half);
      RunChunk(sizes, place, after, last);
      if (last || after.pair != place.pair) ScaleRows<GroupSums>(args, args.tile + place.pair * args.count * kPairWidth);
      if (last) return;
      place = after;
    }
  }
};

template <class D>
void MultiplyGroups(const DotArgs& args) {
  const PanelFormat& format = *args.format;
  GroupStream<D>{args, format, LongestGroupChunk(format.group)}.Run();
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_AMX_GROUP_INL_H_
