// A chunk of a pair of panels, for the dot-product kernels (dot-inl.h): which input features it holds, its scales, zero points and
// words, decoded into scratch or where they lie.
#ifndef MOED_KERNELS_CPU_DOT_CHUNK_INL_H_
#define MOED_KERNELS_CPU_DOT_CHUNK_INL_H_

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

// Scales of a group of some panels, at `group` of the first one, as kVectors vectors of float32 times the decoder's factor; 1 where
// the weights have none. Asks for their type once: for few rows, asking for each vector takes as long as the products.
template <class T, class D, int kVectors>
MOED_INLINE void GroupScales(const PanelFormat& format, const uint8_t* weights, const uint8_t* group, typename T::S::F* scales) {
  using S = typename T::S;
  const auto at = [&](int c) { return c * S::kLanes / kPanelWidth * format.panel_bytes; };
  const auto each = [&](auto&& scale) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) scales[c] = scale(group + at(c), c * S::kLanes % kPanelWidth);
  };
  switch (format.scale) {
    case ScaleType::kNone: return each([](const uint8_t*, int) { return S::Set(D::kFactor); });
    case ScaleType::kF16: each([](const uint8_t* first, int lane) { return S::LoadF16(first + 2 * lane); }); break;
    case ScaleType::kBf16: each([](const uint8_t* first, int lane) { return S::LoadBf16(first + 2 * lane); }); break;
    case ScaleType::kE8m0: each([](const uint8_t* first, int lane) { return S::LoadE8m0(first + lane); }); break;
    case ScaleType::kE4m3:
      each([](const uint8_t* first, int lane) { return S::Mul(S::LoadSmallE4m3(first + lane), S::Set(kSmallE4m3)); });
      break;
    default: each([](const uint8_t* first, int lane) { return S::LoadBytes(first + 4 * lane); }); break;
  }
  for (int c = 0; c < kVectors && format.header_bytes > 0; ++c) {
    const typename S::F global = S::LoadBytes(weights + at(c) + 4 * (c * S::kLanes % kPanelWidth));
    scales[c] = format.divide_by_global ? S::Div(scales[c], global) : S::Mul(scales[c], global);
  }
  for (int c = 0; c < kVectors && D::kFactor != 1.0f; ++c) scales[c] = S::Mul(scales[c], S::Set(D::kFactor));
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

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_CHUNK_INL_H_
