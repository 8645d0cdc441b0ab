// The dot-product kernels' way for a few rows (dot-inl.h): straight from the packed codes. Weights are decoded in registers, once
// for all rows of a tile, and never written to memory.
//
// P, the product, provides: T (the sums), Decoder, kMaxRows and kColumns(rows) (the tile that the registers hold), kPiece (input
// features that one set of sums may span), kFromStart (whether products are added to what a group starts with, or widened before
// they are), kMaySplit (whether sums may be split), kPairs (pairs side by side for one row, where its sums alone would wait for
// each other), AddProduct, Widen, and, without kFromStart, Product. An output is one chain of additions, or of exact ones: a row's
// result is the same in tiles of any height.
#ifndef MOED_KERNELS_CPU_DOT_DIRECT_INL_H_
#define MOED_KERNELS_CPU_DOT_DIRECT_INL_H_

#include <cstdint>

#include "kernels/cpu/dot_tile-inl.h"
#include "kernels/cpu/fetch-inl.h"

namespace moed::cpu {
namespace {

// kRows rows times kPairs pairs of panels, kColumns vectors of them at a time.
template <class P, int kRows, int kColumns, int kPairs>
struct DirectRows {
  using T = typename P::T;
  using S = typename T::S;
  using D = typename P::Decoder;
  using Acc = typename T::Acc;
  static constexpr int kVectors = kPairs * kPairWidth / S::kLanes;
  static constexpr int kWords = kBlockDepth / T::kPerWord;  // of a block
  // Sums that take turns, if exact, where a few of them alone would wait for each other.
  static constexpr int kSplit = P::kMaySplit && kRows * kColumns * (D::kWords ? 2 : 4) <= S::kLanes ? 2 : 1;
  static constexpr int64_t kFetchBlocks = 4;
  using Sums = Acc[kRows][kColumns];

  const DotArgs& args;
  const PanelFormat& format;
  const uint8_t* const* rows;
  float* tile;  // [kPairs][kRows][32]
  const Fetch& fetch;

  // Some input features of one group.
  struct Piece {
    const uint8_t* codes = nullptr;   // of the first panel
    const uint8_t* scales = nullptr;
    int64_t blocks = 0;
    int64_t x = 0;    // bytes to their words, in a row
    int64_t sum = 0;  // bytes to the row's sum over the group
    bool begins = false, ends = false;  // the group
  };

  static MOED_INLINE int Lane(int c) { return c * S::kLanes % kPanelWidth; }
  MOED_INLINE int64_t Panel(int c) const { return c * S::kLanes / kPanelWidth * format.panel_bytes; }
  MOED_INLINE uint8_t* Carry(int r, int c) const { return args.scratch + kCarryAt + (r * kVectors + c) * S::kLanes * 4; }
  MOED_INLINE float* Out(int r, int c) const {
    return tile + (c * S::kLanes / kPairWidth * kRows + r) * kPairWidth + c * S::kLanes % kPairWidth;
  }

  // GCC 12 would read words that need no decoding once for each row: here they may have changed since.
  static MOED_INLINE void Keep(typename S::I& words) { asm("" : "+v"(words)); }

  template <bool kFirst>
  static MOED_INLINE void Add(Acc& sum, typename S::I weights, typename S::I x) {
    if constexpr (kFirst) sum = P::Product(weights, x); else sum = P::AddProduct(sum, weights, x);
  }

  // One block of vectors [first, first + kColumns) times the rows' words at `x`; the first block of a piece may start the sums.
  // What there is less of stays in registers: the words of the weights, or those of the rows.
  template <bool kFirst>
  MOED_INLINE void Block(const uint8_t* codes, int first, int64_t x, Sums (&sum)[kSplit]) const {
    if constexpr (kColumns > kRows) return BlockByColumns<kFirst>(codes, first, x, sum);
    typename S::I words[kColumns][kWords];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      D::Words(codes + Panel(first + c), Lane(first + c), words[c]);
      if constexpr (D::kWords) ForEach<kWords>([&](auto i) { Keep(words[c][decltype(i)::value]); });
    }
    ForEach<kWords>([&](auto index) {
      constexpr int i = decltype(index)::value;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename S::I factor = S::BroadcastWord(rows[r] + x + 4 * i);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) Add<kFirst && i == 0>(sum[i % kSplit][r][c], words[c][i], factor);
      }
    });
  }

  template <bool kFirst>
  MOED_INLINE void BlockByColumns(const uint8_t* codes, int first, int64_t x, Sums (&sum)[kSplit]) const {
    typename S::I factors[kRows][kWords];
    ForTile<kRows, kWords>([&](int r, int i) { factors[r][i] = S::BroadcastWord(rows[r] + x + 4 * i); });
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      typename S::I words[kWords];
      D::Words(codes + Panel(first + c), Lane(first + c), words);
      ForEach<kWords>([&](auto index) {
        constexpr int i = decltype(index)::value;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) Add<kFirst && i == 0>(sum[i % kSplit][r][c], words[i], factors[r][i]);
      });
    }
  }

  // What the sums of a piece are added to: minus the zero point times the row's sum, or what the group's last piece left.
  MOED_INLINE Acc Before(const Piece& piece, int r, int c) const {
    if (!piece.begins) return T::LoadAcc(Carry(r, c));
    const uint8_t* sum = rows[r] + piece.sum;
    if (format.zero_bytes == 0) return T::ConstantTimesSum(sum);
    return T::ZeroTimesSum(ZeroOf<T, D>(format, piece.scales + Panel(c), Lane(c)), sum, format.group <= kSmallGroup);
  }

  // Products from what a group starts with; what is wanted later is fetched meanwhile, a few lines at a time.
  MOED_INLINE void SumFromStart(const Piece& piece, int first, Sums (&sum)[kSplit]) const {
    ForTile<kRows, kColumns>([&](int r, int c) { sum[0][r][c] = Before(piece, r, first + c); });
    if constexpr (kSplit > 1) ForTile<kRows, kColumns>([&](int r, int c) { sum[1][r][c] = T::ZeroAcc(); });
    const uint8_t *codes = piece.codes, *const end = codes + piece.blocks * D::kBlockBytes;
    constexpr int64_t kStep = kFetchBlocks * D::kBlockBytes;
    int64_t x = piece.x;
    if constexpr (P::kPiece <= kFetchBlocks * kBlockDepth) {
      if (first == 0) fetch.Run<2 * kPairs>(codes, kStep);
      for (; codes < end; codes += D::kBlockBytes, x += kWords * 4) Block<false>(codes, first, x, sum);
    } else {
      while (codes < end) {
        const uint8_t* const some = end - codes < kStep ? end : codes + kStep;
        if (first == 0) fetch.Run<2 * kPairs>(codes, kStep);
        for (; codes < some; codes += D::kBlockBytes, x += kWords * 4) Block<false>(codes, first, x, sum);
      }
    }
    if constexpr (kSplit > 1) {
      ForTile<kRows, kColumns>([&](int r, int c) { sum[0][r][c] = T::AddAcc(sum[0][r][c], sum[1][r][c]); });
    }
    ForTile<kRows, kColumns>([&](int r, int c) { sum[0][r][c] = P::Widen(sum[0][r][c]); });
  }

  // Products in narrow sums, which are widened in the end.
  MOED_INLINE void SumAndWiden(const Piece& piece, int first, Sums (&sum)[kSplit]) const {
    const uint8_t *codes = piece.codes, *const end = codes + piece.blocks * D::kBlockBytes;
    int64_t x = piece.x;
    if (first == 0) fetch.Run<2 * kPairs>(codes, piece.blocks * D::kBlockBytes);
    Block<true>(codes, first, x, sum);
    while ((codes += D::kBlockBytes) < end) Block<false>(codes, first, x += kWords * 4, sum);
    ForTile<kRows, kColumns>([&](int r, int c) {
      sum[0][r][c] = T::AddAcc(P::Widen(sum[0][r][c]), Before(piece, r, first + c));
    });
  }

  MOED_INLINE void Columns(const Piece& piece, int first, const typename S::F* scales) const {
    Sums sum[kSplit];
    if constexpr (P::kFromStart) SumFromStart(piece, first, sum); else SumAndWiden(piece, first, sum);
    if (!piece.ends) return ForTile<kRows, kColumns>([&](int r, int c) { T::StoreAcc(Carry(r, first + c), sum[0][r][c]); });
    ForTile<kRows, kColumns>([&](int r, int c) {
      float* out = Out(r, first + c);
      S::Store(out, S::Fma(T::ToFloat(sum[0][r][c]), scales[first + c], S::Load(out)));
    });
  }

  MOED_INLINE void Run(const uint8_t* weights) const {
    ForTile<kRows, kVectors>([&](int r, int c) { S::Store(Out(r, c), S::Zero()); });
    Piece piece;
    piece.codes = weights + format.header_bytes;
    piece.sum = args.row->sums_offset;
    for (int64_t left = format.depth; left > 0; piece.sum += 4) {
      typename S::F scales[kVectors];
      GroupScales<T, D, kVectors>(format, weights, piece.codes, scales);
      piece.scales = piece.codes;
      piece.codes += format.scale_bytes + format.zero_bytes;
      int64_t features = Smaller(format.group, left);
      left -= features;
      for (piece.begins = true; features > 0; piece.begins = false) {
        piece.blocks = Smaller(features, P::kPiece) / kBlockDepth;
        features -= piece.blocks * kBlockDepth;
        piece.ends = features == 0;
#pragma GCC unroll 4
        for (int first = 0; first < kVectors; first += kColumns) Columns(piece, first, scales);
        piece.codes += piece.blocks * D::kBlockBytes;
        piece.x += piece.blocks * kWords * 4;
      }
    }
  }
};

// Products of a type T that adds them to its sums at once: tiles of up to kRows rows, kSide vectors at a time from three rows on.
template <class Type, class D, int kRows, int kSide>
struct DotProducts {
  using T = Type;
  using Decoder = D;
  static constexpr int kVectors = kPairWidth / T::S::kLanes;
  static constexpr int kMaxRows = kRows;
  static constexpr int kPairs = T::kExact ? 1 : 2;
  static constexpr int kColumns(int rows) { return rows > 2 ? kSide : kVectors; }
  // Where some vectors wait for the others, what the first-level cache keeps until then.
  static constexpr int64_t kPiece = kSide == kVectors ? int64_t{1} << 40 : 128;
  static constexpr bool kFromStart = true;
  static constexpr bool kMaySplit = T::kExact;
  static MOED_INLINE typename T::Acc AddProduct(typename T::Acc sum, typename T::S::I weights, typename T::S::I x) {
    return T::Dot(sum, weights, x);
  }
  static MOED_INLINE typename T::Acc Widen(typename T::Acc sum) { return sum; }
};

template <class P, int kRows, int kPairs>
MOED_TILE void DirectTile(const DotArgs& args, int64_t first, const uint8_t* weights, float* tile, const Fetch& fetch) {
  DirectRows<P, kRows, kPairs * P::kColumns(kRows), kPairs>{args, *args.format, args.rows + first, tile, fetch}.Run(weights);
}

template <class P, int kRows>
MOED_INLINE void RunDirect(int64_t rows, const DotArgs& args, int64_t first, const uint8_t* weights, float* tile,
                           const Fetch& fetch) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return DirectTile<P, kRows, 1>(args, first, weights, tile, fetch);
    RunDirect<P, kRows - 1>(rows, args, first, weights, tile, fetch);
  }
}

// All rows in as few tiles as will do, as equal as can be.
template <class P>
MOED_INLINE void MultiplyDirect(const DotArgs& args) {
  const int64_t panel_bytes = args.format->panel_bytes, tiles = (args.count + P::kMaxRows - 1) / P::kMaxRows;
  int64_t pair = 0;
  for (; P::kPairs == 2 && args.count == 1 && pair + 2 <= args.pairs; pair += 2) {
    const uint8_t* weights = args.weights + pair * 2 * panel_bytes;
    DirectTile<P, 1, P::kPairs>(args, 0, weights, args.tile + pair * kPairWidth, FetchFor(weights, panel_bytes, 0, 1));
  }
  for (; pair < args.pairs; ++pair) {
    const uint8_t* weights = args.weights + pair * 2 * panel_bytes;
    float* tile = args.tile + pair * args.count * kPairWidth;
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
      const int64_t rows = (args.count - first + tiles - t - 1) / (tiles - t);
      RunDirect<P, P::kMaxRows>(rows, args, first, weights, tile + first * kPairWidth, FetchFor(weights, panel_bytes, t, tiles));
      first += rows;
    }
  }
  if constexpr (P::T::kExact) {
    for (pair = 0; pair < args.pairs; ++pair) ScaleRows<typename P::T>(args, args.tile + pair * args.count * kPairWidth);
  }
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_DIRECT_INL_H_
