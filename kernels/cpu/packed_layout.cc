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

  PanelRows(const LinearWeights& weights, int64_t first_row) {
    const int64_t row_bytes = weights.row_bytes();
    for (int lane = 0; lane < kPanelWidth; ++lane) {
      const int64_t n = first_row + lane;
      row[lane] = n < weights.rows ? weights.codes.data() + n * row_bytes : nullptr;
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

void PackPlainBlock(const LinearWeights& weights, int bytes, int64_t first_row, int64_t first, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(kBlockDepth) * kPanelWidth * bytes);
  const int64_t depth = std::min<int64_t>(kBlockDepth, weights.cols - first);
  for (int lane = 0; lane < kPanelWidth && first_row + lane < weights.rows; ++lane) {
    const uint8_t* row = weights.codes.data() + (first_row + lane) * weights.row_bytes() + first * bytes;
    for (int64_t i = 0; i < depth; ++i) std::memcpy(out + (i * kPanelWidth + lane) * bytes, row + i * bytes, bytes);
  }
}

void PackScales(const LinearWeights& weights, int64_t first_row, int64_t group, uint8_t* out) {
  const WeightScheme& scheme = weights.scheme;
  const int bytes = ScaleBytes(scheme.scale);
  const int64_t groups = GroupCount(weights.cols, scheme.group.cols);
  std::memset(out, 0, static_cast<size_t>(kPanelWidth) * bytes);
  for (int lane = 0; lane < kPanelWidth && first_row + lane < weights.rows; ++lane) {
    const int64_t scale_row = scheme.group.rows == 0 ? 0 : (first_row + lane) / scheme.group.rows;
    std::memcpy(out + lane * bytes, weights.scales.data() + (scale_row * groups + group) * bytes, bytes);
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

void PackPanel(const PackedLayout& layout, const LinearWeights& weights, int64_t panel, uint8_t* out) {
  const PanelFormat& format = layout.format;
  const int64_t first_row = panel * kPanelWidth;
  const PanelRows rows(weights, first_row);
  for (int64_t at = 0; at < format.depth; at += kBlockDepth) {
    if (format.scale_bytes > 0 && at % format.group == 0) {
      PackScales(weights, first_row, at / format.group, out);
      out += format.scale_bytes;
    }
    if (format.element == ElementType::kInt4) {
      PackInt4Block(layout, weights, rows, at, out);
    } else {
      PackPlainBlock(weights, ElementBits(format.element) / 8, first_row, at, out);
    }
    out += format.block_bytes;
  }
}

}  // namespace moed::cpu
