// A layer's experts in the packed layout: one buffer, one expert after the other.
//
//   expert = gate/up pairs | down pairs | gate bias | up bias | down bias | padding to 64 bytes
#ifndef MOED_KERNELS_CPU_PACKED_LAYER_H_
#define MOED_KERNELS_CPU_PACKED_LAYER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/layer_store.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Whether every projection of `scheme` has a packed layout: every element but FP6, no act-order, gate's and up's weights alike.
// When not, `why` (may be null) gets each reason.
bool HasPackedLayout(const QuantScheme& scheme, std::vector<Reason>* why);

class PackedLayer : public LayerStore {
 public:
  // Reads and packs every expert. RESOURCE_EXHAUSTED without memory; the reader's errors as they are.
  static absl::StatusOr<std::unique_ptr<LayerStore>> Make(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool);
  static LayerShape ShapeOf(const MoeDesc& desc);
  static size_t BytesOf(const MoeDesc& desc);

  size_t bytes() const override { return buffer_.size(); }
  bool resident() const override { return true; }
  const uint8_t* GateUp(int expert, int64_t pair, std::vector<uint8_t>*) const override {
    return base(expert) + pair * 2 * shape_.gate_up.format.panel_bytes;
  }
  const uint8_t* Down(int expert, int64_t pair, std::vector<uint8_t>*) const override {
    return base(expert) + gate_up_bytes_ + pair * 2 * shape_.down.format.panel_bytes;
  }
  const float* gate_bias(int expert) const override {
    return reinterpret_cast<const float*>(base(expert) + gate_up_bytes_ + down_bytes_);
  }
  const float* up_bias(int expert) const override { return gate_bias(expert) + shape_.intermediate_stride(); }
  const float* down_bias(int expert) const override { return up_bias(expert) + shape_.intermediate_stride(); }
  InputScales input_scales(int expert) const override { return input_scales_[expert]; }

 private:
  explicit PackedLayer(const MoeDesc& desc);
  const uint8_t* base(int expert) const { return buffer_.data() + expert * expert_bytes_; }
  absl::Status PackExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights);

  int64_t gate_up_bytes_ = 0;  // of all pairs of one expert
  int64_t down_bytes_ = 0;
  int64_t expert_bytes_ = 0;
  std::vector<InputScales> input_scales_;  // of each expert
  AlignedBuffer buffer_;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_PACKED_LAYER_H_
