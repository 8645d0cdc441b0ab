// Integer products without VNNI, exact: 4-bit weights by VPMADDUBSW, 8-bit weights by VPMADDWD (dot-inl.h).
//
// VPMADDUBSW adds two u8 x s8 products in 16 bits and saturates. 4-bit codes are far from that: with |x| <= 128 a word's half holds
// eight sums of two products of int4 (8 * 2 * 15 * 128 = 30,720) and four of FP4 (codes up to 24), so the sums are widened
// once in eight or four words. 8-bit codes do not fit and are multiplied in 16 bits.
#ifndef MOED_KERNELS_CPU_MADD_DOT_INL_H_
#define MOED_KERNELS_CPU_MADD_DOT_INL_H_

#include "kernels/cpu/int8_dot-inl.h"

namespace moed::cpu {
namespace {

// Simd also provides AddMaddBytes (u8 x s8 to 16 bits), AddMaddHalves and MaddHalves (16 x 16 to 32 bits).
template <class Simd>
struct MaddBytes : IntegerSums<Simd> {
  static constexpr int kPerWord = 4;
  // One word widened at once: for one or two rows, which wait for memory anyway.
  static MOED_INLINE typename Simd::I Dot(typename Simd::I acc, typename Simd::I weights, typename Simd::I x) {
    const typename Simd::I products = Simd::AddMaddBytes(Simd::ZeroWords(), weights, x);
    return Simd::AddMaddHalves(acc, products, Simd::SetWords(0x00010001));
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

// Rows [first, first + kRows) times whole groups of at most kBlock words: nothing but 16-bit sums lives in registers.
template <class T, int kRows, int kBlock>
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
    ForTile<kRows, kColumns>([&](int r, int c) { sum[r][c] = S::ZeroWords(); });
    ByteSums<S>(w, x, 0, chunk.of(s) / 4, sum);
    const int64_t at = args.row->sums_offset + 4 * (chunk.group + s);
    const float* scales = chunk.scales + s * kPairWidth;
    const uint8_t* zeros = chunk.zeros == nullptr ? nullptr : chunk.zeros + s * kPairWidth * 4;
    ForTile<kRows, kColumns>([&](int r, int c) {
      const uint8_t* own = args.rows[first + r] + at;
      const typename S::I start =
          zeros == nullptr ? T::ConstantTimesSum(own) : T::ZeroTimesSum(T::LoadAcc(zeros + c * S::kLanes * 4), own, true);
      float* to = out + r * kPairWidth + c * S::kLanes;
      const typename S::F products = T::ToFloat(S::AddMaddHalves(start, sum[r][c], ones));
      S::Store(to, S::Fma(products, S::Load(scales + c * S::kLanes), S::Load(to)));
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

template <class S, int kBlock>
struct ByteShape {
  template <int kRows>
  static MOED_INLINE void Run(const DotArgs& args, const Chunk& chunk, int64_t first, float* tile) {
    if (chunk.begins && chunk.ends && chunk.features <= 4 * kBlock) {
      ShortByteTile<MaddBytes<S>, kRows, kBlock>(args, chunk, first, tile);
    } else {
      ByteTile<MaddBytes<S>, kRows, kBlock>(args, chunk, first, tile);
    }
  }
};

template <class S, int kMaxRows, int kHalfRows>
void MultiplyByMadd(const DotArgs& args) {
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyWords<MaddBytes<S>, NibbleQuads<S>, EvenTiles<ByteShape<S, 8>, kMaxRows>>(args);
    case ElementType::kFp4E2m1: return MultiplyWords<MaddBytes<S>, Fp4Quads<S>, EvenTiles<ByteShape<S, 4>, kMaxRows>>(args);
    default: return MultiplyWords<MaddHalves<S>, ByteHalves<S>, WordTiles<MaddHalves<S>, kHalfRows, 0>>(args);
  }
}

template <class S, int kMaxRows, int kHalfRows>
constexpr DotTable MakeMaddTable() {
  return {{RowCodes::kInt8, RowOrder::kNibbleQuads},
          {RowCodes::kInt16, RowOrder::kHalfWords},
          0,
          0,
          MakeIntegerRow<S>,
          MultiplyByMadd<S, kMaxRows, kHalfRows>};
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_MADD_DOT_INL_H_
