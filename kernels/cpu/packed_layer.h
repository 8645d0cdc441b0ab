// A layer's experts in the packed layout: one buffer, one expert after the other.
//
//   expert = gate/up pairs | down pairs | gate bias | up bias | down bias
//
// Biases are float32, padded to the pairs' widths, zeros where the layer has none. Immutable after Fill.
#ifndef MOED_KERNELS_CPU_PACKED_LAYER_H_
#define MOED_KERNELS_CPU_PACKED_LAYER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/aligned_buffer.h"
#include "kernels/cpu/packed_layout.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Sizes and offsets of a packed layer, from its description alone.
struct LayerShape {
  PackedLayout gate_up;     // of gate and of up: K = hidden
  PackedLayout down;        // K = intermediate
  int64_t gate_up_pairs = 0;
  int64_t down_pairs = 0;
  int64_t gate_up_bytes = 0;  // of all pairs of one expert
  int64_t down_bytes = 0;
  int64_t expert_bytes = 0;   // with biases, a multiple of 64

  int64_t hidden_stride() const { return down_pairs * kPairWidth; }           // floats of a padded output row
  int64_t intermediate_stride() const { return gate_up_pairs * kPanelWidth; } // floats of a padded h row
};
LayerShape MakeShape(const MoeDesc& desc);

class PackedLayer {
 public:
  // Reads and packs every expert. RESOURCE_EXHAUSTED without memory; the reader's errors as they are.
  static absl::StatusOr<std::unique_ptr<PackedLayer>> Make(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool);

  const LayerShape& shape() const { return shape_; }
  size_t bytes() const { return buffer_.size(); }

  const uint8_t* gate_up(int expert) const { return buffer_.data() + expert * shape_.expert_bytes; }
  const uint8_t* down(int expert) const { return gate_up(expert) + shape_.gate_up_bytes; }
  const float* gate_bias(int expert) const { return reinterpret_cast<const float*>(down(expert) + shape_.down_bytes); }
  const float* up_bias(int expert) const { return gate_bias(expert) + shape_.intermediate_stride(); }
  const float* down_bias(int expert) const { return up_bias(expert) + shape_.intermediate_stride(); }

 private:
  explicit PackedLayer(LayerShape shape) : shape_(std::move(shape)) {}
  absl::Status PackExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights);

  const LayerShape shape_;
  AlignedBuffer buffer_;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_PACKED_LAYER_H_
