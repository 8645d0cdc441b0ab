// Integer products without VNNI, exact: 4-bit weights by VPMADDUBSW, 8-bit weights by VPMADDWD (dot-inl.h).
//
// VPMADDUBSW adds two u8 x s8 products in 16 bits and saturates. 4-bit codes are far from that: with |x| <= 128 a word's half holds
// eight sums of two products of int4 (8 * 2 * 15 * 128 = 30,720) and four of FP4 (codes up to 24), so the sums are widened
// once in eight or four words. In groups of up to 32 features, which end after eight words, they start at minus the zero point
// times the row's sums instead: whatever they overflow to on the way (additions wrap around), what they end at fits into 16 bits
// (int4 16 * 15 * 128, FP4 16 * 12 * 128). 8-bit codes do not fit and are multiplied in 16 bits.
#ifndef MOED_KERNELS_CPU_MADD_DOT_INL_H_
#define MOED_KERNELS_CPU_MADD_DOT_INL_H_

#include "kernels/cpu/int8_dot-inl.h"

namespace moed::cpu {
namespace {

// Simd also provides MaddBytes and AddMaddBytes (u8 x s8 to 16 bits), MaddHalves and AddMaddHalves (16 x 16 to 32 bits), MulHalves
// and TwiceHalf.
template <class Simd>
struct MaddBytes : IntegerSums<Simd> {
  static constexpr int kPerWord = 4;
};

constexpr int64_t kShortFeatures = 32;

// Sums of 16 bits of a group of up to kShortFeatures, which start with the half sums of the row's record.
template <class Simd>
struct ShortMaddBytes : MaddBytes<Simd> {
  using Acc = typename Simd::I;
  static MOED_INLINE Acc ZeroFactor(typename Simd::F zero, float /*base*/) { return Simd::TwiceHalf(Simd::ToWords(zero)); }
  static MOED_INLINE Acc ZeroTimesSum(Acc zero, const uint8_t* sum, bool /*small*/) {
    return Simd::MulHalves(zero, Simd::BroadcastWord(sum));
  }
};

template <class Simd>
struct MaddHalves : IntegerSums<Simd> {
  static constexpr int kPerWord = 2;
  static MOED_INLINE typename Simd::I Dot(typename Simd::I acc, typename Simd::I weights, typename Simd::I x) {
    return Simd::AddMaddHalves(acc, weights, x);
  }
};

// Sums of 16 bits over `count` words, at least one and at most as many as fit.
template <class S, int kRows, int kColumns>
MOED_INLINE void ByteSums(const uint8_t* const* w, const uint8_t* const* x, int64_t first, int64_t count,
                          typename S::I (&sum)[kRows][kColumns]) {
  for (int64_t i = first; i < first + count; ++i) {
    typename S::I factors[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) factors[r] = S::BroadcastWord(x[r] + 4 * i);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const typename S::I weights = S::LoadWords(w[c * S::kLanes / kPanelWidth] + i * kWordRow + c * S::kLanes % kPanelWidth * 4);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][c] = S::AddMaddBytes(sum[r][c], weights, factors[r]);
    }
  }
}

// Rows [first, first + kRows) times whole groups of at most kShortFeatures: nothing but 16-bit sums lives in registers.
template <class T, int kRows>
MOED_TILE void ShortByteTile(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
  using S = typename T::S;
  constexpr int kColumns = kPairWidth / S::kLanes;
  const typename S::I ones = S::SetWords(0x00010001);
  float* out = tile + first * kPairWidth;
  if (chunk.group == 0) ForTile<kRows, kColumns>([&](int r, int c) { S::Store(out + r * kPairWidth + c * S::kLanes, S::Zero()); });
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = args.rows[first + r] + chunk.k / 4 * 4;
  const uint8_t* w[2] = {chunk.codes[0], chunk.codes[1]};
  for (int64_t s = 0; s < chunk.segments; ++s) {
    typename S::I sum[kRows][kColumns];
    Begin<T>(args, chunk, s, first, sum);
    ByteSums<S>(w, x, 0, chunk.of(s) / 4, sum);
    const float* scales = chunk.scales + s * kPairWidth;
    ForTile<kRows, kColumns>([&](int r, int c) {
      float* to = out + r * kPairWidth + c * S::kLanes;
      S::Store(to, S::Fma(T::ToFloat(S::MaddHalves(sum[r][c], ones)), S::Load(scales + c * S::kLanes), S::Load(to)));
    });
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] += chunk.features;
    w[0] += chunk.segment_bytes;
    w[1] += chunk.segment_bytes;
  }
}

// Rows [first, first + kRows) times all segments of a chunk, widening once in kBlock words.
template <class T, int kRows, int kBlock>
MOED_TILE void ByteTile(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
  using S = typename T::S;
  constexpr int kColumns = kPairWidth / S::kLanes;
  const typename S::I ones = S::SetWords(0x00010001);
  for (int64_t s = 0; s < chunk.segments; ++s) {
    typename S::I acc[kRows][kColumns];
    Begin<T>(args, chunk, s, first, acc);
    const uint8_t* x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = args.rows[first + r] + (chunk.k + s * chunk.features) / 4 * 4;
    const uint8_t* w[2] = {chunk.codes[0] + s * chunk.segment_bytes, chunk.codes[1] + s * chunk.segment_bytes};
    const int64_t words = chunk.of(s) / 4;
    for (int64_t i = 0; i < words; i += kBlock) {
      typename S::I sum[kRows][kColumns];
      ForTile<kRows, kColumns>([&](int r, int c) { sum[r][c] = S::ZeroWords(); });
      ByteSums<S>(w, x, i, Smaller(kBlock, words - i), sum);
      ForTile<kRows, kColumns>([&](int r, int c) { acc[r][c] = S::AddWords(acc[r][c], S::MaddHalves(sum[r][c], ones)); });
    }
    End<T>(chunk, s, first, tile, acc);
  }
}

// Tiles of a type T: short groups, or sums that are widened once in kBlock words.
template <class T>
struct ShortShape {
  template <int kRows>
  static MOED_INLINE void Run(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
    ShortByteTile<T, kRows>(args, chunk, first, tile);
  }
};

template <class T, int kBlock>
struct ByteShape {
  template <int kRows>
  static MOED_INLINE void Run(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
    ByteTile<T, kRows, kBlock>(args, chunk, first, tile);
  }
};

// Products of four bytes in a word of weights by a decoder D, in sums of 16 bits, which may span kFeatures input features.
template <class Type, class D, int64_t kFeatures, bool kStart>
struct ByteProducts {
  using T = Type;
  using S = typename T::S;
  using Decoder = D;
  static constexpr int kMaxRows = S::kLanes / 2;
  static constexpr int kColumns(int rows) { return rows > 2 ? 2 : kPairWidth / S::kLanes; }
  static constexpr int kPairs = 1;
  static constexpr bool kFromStart = kStart;
  static constexpr bool kMaySplit = false;
  static constexpr int64_t kPiece = kFeatures;
  static MOED_INLINE typename S::I Product(typename S::I weights, typename S::I x) { return S::MaddBytes(weights, x); }
  static MOED_INLINE typename S::I AddProduct(typename S::I sum, typename S::I weights, typename S::I x) {
    return S::AddMaddBytes(sum, weights, x);
  }
  static MOED_INLINE typename S::I Widen(typename S::I sum) { return S::MaddHalves(sum, S::SetWords(0x00010001)); }
};

// 4-bit codes, kFeatures of whose products fit into 16 bits: up to kDirect rows straight from the packed codes, more of them by way
// of the cache, in tiles of kMaxRows.
template <class S, class D, int64_t kFeatures, int kDirect, int kMaxRows>
MOED_INLINE void MultiplyBytes(const DotArgs& args) {
  static_assert(kMaxRows > 0 || kDirect >= kRowBlock);
  const bool direct = args.count <= kDirect;
  if (args.row->half_sums) {
    using T = ShortMaddBytes<S>;
    if (direct) return MultiplyDirect<ByteProducts<T, D, kShortFeatures, true>>(args);
    if constexpr (kMaxRows > 0) MultiplyWords<T, D, EvenTiles<ShortShape<T>, kMaxRows>, 0, 0>(args);
  } else {
    using T = MaddBytes<S>;
    if (direct) return MultiplyDirect<ByteProducts<T, D, kFeatures, false>>(args);
    if constexpr (kMaxRows > 0) MultiplyWords<T, D, EvenTiles<ByteShape<T, kFeatures / 4>, kMaxRows>, 0, 0>(args);
  }
}

template <class S, int kDirect, int kMaxRows>
void MultiplyByMadd(const DotArgs& args) {
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyBytes<S, NibbleQuads<S>, 32, kDirect, kMaxRows>(args);
    case ElementType::kFp4E2m1: return MultiplyBytes<S, Fp4Quads<S>, 16, kDirect, kMaxRows>(args);
    default: return MultiplyDirect<DotProducts<MaddHalves<S>, ByteHalves<S>, 8, S::kLanes / 8>>(args);
  }
}

template <class S, int kDirect, int kMaxRows>
constexpr DotTable MakeMaddTable() {
  return {{RowCodes::kInt8, RowOrder::kNibbleQuads, 0, kShortFeatures},
          {RowCodes::kInt16, RowOrder::kHalfWords},
          0,
          0,
          MakeIntegerRow<S>,
          MultiplyByMadd<S, kDirect, kMaxRows>};
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_MADD_DOT_INL_H_
