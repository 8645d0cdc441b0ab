// What integer products share (dot-inl.h): operations on sums, decoders of weights into words, and rows of int8 codes.
//
// Weights are unsigned codes and x is signed, as the instructions want it; a zero point z costs nothing in the loop, since
// sum (w - z) x = sum w x - z sum x and the sums of x are part of a row's record. FP4 values are integers when doubled: their
// codes are looked up as 2 * value + 12.
#ifndef MOED_KERNELS_CPU_INT8_DOT_INL_H_
#define MOED_KERNELS_CPU_INT8_DOT_INL_H_

#include "kernels/cpu/dot-inl.h"

namespace moed::cpu {
namespace {

alignas(16) constexpr uint8_t kFp4Doubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The operations on integer sums, for a SIMD type.
template <class Simd>
struct IntegerSums {
  using S = Simd;
  using Acc = typename S::I;
  static constexpr bool kExact = true;
  static constexpr int64_t kChunkFeatures = kChunk;
  static MOED_INLINE int64_t Step(int64_t /*group*/) { return kBlockDepth; }
  static MOED_INLINE Acc ZeroAcc() { return S::ZeroWords(); }
  static MOED_INLINE Acc AddAcc(Acc a, Acc b) { return S::AddWords(a, b); }
  static MOED_INLINE Acc LoadAcc(const uint8_t* at) { return S::LoadWords(at); }
  static MOED_INLINE void StoreAcc(uint8_t* at, Acc acc) { S::StoreWords(at, acc); }
  static MOED_INLINE Acc ZeroFactor(typename S::F zero, float /*base*/) { return S::ToWords(zero); }
  // `small`: both factors fit into 16 bits, where the product costs one instruction.
  static MOED_INLINE Acc ZeroTimesSum(Acc zero, const uint8_t* sum, bool small) {
    const Acc factor = S::BroadcastWord(sum);
    return small ? S::MaddHalves(zero, factor) : S::MulWords(zero, factor);
  }
  static MOED_INLINE Acc ConstantTimesSum(const uint8_t* sum) { return S::BroadcastWord(sum); }
  static MOED_INLINE typename S::F ToFloat(Acc acc) { return S::ToFloats(acc); }
};

// ---- Decoders: one vector of output features of one block of 8 input features, as vectors of words. ----

template <class S>
struct NibbleQuads {
  static constexpr int64_t kBlockBytes = kWordRow;
  static constexpr bool kWords = false;  // whether packed codes are words already
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int lane, typename S::I* out) {
    const typename S::I words = S::LoadWords(block + 4 * lane), mask = S::SetWords(0x0F0F0F0F);
    out[0] = S::AndWords(words, mask);
    out[1] = S::AndWords(S::template ShiftRightHalves<4>(words), mask);
  }
};

template <class S>
struct Fp4Quads {
  static constexpr int64_t kBlockBytes = kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = 0.5f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int lane, typename S::I* out) {
    NibbleQuads<S>::Words(block, lane, out);
    out[0] = S::LookUpBytes(kFp4Doubled, out[0]);
    out[1] = S::LookUpBytes(kFp4Doubled, out[1]);
  }
};

template <class S>
struct ByteQuads {
  static constexpr int64_t kBlockBytes = 2 * kWordRow;
  static constexpr bool kWords = true;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int lane, typename S::I* out) {
    out[0] = S::LoadWords(block + 4 * lane);
    out[1] = S::LoadWords(block + kWordRow + 4 * lane);
  }
};

// int8 codes as 16-bit words: bytes 0 and 2 of a word, then bytes 1 and 3.
template <class S>
struct ByteHalves {
  static constexpr int64_t kBlockBytes = 2 * kWordRow;
  static constexpr bool kWords = false;
  static constexpr float kFactor = 1.0f;
  static constexpr float kBase = 0.0f;
  static MOED_INLINE void Words(const uint8_t* block, int lane, typename S::I* out) {
    const typename S::I mask = S::SetWords(0x00FF00FF);
    for (int q = 0; q < 2; ++q) {
      const typename S::I words = S::LoadWords(block + q * kWordRow + 4 * lane);
      out[2 * q] = S::AndWords(words, mask);
      out[2 * q + 1] = S::template ShiftRightHalves<8>(words);
    }
  }
};

// Products of a type T that takes four factors in a word, whatever the weights are; kRows: of a tile that goes straight from the
// packed codes, 0 where no tile does.
template <class T, class Tiles, int kRows>
MOED_INLINE void MultiplyQuads(const DotArgs& args) {
  using S = typename T::S;
  // Up to so many rows go the direct way; words that need no decoding lose less on the other one.
  constexpr int kDecoded = 32, kAsTheyAre = 16;
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyWords<T, NibbleQuads<S>, Tiles, kRows, kDecoded>(args);
    case ElementType::kFp4E2m1: return MultiplyWords<T, Fp4Quads<S>, Tiles, kRows, kDecoded>(args);
    default: return MultiplyWords<T, ByteQuads<S>, Tiles, kRows, kAsTheyAre>(args);
  }
}

// ---- Rows of codes. ----

// Puts each 8 of n codes of `width` bytes into the order of the weights' words; 16 bytes at a time, so up to 8 bytes beyond.
template <class S>
MOED_INLINE void Reorder(RowOrder order, int64_t width, int64_t n, uint8_t* codes) {
  if (order == RowOrder::kNatural) return;
  alignas(16) static constexpr uint8_t kQuads[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  alignas(16) static constexpr uint8_t kHalves[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  for (int64_t at = 0; at < n * width; at += 16) S::ShuffleBytes(codes + at, order == RowOrder::kNibbleQuads ? kQuads : kHalves);
}

// Largest magnitude of x[n], n a multiple of kBlockDepth; NaN or infinite when a value is.
template <class S>
MOED_INLINE float RowAbsMax(const float* x, int64_t n) {
  typename S::F largest = S::Zero(), taint = S::Zero();
  int64_t k = 0;
  for (; k + S::kLanes <= n; k += S::kLanes) {
    const typename S::F value = S::Load(x + k);
    largest = S::MaxKeepNan(largest, S::Abs(value));
    taint = S::Fma(value, S::Zero(), taint);  // NaN once a value is not finite
  }
  float result = S::Largest(largest) + S::Sum(taint);
  for (; k < n; ++k) {
    const float magnitude = x[k] < 0.0f ? -x[k] : x[k];
    if (!(magnitude <= result)) result = magnitude + (result - result);
  }
  return result;
}

template <class S>
MOED_INLINE bool HasNan(const float* x, int64_t n) {
  bool nan = false;
  for (int64_t k = 0; k < n; ++k) nan |= x[k] != x[k];
  return nan;
}

// The scale of a row, after the rules of kernels/activation_quant.h; NaN makes the whole result NaN, 0 makes it 0.
template <class S>
MOED_INLINE float ScaleOfRow(const RowArgs& args) {
  const int64_t depth = args.format->depth;
  if (args.rule == RowScale::kStatic) return HasNan<S>(args.x, depth) ? __builtin_nanf("") : args.value;
  const float absmax = args.rule == RowScale::kAbsMax ? args.value : RowAbsMax<S>(args.x, depth);
  return absmax - absmax == 0.0f ? absmax / 127.0f : __builtin_nanf("");
}

// Codes of kLanes values: round to nearest even, saturating.
template <class S>
MOED_INLINE typename S::F CodesOf(const float* x, typename S::F scale, typename S::F lowest) {
  const typename S::F code = S::Round(S::Div(S::Load(x), scale));
  return S::MaxKeepNan(lowest, S::MinKeepNan(S::Set(127.0f), code));
}

template <class S>
MOED_INLINE void StoreCodes(RowCodes codes, typename S::F value, uint8_t* out) {
  if (codes == RowCodes::kInt8) S::StoreInt8(out, value); else S::StoreInt16(out, value);
}

// A group's sum as its row's record holds it, from sums of codes at places 0, 1, ... modulo kLanes. Quads of nibbles have features
// 0 to 3 of each block in the lower halves of their words.
template <class S>
MOED_INLINE int32_t RecordSum(const RowFormat& format, typename S::F sums) {
  if (!format.half_sums) return format.sum_factor * static_cast<int32_t>(S::Sum(sums));
  float lanes[S::kLanes];
  S::Store(lanes, sums);
  int32_t halves[2] = {0, 0};
  for (int i = 0; i < S::kLanes; ++i) halves[i / 4 % 2] += static_cast<int32_t>(lanes[i]);
  const uint32_t lower = static_cast<uint32_t>(format.sum_factor * halves[0]);
  const uint32_t upper = static_cast<uint32_t>(format.sum_factor * halves[1]);
  return static_cast<int32_t>((lower & 0xFFFF) | upper << 16);
}

template <class S>
void MakeIntegerRow(const RowArgs& args) {
  const RowFormat& format = *args.format;
  const int64_t width = format.code_bytes();
  for (int64_t i = 0; i < format.bytes; i += 4 * S::kLanes) S::StoreWords(args.out + i, S::ZeroWords());
  const float own = ScaleOfRow<S>(args);
  float* scale_at = reinterpret_cast<float*>(args.out + format.scale_offset);
  *scale_at = own;
  if (!(own != 0.0f) || own != own) return;  // all codes are 0
  const typename S::F scale = S::Set(own), lowest = S::Set(args.rule == RowScale::kStatic ? -128.0f : -127.0f);
  int32_t* sums = reinterpret_cast<int32_t*>(args.out + format.sums_offset);
  for (int64_t k = 0; k < format.depth;) {
    const int64_t end = Smaller(k + format.group, format.depth);
    typename S::F sum = S::Zero();  // exact: below 2^24 for groups of up to 2^17 features
    for (; k + S::kLanes <= end; k += S::kLanes) {
      const typename S::F codes = CodesOf<S>(args.x + k, scale, lowest);
      sum = S::Add(sum, codes);
      StoreCodes<S>(format.codes, codes, args.out + k * width);
    }
    if (k < end) {  // half a vector
      float rest[S::kLanes] = {};
      uint8_t stored[2 * S::kLanes];
      for (int64_t i = 0; i < end - k; ++i) rest[i] = args.x[k + i];
      const typename S::F codes = CodesOf<S>(rest, scale, lowest);
      sum = S::Add(sum, codes);
      StoreCodes<S>(format.codes, codes, stored);
      for (int64_t i = 0; i < (end - k) * width; ++i) args.out[k * width + i] = stored[i];
      k = end;
    }
    *sums++ = RecordSum<S>(format, sum);
  }
  Reorder<S>(format.order, width, format.depth, args.out);
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_INT8_DOT_INL_H_
