// The one repacked form of expert weights on the GPU, which every kernel here shares: the order of the tensor cores' register
// operand. Plain values and pure functions, for host and device; docs/cuda_layout.md has the picture.
//
// A matrix is cut into row tiles of 128 output features, a tile into two halves of 64, and depth (input features) into blocks
// of 64. A paired matrix holds eight of gate's features, the same eight of up, the next eight of gate and so on, so that one thread
// ends with both sums of a feature. Blocks of a tile follow each other in memory: a tile is one stream. Within a
// block each of 128 threads (4 warps, a warpgroup) owns 16-byte chunks: the operand A of mma.m16n8k16 or of wgmma.m64k16 is what a
// thread reads, without any exchange: warp w holds features 16 w to 16 w + 15 of a half, and per step of 16 inputs the registers
//   r0 = (g, 2t) (g, 2t+1)   r1 = (g+8, 2t) ..   r2 = (g, 2t+8) ..   r3 = (g+8, 2t+8) (g+8, 2t+9)      lane = 4 g + t
// each a pair of neighbouring inputs. Chunks: [chunk][half][thread][16 bytes].
//   16 bits  chunk = step: r0 r1 r2 r3
//    8 bits  chunk = 2 steps of two words: word q of a step has r(2q) in bytes 0 and 2, r(2q+1) in bytes 1 and 3
//    4 bits  chunk = 4 steps of one word: r(p) has its first value in bits 4p.., its second in bits 16 + 4p..
//   32 bits  chunk = half a step: r(2c), r(2c+1) as pairs of floats
// So a masked word is a pair of bf16 mantissas: a 4-bit code is (word >> 4p & 0x000F000F) | 0x43004300 = 128 + code, twice.
// Codes beyond the last feature or input are 0, their scales 0: finite, and inputs beyond the last are 0.
//
// Scales (in their own type), zero points (bytes) and biases (float32) lie in arrays of their own: [tile][group][128] and
// [tile][128], the former in the order of ScalePlace, where the four features of a thread are neighbours. A group is a whole
// number of steps: groups that are not, and act-order, make positions differ from features (PackOrder).
#ifndef MOED_KERNELS_CUDA_PACKED_LAYOUT_H_
#define MOED_KERNELS_CUDA_PACKED_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/quant.h"

namespace moed::cuda {

inline constexpr int kTileRows = 128;    // features of a row tile
inline constexpr int kHalfRows = 64;
inline constexpr int kBlockDepth = 64;   // inputs of a block
inline constexpr int kStepDepth = 16;    // inputs of one product of the tensor cores
inline constexpr int kSteps = kBlockDepth / kStepDepth;
inline constexpr int kTileThreads = 128;
inline constexpr int kChunkBytes = 16;

// What the codes of a packed matrix are. FP6 is kept as FP8: every value of both FP6 formats is one of E4M3.
enum class Codes : uint8_t { kInt4, kFp4, kInt8, kFp8, kBf16, kF16, kF32 };

constexpr int BitsOf(Codes codes) {
  switch (codes) {
    case Codes::kInt4:
    case Codes::kFp4: return 4;
    case Codes::kInt8:
    case Codes::kFp8: return 8;
    case Codes::kBf16:
    case Codes::kF16: return 16;
    case Codes::kF32: return 32;
  }
  return 0;
}
constexpr bool IsInteger(Codes codes) { return codes == Codes::kInt4 || codes == Codes::kInt8; }
// Chunks of one thread and half in a block.
constexpr int ChunksOf(Codes codes) { return BitsOf(codes) / 4; }
constexpr int BlockBytes(Codes codes) { return ChunksOf(codes) * 2 * kTileThreads * kChunkBytes; }

// Where input `in_step` [0, 16) of a step lies among the 16 bytes of a row of 8-bit codes, as operand B of mma.m16n8k32 wants it
// beside weights of 8 bits: the inputs are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. Word t of the step then has the
// inputs 2t, 2t+1, 2t+8, 2t+9. Of the weights of lane 4 g + t, bytes 0 and 2 of the step's two words are the same inputs of row g,
// bytes 1 and 3 those of row g + 8. Two steps are the 32 inputs of one product.
constexpr int BytePosition(int in_step) { return in_step % 8 / 2 * 4 + in_step / 8 * 2 + in_step % 2; }

// The codes that `element` is packed as.
Codes CodesOf(ElementType element);

// Where the scale and the zero point of row `row` [0, 128) of a tile lie among those of its group: by reader (warp, g), each with
// the features g and g + 8 of half 0, then of half 1.
constexpr int ScalePlace(int row) {
  return (row % kHalfRows / 16 * 8 + row % 8) * 4 + row / kHalfRows * 2 + row % 16 / 8;
}

// The row of a paired tile that holds its feature `feature` [0, 64) of gate, or of up.
constexpr int PairedRow(int feature, bool up) { return feature / 8 * 16 + feature % 8 + (up ? 8 : 0); }

// Where the code of row `row` [0, 128) of a tile and input `k` [0, 64) of a block lies.
struct CodePlace {
  int byte;   // of the block
  int shift;  // bits within the byte: 0, or 4
};
constexpr CodePlace PlaceOf(Codes codes, int row, int k) {
  const int half = row / kHalfRows, in_warp = row % kHalfRows % 16, step = k / kStepDepth, in_step = k % kStepDepth;
  const int thread = row % kHalfRows / 16 * 32 + in_warp % 8 * 4 + in_step % 8 / 2;
  const int reg = in_warp / 8 + 2 * (in_step / 8), second = in_step % 2;
  int chunk = 0, byte = 0, shift = 0;
  switch (BitsOf(codes)) {
    case 4:
      byte = step * 4 + second * 2 + reg / 2;
      shift = 4 * (reg % 2);
      break;
    case 8:
      chunk = step / 2;
      byte = step % 2 * 8 + reg / 2 * 4 + reg % 2 + 2 * second;
      break;
    case 16:
      chunk = step;
      byte = reg * 4 + second * 2;
      break;
    default:
      chunk = 2 * step + reg / 2;
      byte = reg % 2 * 8 + second * 4;
  }
  return {((chunk * 2 + half) * kTileThreads + thread) * kChunkBytes + byte, shift};
}

// Sizes of one packed matrix: of gate and up together (paired), or of one projection.
struct PackedShape {
  Codes codes = Codes::kBf16;
  bool paired = false;
  int64_t rows = 0;          // features of each projection in it
  int64_t cols = 0;          // inputs
  int64_t positions = 0;     // inputs and the padding of groups
  int64_t blocks = 0;        // ceil(positions / 64)
  int64_t row_tiles = 0;
  ScaleType scale = ScaleType::kNone;
  bool zero_points = false;
  int64_t groups = 0;        // 0: no scales
  int32_t group_steps = 0;   // of a group, where all have as many; with step_groups unused
  int slots = 1;             // 1, 2 or 4: pieces of a block that lie in one group each
  bool ordered = false;      // positions are not inputs: there is an order
  bool own_order = false;    // each expert has one of its own (act-order), and a table of the groups of its steps
  bool bias = false;

  int64_t depth() const { return blocks * kBlockDepth; }
  // Of one expert.
  size_t code_bytes() const { return static_cast<size_t>(row_tiles * blocks) * BlockBytes(codes); }
  size_t scale_bytes() const { return static_cast<size_t>(row_tiles * groups * kTileRows) * ScaleBytes(scale); }
  size_t zero_bytes() const { return zero_points ? static_cast<size_t>(row_tiles * groups * kTileRows) : 0; }
  size_t bias_bytes() const { return bias ? static_cast<size_t>(row_tiles * kTileRows) * sizeof(float) : 0; }
  size_t order_bytes() const { return own_order ? static_cast<size_t>(depth()) * sizeof(int32_t) : 0; }
  size_t step_group_bytes() const { return own_order ? static_cast<size_t>(blocks * kSteps) * sizeof(int32_t) : 0; }
  bool operator==(const PackedShape&) const = default;
};

// Of a projection [rows, cols], or of gate and up together when `paired` (both with this scheme, and with one order).
// `uneven`: with act-order, room for groups of whatever sizes; else each has the size that the scheme says.
PackedShape ShapeOf(const WeightScheme& scheme, int64_t rows, int64_t cols, bool paired, bool bias, bool uneven);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_PACKED_LAYOUT_H_
