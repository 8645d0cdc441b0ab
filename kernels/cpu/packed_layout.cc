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

constexpr uint32_t kZeroCodes = 0x88888888u;  // eight codes of the value 0

// The codes of 8 packed positions of one output feature; padding gets the zero point.
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
void PackInt4Block(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t first, uint8_t* out) {
  const bool whole = layout.source.empty() && first + kBlockDepth <= weights.cols;
  for (int lane = 0; lane < kPanelWidth; ++lane) {
    uint32_t word = kZeroCodes;
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
      const Words4 low01 = __builtin_shuffle(in[0], in[1], Words4{0, 4, 1, 5});
      const Words4 low23 = __builtin_shuffle(in[2], in[3], Words4{0, 4, 1, 5});
      const Words4 high01 = __builtin_shuffle(in[0], in[1], Words4{2, 6, 3, 7});
      const Words4 high23 = __builtin_shuffle(in[2], in[3], Words4{2, 6, 3, 7});
      const Words4 lines[4] = {__builtin_shuffle(low01, low23, Words4{0, 1, 4, 5}), __builtin_shuffle(low01, low23, Words4{2, 3, 6, 7}),
                               __builtin_shuffle(high01, high23, Words4{0, 1, 4, 5}),
                               __builtin_shuffle(high01, high23, Words4{2, 3, 6, 7})};
      for (int i = 0; i < 4; ++i) std::memcpy(out + ((column + i) * kPanelWidth + lane) * 4, &lines[i], sizeof(Words4));
    }
  }
}

void PackPlainBlock(const LinearWeights& weights, int bytes, int64_t first_row, int64_t first, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(kBlockDepth) * kPanelWidth * bytes);
  const int64_t depth = std::min<int64_t>(kBlockDepth, weights.cols - first);
  for (int lane = 0; lane < kPanelWidth && first_row + lane < weights.rows; ++lane) {
    const uint8_t* row = weights.codes.data() + (first_row + lane) * weights.row_bytes() + first * bytes;
    for (int64_t i = 0; i < depth; ++i) std::memcpy(out + (i * kPanelWidth + lane) * bytes, row + i * bytes, bytes);
  }
}

// Transposes `columns` consecutive 16-bit elements (a multiple of 8) of each row: pairs of elements move as words first, then
// the halves of each word part.
void TransposeHalves(const PanelRows& rows, int64_t offset, int64_t columns, uint8_t* out) {
  for (int64_t column = 0; column < columns; column += kBlockDepth) {
    uint8_t pairs[4 * kPanelWidth * 4];
    TransposeWords(rows, offset + 2 * column, 4, pairs);
    for (int line = 0; line < 4; ++line) {
      uint16_t even[kPanelWidth], odd[kPanelWidth];
      uint32_t words[kPanelWidth];
      std::memcpy(words, pairs + line * sizeof(words), sizeof(words));
      for (int lane = 0; lane < kPanelWidth; ++lane) even[lane] = static_cast<uint16_t>(words[lane]);
      for (int lane = 0; lane < kPanelWidth; ++lane) odd[lane] = static_cast<uint16_t>(words[lane] >> 16);
      uint8_t* to = out + (column + 2 * line) * kPanelWidth * 2;
      std::memcpy(to, even, sizeof(even));
      std::memcpy(to + sizeof(even), odd, sizeof(odd));
    }
  }
}

// Positions [at, end) of unquantized elements: whole blocks as a transpose, the last one element by element.
void PackPlainGroup(const LinearWeights& weights, const PanelRows& rows, int64_t first_row, int64_t at, int64_t end, uint8_t* out) {
  const int bytes = ElementBits(weights.scheme.element) / 8;
  const int64_t whole = rows.full ? (std::min(end, weights.cols) - at) / kBlockDepth * kBlockDepth : 0;
  if (bytes == 4) {
    TransposeWords(rows, at * 4, whole, out);
  } else {
    TransposeHalves(rows, at * 2, whole, out);
  }
  for (int64_t first = at + whole; first < end; first += kBlockDepth) {
    PackPlainBlock(weights, bytes, first_row, first, out + (first - at) * kPanelWidth * bytes);
  }
}

// Scales of one group, elements of type Word.
template <typename Word>
void PackScalesOf(const LinearWeights& weights, int64_t first_row, int64_t group, uint8_t* out) {
  const GroupShape& shape = weights.scheme.group;
  const int64_t groups = GroupCount(weights.cols, shape.cols);
  const int64_t rows = std::clamp<int64_t>(weights.rows - first_row, 0, kPanelWidth);
  Word line[kPanelWidth] = {};
  for (int64_t lane = 0; lane < rows; ++lane) {
    const int64_t row = first_row + lane, scale_row = shape.rows == 1 ? row : shape.rows == 0 ? 0 : row / shape.rows;
    std::memcpy(&line[lane], weights.scales.data() + (scale_row * groups + group) * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
  }
  std::memcpy(out, line, sizeof(line));
}

void PackScales(const LinearWeights& weights, int64_t first_row, int64_t group, uint8_t* out) {
  switch (ScaleBytes(weights.scheme.scale)) {
    case 1: return PackScalesOf<uint8_t>(weights, first_row, group, out);
    case 2: return PackScalesOf<uint16_t>(weights, first_row, group, out);
    case 4: return PackScalesOf<uint32_t>(weights, first_row, group, out);
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
    format.scale_bytes = static_cast<int64_t>(kPanelWidth) * ScaleBytes(scheme.scale);
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
  format.panel_bytes = groups * format.scale_bytes + format.depth / kBlockDepth * format.block_bytes;
  return layout;
}

namespace {

// Blocks from position `at` on, up to `limit`, that are nothing but a transpose of words: features in order, every row there,
// no end of a row inside.
int64_t PlainInt4Blocks(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t limit) {
  if (!rows.full || !layout.source.empty()) return 0;
  return (std::min(limit, weights.cols) - at) / kBlockDepth / 4 * 4;
}

// Positions [at, end) of one group of codes.
void PackInt4Group(const PackedLayout& layout, const LinearWeights& weights, const PanelRows& rows, int64_t at, int64_t end,
                   uint8_t* out) {
  const int64_t blocks = std::max<int64_t>(PlainInt4Blocks(layout, weights, rows, at, end), 0);
  TransposeWords(rows, at / 2, blocks, out);
  at += blocks * kBlockDepth;
  out += blocks * layout.format.block_bytes;
  for (; at < end; at += kBlockDepth, out += layout.format.block_bytes) PackInt4Block(layout, weights, rows, at, out);
}

}  // namespace

void PackPanel(const PackedLayout& layout, const LinearWeights& weights, int64_t panel, uint8_t* out) {
  const PanelFormat& format = layout.format;
  const int64_t first_row = panel * kPanelWidth;
  const PanelRows rows(weights, first_row);
  for (int64_t at = 0; at < format.depth; at += format.group) {
    if (format.scale_bytes > 0) PackScales(weights, first_row, at / format.group, out);
    out += format.scale_bytes;
    const int64_t end = std::min(at + format.group, format.depth);
    if (format.element == ElementType::kInt4) {
      PackInt4Group(layout, weights, rows, at, end, out);
    } else {
      PackPlainGroup(weights, rows, first_row, at, end, out);
    }
    out += (end - at) / kBlockDepth * format.block_bytes;
  }
}

}  // namespace moed::cpu
