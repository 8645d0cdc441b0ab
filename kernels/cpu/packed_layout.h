// The packed weight layout that all CPU kernels share, and its one packer.
//
// A projection [N, K] is cut into panels of 16 output features (the last is padded), panels into groups of input features
// that share a scale, groups into blocks of 8 input features:
//
//   panel  = 16 global scales (float32; only with a global scale) | group 0 | group 1 | ...
//   group  = 16 scales | 16 zero points (one byte each; only with zero points) | block | block | ...
//            unquantized: blocks alone, one group
//   block  = 8 input features x 16 output features
//     int4, fp4  16 little-endian words of 32 bits, one per output feature; bits [4i, 4i+4) hold the code of input feature i
//     int8       2 rows of 16 words, one word per output feature: 4 consecutive input features
//     bf16       4 rows of 16 words likewise: 2 consecutive input features
//     fp8        8 rows of 16 codes, one row per input feature; f16 and f32 elements likewise
//
// Words put the factors of one output feature into one 32-bit lane, as the dot-product instructions want them: a row of int8 or
// bf16 words is an operand of VPDPBUSD or VDPBF16PS, and 16 such rows are a tile of AMX.
//
// Scales keep their own type.
// One output feature lives in one SIMD lane, so every output is a chain of sums in ascending input feature, whatever the number
// of rows: that is what makes a row's result independent of its company.
// Two panels form a pair and are stored one after the other: gate p with up p, or down 2p with down 2p + 1.
// Padding: input features up to a multiple of 8 in each group, where x is 0 and codes are finite, and output features up to 16
// (down: 32), whose scales are 0 (E8M0: 2^-127, with codes of 0): padding contributes exactly 0 to every sum of finite inputs.
#ifndef MOED_KERNELS_CPU_PACKED_LAYOUT_H_
#define MOED_KERNELS_CPU_PACKED_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "kernels/quant.h"

namespace moed {
struct LinearWeights;
}

namespace moed::cpu {

inline constexpr int kPanelWidth = 16;  // output features of a panel: one 512-bit or two 256-bit vectors of floats
inline constexpr int kPairWidth = 2 * kPanelWidth;
inline constexpr int kBlockDepth = 8;   // input features of a block: 8 nibbles fill a 32-bit lane

// Shape of one panel; a plain value that the instruction-set files understand.
struct PanelFormat {
  ElementType element = ElementType::kBf16;
  ScaleType scale = ScaleType::kNone;
  bool divide_by_global = false;  // scale / global, else scale * global; with header_bytes only
  float zero = 0.0f;         // of integers without zero points of their own: 2^(b-1)
  int64_t depth = 0;         // packed input features: a multiple of 8
  int64_t group = 0;         // packed input features of a full group: a multiple of 8; the last group may be shorter
  int64_t header_bytes = 0;  // of the global scales
  int64_t scale_bytes = 0;   // of the 16 scales of a group
  int64_t zero_bytes = 0;    // of the 16 zero points of a group
  int64_t block_bytes = 0;
  int64_t panel_bytes = 0;

  int64_t group_bytes() const { return scale_bytes + zero_bytes + group / kBlockDepth * block_bytes; }
  // Offset of group `index` from the start of a panel.
  int64_t group_offset(int64_t index) const { return header_bytes + index * group_bytes(); }
};

// How a projection [N, K] of a scheme is packed.
struct PackedLayout {
  PanelFormat format;
  // Packed position -> input feature, -1 for padding. Empty when position k holds feature k (K rounded up to 8).
  std::vector<int32_t> source;
};

// The layout for K = `features` inputs. Every element but FP6. With act-order the positions of features are an expert's own
// (ActOrder), and `source` only says how groups are padded.
PackedLayout MakeLayout(const WeightScheme& scheme, int64_t features);

// The packed order of an act-order matrix: the input features of each group side by side, ascending, each group padded as in the
// layout. Empty when some group has more or fewer features than the scheme's size gives it, which no quantizer writes.
std::vector<int32_t> ActOrder(const PackedLayout& layout, const LinearWeights& weights);

// Packs output features [16 * panel, 16 * panel + 16) of `weights` into `out` (format.panel_bytes, every byte written).
// A panel beyond the last feature is all padding.
void PackPanel(const PackedLayout& layout, const LinearWeights& weights, int64_t panel, uint8_t* out);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_PACKED_LAYOUT_H_
