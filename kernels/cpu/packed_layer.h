// A layer's experts in the packed layout: one buffer, one expert after the other.
//
//   expert = gate/up pairs | down pairs | gate bias | up bias | down bias | padding to 64 bytes
#ifndef MOED_KERNELS_CPU_PACKED_LAYER_H_
#define MOED_KERNELS_CPU_PACKED_LAYER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/layer_store.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Whether every projection of `scheme` has a packed layout: every element but FP6, gate's and up's weights alike.
// When not, `why` (may be null) gets each reason.
bool HasPackedLayout(const QuantScheme& scheme, std::vector<Reason>* why);

class PackedLayer : public LayerStore {
 public:
  // Reads and packs every expert. RESOURCE_EXHAUSTED without memory; UNIMPLEMENTED when an act-order expert's groups are of uneven
  // size; the reader's errors as they are.
  static absl::StatusOr<std::unique_ptr<LayerStore>> Make(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool);
  static LayerShape ShapeOf(const MoeDesc& desc);
  static size_t BytesOf(const MoeDesc& desc);

  size_t bytes() const override { return buffer_.size() + order_bytes_; }
  std::span<const std::byte> memory() const override {
    return std::as_bytes(std::span<const uint8_t>(buffer_.data(), buffer_.size()));
  }
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
  const int32_t* gate_order(int expert) const override { return OrderOf(expert, 0, shape_.gate_up); }
  const int32_t* up_order(int expert) const override { return OrderOf(expert, 1, shape_.gate_up); }
  const int32_t* down_order(int expert) const override { return OrderOf(expert, 2, shape_.down); }

 private:
  explicit PackedLayer(const MoeDesc& desc);
  const uint8_t* base(int expert) const { return buffer_.data() + expert * expert_bytes_; }
  // Act-order: gate, up and down of an expert have orders of their own; up's is gate's very memory where they are equal.
  using Orders = std::array<std::vector<int32_t>, 3>;
  const int32_t* OrderOf(int expert, int projection, const PackedLayout& layout) const {
    if (orders_.empty()) return LayerStore::OrderOf(layout);
    const Orders& own = orders_[expert];
    if (projection == 1 && own[1].empty()) projection = 0;
    return own[projection].empty() ? LayerStore::OrderOf(layout) : own[projection].data();
  }
  // The layouts of one expert: the layer's, or with its own orders, which are kept.
  absl::Status TakeOrders(int expert, const ExpertWeights& weights, PackedLayout* gate, PackedLayout* up, PackedLayout* down);
  absl::Status PackExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights);

  int64_t gate_up_bytes_ = 0;  // of all pairs of one expert
  int64_t down_bytes_ = 0;
  int64_t expert_bytes_ = 0;
  size_t order_bytes_ = 0;
  std::vector<InputScales> input_scales_;  // of each expert
  std::vector<Orders> orders_;             // of each expert; empty without act-order
  AlignedBuffer buffer_;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_PACKED_LAYER_H_
