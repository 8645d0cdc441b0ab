// The dot-product kernels, written once over an instruction type T; included by each instruction-set file.
//
// T provides: S (the SIMD type of kernels-inl.h), Acc (a vector of 32-bit sums), kExact (integer sums, which may be split without
// changing a bit), kPerWord (factors in a word: 4 or 2), kChunkFeatures, Step (features that it multiplies at once), and the operations
// used below. As in kernels-inl.h, all code
// is in an anonymous namespace and uses no library function.
//
// A pair of panels is worked off in chunks of up to kChunk input features, so that its words stay in the L1 cache: scales and codes
// of the chunk are decoded into scratch once (codes that are words already are read where they lie), then a register tile of
// up to kMaxRows rows x 32 output features runs over all rows. The order of sums depends on the weights only, so a row's result is
// the same in any company.
#ifndef MOED_KERNELS_CPU_DOT_INL_H_
#define MOED_KERNELS_CPU_DOT_INL_H_

#include <cstdint>

#include "kernels/cpu/dot_table.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/scale-inl.h"

namespace moed::cpu {
namespace {

constexpr int64_t kChunk = 512;  // at most; T::kChunkFeatures of them
constexpr int64_t kWordRow = 64;  // bytes of 16 words, one per output feature of a panel
constexpr int64_t kMaxSegments = kChunk / kBlockDepth;

// Parts of the scratch: scales and zero points [segment][32], codes of two panels, sums carried between chunks of one group.
constexpr int64_t kScalesAt = 0;
constexpr int64_t kZerosAt = kScalesAt + kMaxSegments * kPairWidth * 4;
constexpr int64_t kCodesAt = kZerosAt + kMaxSegments * kPairWidth * 4;
constexpr int64_t kPanelCodes = kChunk / 2 * kWordRow;
constexpr int64_t kCarryAt = kCodesAt + 2 * kPanelCodes;
static_assert(kCarryAt + int64_t{kRowBlock} * kPairWidth * 4 <= kDotScratchBytes);

// Input features [k, ...) of a pair: `segments` whole groups, or a piece of one group.
struct Chunk {
  int64_t k = 0;
  int64_t group = 0;          // of the first segment
  int64_t segments = 0;
  int64_t features = 0;       // of each segment
  int64_t last_features = 0;  // of the last one
  bool begins = false;        // the sums of the segments start here
  bool ends = false;          // ... and are complete in the end
  const uint8_t* codes[2] = {nullptr, nullptr};  // words of either panel
  int64_t segment_bytes = 0;  // from one segment's words to the next one's
  const uint8_t* next[2] = {nullptr, nullptr};   // where the next chunk's codes begin
  int64_t next_bytes = 0;                        // of either panel, to be fetched meanwhile
  uint8_t* carry = nullptr;  // [rows][32] sums of a group that goes on in the next chunk
  const float* scales = nullptr;
  const uint8_t* zeros = nullptr;  // 32-bit factors of a row's sums; null when one number does for all

  int64_t of(int64_t segment) const { return segment + 1 == segments ? last_features : features; }
};

MOED_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOED_INLINE int64_t RoundUpTo(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The chunk that starts at feature k. `padded` is what a segment takes up in scratch, in features; a group above `longest` features
// goes in pieces of that length.
MOED_INLINE Chunk NextChunk(const PanelFormat& format, int64_t k, int64_t padded, int64_t longest) {
  Chunk chunk;
  chunk.k = k;
  chunk.group = k / format.group;
  const int64_t group_begin = chunk.group * format.group;
  const int64_t group_end = Smaller(group_begin + format.group, format.depth);
  if (format.group > longest) {
    chunk.segments = 1;
    chunk.features = chunk.last_features = Smaller(longest, group_end - k);
    chunk.begins = k == group_begin;
    chunk.ends = k + chunk.features == group_end;
    return chunk;
  }
  const int64_t left = (format.depth - k + format.group - 1) / format.group;
  chunk.segments = Smaller(left, longest / padded);
  chunk.features = format.group;
  chunk.last_features = Smaller(format.group, format.depth - k - (chunk.segments - 1) * format.group);
  chunk.begins = chunk.ends = true;
  return chunk;
}

// First byte of the codes of segment `segment` of a panel, as packed.
MOED_INLINE const uint8_t* PackedCodes(const PanelFormat& format, const Chunk& chunk, const uint8_t* panel, int64_t segment) {
  const int64_t group = chunk.group + segment;
  const int64_t inside = segment == 0 ? chunk.k - group * format.group : 0;
  return panel + format.group_offset(group) + format.scale_bytes + format.zero_bytes + inside / kBlockDepth * format.block_bytes;
}

// Scales of a group for output features [lane, lane + kLanes) of a panel as float32, times the decoder's factor; 1 where the weights
// have none.
template <class T, class D>
MOED_INLINE typename T::S::F ScaleOf(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
  using S = typename T::S;
  if (format.scale_bytes == 0) return S::Set(D::kFactor);
  const typename S::F scale = LoadScale<S>(format, panel, group, lane);
  return D::kFactor == 1.0f ? scale : S::Mul(scale, S::Set(D::kFactor));
}

// Zero points as what a row's sum is multiplied with.
template <class T, class D>
MOED_INLINE typename T::Acc ZeroOf(const PanelFormat& format, const uint8_t* group, int lane) {
  return T::ZeroFactor(T::S::LoadU8(group + format.scale_bytes + lane), D::kBase);
}

// scales[segment][32], zeros likewise.
template <class T, class D>
MOED_INLINE void LoadScales(const PanelFormat& format, const uint8_t* weights, uint8_t* scratch, Chunk* chunk) {
  using S = typename T::S;
  float* scales = reinterpret_cast<float*>(scratch + kScalesAt);
  for (int64_t s = 0; s < chunk->segments; ++s) {
    for (int c = 0; c < kPairWidth; c += S::kLanes) {
      const uint8_t* panel = weights + c / kPanelWidth * format.panel_bytes;
      const uint8_t* group = panel + format.group_offset(chunk->group + s);
      S::Store(scales + s * kPairWidth + c, ScaleOf<T, D>(format, panel, group, c % kPanelWidth));
      if (format.zero_bytes > 0) {
        T::StoreAcc(scratch + kZerosAt + (s * kPairWidth + c) * 4, ZeroOf<T, D>(format, group, c % kPanelWidth));
      }
    }
  }
  chunk->scales = scales;
  chunk->zeros = format.zero_bytes > 0 ? scratch + kZerosAt : nullptr;
}

// Decodes the words of both panels into scratch, segments padded with zeros to a multiple of `step` features, or points at words
// that are usable as they are.
template <class T, class D>
MOED_INLINE void LoadCodes(const PanelFormat& format, const uint8_t* weights, int64_t step, uint8_t* scratch, Chunk* chunk) {
  constexpr int64_t kBlockRows = kBlockDepth / T::kPerWord;
  for (int p = 0; p < 2; ++p) {
    const uint8_t* panel = weights + p * format.panel_bytes;
    if (D::kWords && chunk->last_features % step == 0 && chunk->features % step == 0) {
      chunk->codes[p] = PackedCodes(format, *chunk, panel, 0);
      chunk->segment_bytes = format.group_bytes();
      continue;
    }
    uint8_t* out = scratch + kCodesAt + p * kPanelCodes;
    chunk->codes[p] = out;
    chunk->segment_bytes = RoundUpTo(chunk->features, step) / T::kPerWord * kWordRow;
    for (int64_t s = 0; s < chunk->segments; ++s) {
      const uint8_t* block = PackedCodes(format, *chunk, panel, s);
      uint8_t* row = out + s * chunk->segment_bytes;
      const int64_t features = chunk->of(s);
      for (int64_t k = 0; k < features; k += kBlockDepth, block += format.block_bytes, row += kBlockRows * kWordRow) {
        for (int lane = 0; lane < kPanelWidth; lane += T::S::kLanes) {
          typename T::S::I decoded[kBlockRows];
          D::Words(block, lane, decoded);
#pragma GCC unroll 4
          for (int i = 0; i < kBlockRows; ++i) T::S::StoreWords(row + i * kWordRow + 4 * lane, decoded[i]);
        }
      }
      for (int64_t k = features; k % step != 0; k += T::kPerWord, row += kWordRow) {
        for (int lane = 0; lane < kPanelWidth; lane += T::S::kLanes) T::S::StoreWords(row + 4 * lane, T::S::ZeroWords());
      }
    }
  }
}

// ---- The register tile. ----

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
#pragma GCC unroll 4
      for (int p = 0; p < 2 * kPairs; ++p) {
        FetchAhead(weights + p * args.format->panel_bytes + codes + block * args.format->block_bytes, args.format->block_bytes);
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
  static constexpr int kDirectRows = 2;  // of a tile that goes straight from the packed codes; 0: none
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
  static constexpr int kDirectRows = T::S::kLanes == kPanelWidth ? 8 : 2;
  static MOED_INLINE void RunAll(const DotArgs& args, const Chunk& chunk, float* tile) {
    if constexpr (kGroupRows > 0) {
      if (chunk.features <= kShortGroup && chunk.begins) return EvenTiles<GroupShape<T>, kGroupRows>::RunAll(args, chunk, tile);
    }
    EvenTiles<WordShape<T>, kMaxRows>::RunAll(args, chunk, tile);
  }
};

// ---- All chunks, all pairs. ----

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

// Decoding anew for every 8 rows takes less time, up to so many rows, than writing decoded words to the cache and reading them.
constexpr int64_t kDirectUpTo = 16;

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

// Rows [first, first + kRows) of kPairs pairs, whose results start at `tile`.
template <class T, class D, int kRows, int kPairs>
MOED_TILE void DirectTile(const DotArgs& args, int64_t first, const uint8_t* weights, float* tile) {
  DirectRows<T, D, kRows, kPairs>{args, args.rows + first, weights, tile}.Run();
}

template <class T, class D, int kRows>
MOED_INLINE void RunDirect(int64_t rows, const DotArgs& args, int64_t first, const uint8_t* weights, float* tile) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return DirectTile<T, D, kRows, 1>(args, first, weights, tile);
    RunDirect<T, D, kRows - 1>(rows, args, first, weights, tile);
  }
}

// All rows straight from the packed codes, in tiles of up to kMaxRows.
template <class T, class D, int kMaxRows>
MOED_INLINE void MultiplyDirect(const DotArgs& args) {
  const int64_t pair_bytes = 2 * args.format->panel_bytes, tiles = (args.count + kMaxRows - 1) / kMaxRows;
  int64_t pair = 0;
  if constexpr (!T::kExact) {  // sums in a chain: two pairs at once hide the latency of the instruction
    for (; args.count == 1 && pair + 2 <= args.pairs; pair += 2) {
      DirectTile<T, D, 1, 2>(args, 0, args.weights + pair * pair_bytes, args.tile + pair * kPairWidth);
    }
  }
  for (; pair < args.pairs; ++pair) {
    float* tile = args.tile + pair * args.count * kPairWidth;
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
      const int64_t rows = (args.count - first + tiles - t - 1) / (tiles - t);
      RunDirect<T, D, kMaxRows>(rows, args, first, args.weights + pair * pair_bytes, tile + first * kPairWidth);
      first += rows;
    }
    if constexpr (T::kExact) ScaleRows<T>(args, tile);
  }
}

template <class T, class D, class Tiles>
void MultiplyWords(const DotArgs& args) {
  // Codes that are words are used where they lie anyway: only where memory is the limit does the direct way gain something there.
  constexpr int kDirectTile = D::kWords && Tiles::kDirectRows > 2 ? 2 : Tiles::kDirectRows;
  if constexpr (kDirectTile > 0) {
    if (args.count <= (kDirectTile > 2 ? kDirectUpTo : kDirectTile)) return MultiplyDirect<T, D, kDirectTile>(args);
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
