#include "kernels/cpu/packed_layout.h"

#include <algorithm>
#include <cstring>

#include "kernels/expert_weights.h"

namespace moed::cpu {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Positions of the packed order when a group's length is no multiple of 8: each group is padded on its own.
std::vector<int32_t> PaddedOrder(int64_t features, int64_t group) {
  std::vector<int32_t> source;
  for (int64_t begin = 0; begin < features; begin += group) {
    const int64_t end = std::min(begin + group, features);
    for (int64_t k = begin; k < end; ++k) source.push_back(static_cast<int32_t>(k));
    source.resize(RoundUp(static_cast<int64_t>(source.size()), kBlockDepth), -1);
  }
  return source;
}

// Input feature at packed position `at`, -1 for padding.
int64_t SourceOf(const PackedLayout& layout, int64_t features, int64_t at) {
  if (layout.source.empty()) return at < features ? at : -1;
  return layout.source[at];
}

// Four 32-bit words in a register of the baseline.
typedef uint32_t Words4 __attribute__((vector_size(16)));

constexpr uint32_t kPaddedCodes = 0x88888888u;  // finite whatever the element: 0 for int4, -0 for fp4

// The 4-bit codes of 8 packed positions of one output feature.
uint32_t GatherNibbles(const PackedLayout& layout, const LinearWeights& weights, const uint8_t* codes, int64_t first) {
  uint32_t word = 0;
  for (int i = 0; i < kBlockDepth; ++i) {
    const int64_t k = SourceOf(layout, weights.cols, first + i);
    const uint32_t code = k < 0 ? 8 : (codes[k / 2] >> (4 * (k & 1))) & 0xF;
    word |= code << (4 * i);
  }
  return word;
}

// The rows of a panel in canonical form; null beyond the last output feature.
struct PanelRows {
  const uint8_t* row[kPanelWidth];
  bool full = true;  // no null among them

  PanelRows(const LinearWeights& weights, int64_t first_row) {
    const int64_t row_bytes = weights.row_bytes();
    for (int lane = 0; lane < kPanelWidth; ++lane) {
      const int64_t n = first_row + lane;
      row[lane] = n < weights.rows ? weights.codes.data() + n * row_bytes : nullptr;
      full = full && row[lane] != nullptr;
    }
  }
};

// A canonical row holds 8 consecutive codes as the very word of the layout, so where positions are features in order a block
// is 16 words gathered from 16 rows; the last block of a row and padded orders go code by code.
void PackNibbleBlock(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t first, uint8_t* out) {
  const bool whole = layout.source.empty() && first + kBlockDepth <= weights.cols;
  for (int lane = 0; lane < kPanelWidth; ++lane) {
    uint32_t word = kPaddedCodes;
    if (rows.row[lane] != nullptr) {
      if (whole) {
        std::memcpy(&word, rows.row[lane] + first / 2, 4);
      } else {
        word = GatherNibbles(layout, weights, rows.row[lane], first);
      }
    }
    std::memcpy(out + 4 * lane, &word, 4);
  }
}

// Transposes squares of words: `columns` consecutive words (a multiple of 4) of each of the 16 rows, from byte `offset` on, to
// `columns` lines of 16 words.
void TransposeWords(const PanelRows& rows, int64_t offset, int64_t columns, uint8_t* out) {
  for (int64_t column = 0; column < columns; column += 4) {
    for (int lane = 0; lane < kPanelWidth; lane += 4) {
      Words4 in[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&in[i], rows.row[lane + i] + offset + 4 * column, sizeof(Words4));
      const Words4 low01 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
      const Words4 low23 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
      const Words4 high01 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
      const Words4 high23 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
      const Words4 lines[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                               __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                               __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) std::memcpy(out + ((column + i) * kPanelWidth + lane) * 4, &lines[i], sizeof(Words4));
    }
  }
}

// Where element (i, lane) of a block lies, counted in elements.
int64_t ElementAt(ElementType element, int64_t i, int64_t lane) {
  const int64_t word = element == ElementType::kInt8 ? 4 : element == ElementType::kBf16 ? 2 : 1;
  return (i / word * kPanelWidth + lane) * word + i % word;
}

// Whole elements of 1, 2 or 4 bytes: one block, element by element.
void PackElementBlock(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t first, uint8_t* out) {
  const ElementType element = weights.scheme.element;
  const int64_t bytes = layout.format.block_bytes / (kBlockDepth * kPanelWidth);
  std::memset(out, element == ElementType::kInt8 ? 0x80 : 0, static_cast<size_t>(layout.format.block_bytes));
  for (int64_t i = 0; i < kBlockDepth; ++i) {
    const int64_t k = SourceOf(layout, weights.cols, first + i);
    for (int lane = 0; k >= 0 && lane < kPanelWidth; ++lane) {
      if (rows.row[lane] != nullptr) std::memcpy(out + ElementAt(element, i, lane) * bytes, rows.row[lane] + k * bytes, bytes);
    }
  }
}

// Transposes `columns` consecutive elements of each row (16 bytes of a row or a multiple): words first, then the parts of each
// word.
template <typename Element>
void TransposeElements(const PanelRows& rows, int64_t first, int64_t columns, uint8_t* out) {
  constexpr int kParts = 4 / sizeof(Element);
  for (int64_t column = 0; column < columns; column += 4 * kParts) {
    uint32_t words[4][kPanelWidth];
    TransposeWords(rows, (first + column) * static_cast<int64_t>(sizeof(Element)), 4, reinterpret_cast<uint8_t*>(words));
    for (int word = 0; word < 4; ++word) {
      for (int part = 0; part < kParts; ++part) {
        Element line[kPanelWidth];
        for (int lane = 0; lane < kPanelWidth; ++lane) {
          line[lane] = static_cast<Element>(words[word][lane] >> (8 * part * static_cast<int>(sizeof(Element))));
        }
        std::memcpy(out + (column + word * kParts + part) * static_cast<int64_t>(sizeof(line)), line, sizeof(line));
      }
    }
  }
}

// Positions [at, end) of one group of whole elements: a transpose as far as it goes, of elements or of words of them.
template <typename Element, bool kWords>
void PackElementGroup(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t end,
                      uint8_t* out) {
  constexpr int64_t kStep = 16 / sizeof(Element) < kBlockDepth ? kBlockDepth : 16 / sizeof(Element);
  const bool plain = rows.full && layout.source.empty();
  const int64_t whole = plain ? (std::min(end, weights.cols) - at) / kStep * kStep : 0;
  if constexpr (kWords) {
    TransposeWords(rows, at * static_cast<int64_t>(sizeof(Element)), whole * static_cast<int64_t>(sizeof(Element)) / 4, out);
  } else {
    TransposeElements<Element>(rows, at, whole, out);
  }
  for (int64_t first = at + whole; first < end; first += kBlockDepth) {
    PackElementBlock(layout, weights, rows, first, out + (first - at) / kBlockDepth * layout.format.block_bytes);
  }
}

// One number of each row for a group, from `values` [scale rows, groups]: scales or zero points, elements of type Word.
template <typename Word>
void PackGroupOf(const LinearWeights& weights, const std::vector<uint8_t>& values, int64_t first_row, int64_t group, uint8_t* out) {
  const GroupShape& shape = weights.scheme.group;
  const int64_t groups = GroupCount(weights.cols, shape.cols);
  const int64_t rows = std::clamp<int64_t>(weights.rows - first_row, 0, kPanelWidth);
  Word line[kPanelWidth] = {};
  for (int64_t lane = 0; lane < rows; ++lane) {
    const int64_t row = first_row + lane, scale_row = shape.rows == 1 ? row : shape.rows == 0 ? 0 : row / shape.rows;
    std::memcpy(&line[lane], values.data() + (scale_row * groups + group) * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
  }
  std::memcpy(out, line, sizeof(line));
}

void PackScales(const LinearWeights& weights, int64_t first_row, int64_t group, uint8_t* out) {
  switch (ScaleBytes(weights.scheme.scale)) {
    case 1: return PackGroupOf<uint8_t>(weights, weights.scales, first_row, group, out);
    case 2: return PackGroupOf<uint16_t>(weights, weights.scales, first_row, group, out);
    case 4: return PackGroupOf<uint32_t>(weights, weights.scales, first_row, group, out);
    default: return;
  }
}

}  // namespace

PackedLayout MakeLayout(const WeightScheme& scheme, int64_t features) {
  PackedLayout layout;
  PanelFormat& format = layout.format;
  format.element = scheme.element;
  format.block_bytes = static_cast<int64_t>(kPanelWidth) * ElementBits(scheme.element);  // x 8 features / 8 bits
  format.depth = RoundUp(features, kBlockDepth);
  format.group = format.depth;
  if (!IsUnquantized(scheme.element)) {
    format.scale = scheme.scale;
    format.scale_bytes = static_cast<int64_t>(kPanelWidth) * ScaleBytes(format.scale);
    format.zero_bytes = scheme.zero_points ? kPanelWidth : 0;
    format.zero = IsInteger(scheme.element) ? static_cast<float>(1 << (ElementBits(scheme.element) - 1)) : 0.0f;
    format.divide_by_global = scheme.global_scale == GlobalScale::kDivisor;
    if (scheme.global_scale != GlobalScale::kNone) format.header_bytes = kPanelWidth * static_cast<int64_t>(sizeof(float));
    const int64_t group = scheme.group.cols;
    if (group > 0 && group < features) {
      format.group = RoundUp(group, kBlockDepth);
      if (group % kBlockDepth != 0) {
        layout.source = PaddedOrder(features, group);
        format.depth = static_cast<int64_t>(layout.source.size());
      }
    }
  }
  const int64_t groups = (format.depth + format.group - 1) / std::max<int64_t>(format.group, 1);
  format.panel_bytes = format.header_bytes + groups * (format.scale_bytes + format.zero_bytes) +
                       format.depth / kBlockDepth * format.block_bytes;
  return layout;
}

std::vector<int32_t> ActOrder(const PackedLayout& layout, const LinearWeights& weights) {
  const PanelFormat& format = layout.format;
  const int64_t group = weights.scheme.group.cols;
  std::vector<int32_t> order(static_cast<size_t>(format.depth), -1);
  std::vector<int64_t> filled(static_cast<size_t>(GroupCount(weights.cols, weights.scheme.group.cols)), 0);
  for (int64_t k = 0; k < weights.cols; ++k) {
    const int64_t g = weights.group_index[static_cast<size_t>(k)];
    if (g < 0 || g >= static_cast<int64_t>(filled.size())) return {};
    const int64_t size = std::min(group, weights.cols - g * group);
    if (filled[static_cast<size_t>(g)] == size) return {};
    order[static_cast<size_t>(g * format.group + filled[static_cast<size_t>(g)]++)] = static_cast<int32_t>(k);
  }
  return order;
}

namespace {

// Blocks from position `at` on, up to `limit`, that are nothing but a transpose of words: features in order, every row there,
// no end of a row inside.
int64_t PlainNibbleBlocks(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t limit) {
  if (!rows.full || !layout.source.empty()) return 0;
  return (std::min(limit, weights.cols) - at) / kBlockDepth / 4 * 4;
}

// Positions [at, end) of one group of codes.
void PackNibbleGroup(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t end,
                   uint8_t* out) {
  const int64_t blocks = std::max<int64_t>(PlainNibbleBlocks(layout, weights, rows, at, end), 0);
  TransposeWords(rows, at / 2, blocks, out);
  at += blocks * kBlockDepth;
  out += blocks * layout.format.block_bytes;
  for (; at < end; at += kBlockDepth, out += layout.format.block_bytes) PackNibbleBlock(layout, weights, rows, at, out);
}

void PackGroup(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t end, uint8_t* out) {
  switch (layout.format.element) {
    case ElementType::kInt4:
    case ElementType::kFp4E2m1: return PackNibbleGroup(layout, weights, rows, at, end, out);
    case ElementType::kInt8: return PackElementGroup<uint8_t, true>(layout, weights, rows, at, end, out);
    case ElementType::kFp8E4m3: return PackElementGroup<uint8_t, false>(layout, weights, rows, at, end, out);
    case ElementType::kBf16: return PackElementGroup<uint16_t, true>(layout, weights, rows, at, end, out);
    case ElementType::kF16: return PackElementGroup<uint16_t, false>(layout, weights, rows, at, end, out);
    default: return PackElementGroup<uint32_t, true>(layout, weights, rows, at, end, out);
  }
}

}  // namespace

void PackPanel(const PackedLayout& layout, const LinearWeights& weights, int64_t panel, uint8_t* out) {
  const PanelFormat& format = layout.format;
  const int64_t first_row = panel * kPanelWidth;
  const PanelRows rows(weights, first_row);
  for (int64_t lane = 0; lane < format.header_bytes / 4; ++lane) std::memcpy(out + 4 * lane, &weights.global_scale, 4);
  out += format.header_bytes;
  for (int64_t at = 0; at < format.depth; at += format.group) {
    if (format.scale_bytes > 0) PackScales(weights, first_row, at / format.group, out);
    out += format.scale_bytes;
    if (format.zero_bytes > 0) PackGroupOf<uint8_t>(weights, weights.zero_points, first_row, at / format.group, out);
    out += format.zero_bytes;
    const int64_t end = std::min(at + format.group, format.depth);
    PackGroup(layout, weights, rows, at, end, out);
    out += (end - at) / kBlockDepth * format.block_bytes;
  }
}

}  // namespace moed::cpu
