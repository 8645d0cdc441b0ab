// Canonical expert weights: what a checkpoint's tensors become before a backend repacks them.
//
// One orientation, one code order, one meaning of zero points, whatever wrote the file. Produced by //engine:weights,
// consumed by Backend::Prepare and by the reference. Buffers are reused from expert to expert: a reader resizes them and
// never shrinks their capacity. Not thread-safe; each reading thread has its own.
#ifndef MOED_KERNELS_EXPERT_WEIGHTS_H_
#define MOED_KERNELS_EXPERT_WEIGHTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/quant.h"

namespace moed {

// One projection y = W x (+ bias), W is [rows, cols] = [N output features, K input features].
struct LinearWeights {
  WeightScheme scheme;
  int64_t rows = 0;
  int64_t cols = 0;

  // Codes, row-major. A row is a bit stream, least significant bit first: element k occupies bits [k*b, (k+1)*b), and a
  // row starts on a byte boundary: it is ceil(cols * b / 8) bytes long. So 4-bit codes have the even k in the low nibble,
  // and 16- or 32-bit elements are plain little-endian arrays.
  std::vector<uint8_t> codes;

  // Scales [GroupCount(rows, group.rows), GroupCount(cols, group.cols)], row-major, in scheme.scale's own bytes
  // (little-endian). Empty for unquantized elements.
  std::vector<uint8_t> scales;

  // Zero points, same shape as scales, one byte each. Empty unless scheme.zero_points.
  std::vector<uint8_t> zero_points;

  // Group of each input feature [cols]. Empty unless scheme.act_order.
  std::vector<int32_t> group_index;

  float global_scale = 1.0f;  // see GlobalScale
  float input_scale = 1.0f;   // static activation scale of this projection, or the NVFP4 activation global scale

  std::vector<float> bias;  // [rows], or empty

  // Bytes of one row of `codes`.
  int64_t row_bytes() const { return (cols * ElementBits(scheme.element) + 7) / 8; }
};

// One expert: gate and up are [I, H], down is [H, I].
struct ExpertWeights {
  LinearWeights gate;
  LinearWeights up;
  LinearWeights down;
};

// Source of a layer's experts, one at a time: loading streams through it, so that no more than one expert per reading
// thread is in canonical form at once.
class ExpertReader {
 public:
  virtual ~ExpertReader() = default;

  // Reads expert `expert` (0 <= expert < MoeDesc::num_experts of the same layer) into `out`, reusing its buffers. Safe to
  // call from several threads at once with different `out`. Errors name the file and the tensor: DATA_LOSS for a file
  // that is shorter than its header says, INVALID_ARGUMENT for contents that contradict the scheme.
  virtual absl::Status Read(int expert, ExpertWeights* out) const = 0;
};

// Row `row` of the exact weight matrix as float32, out[cols]: (code - zero) * scale for integers, code * scale for floats,
// in float32 with the order of operations that the formats define (global scale folded into the scale first). Exact in
// float32 wherever the format is (see number_formats.h); this function is the definition that every backend is held to.
void DequantizeRow(const LinearWeights& weights, int64_t row, float* out);

}  // namespace moed

#endif  // MOED_KERNELS_EXPERT_WEIGHTS_H_
