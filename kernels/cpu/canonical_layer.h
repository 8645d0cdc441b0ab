// A layer's experts in canonical form, decoded to float32 panels pair by pair when they are multiplied: any weight scheme, no
// speed. Biases and static activation scales come from the same canonical weights.
#ifndef MOED_KERNELS_CPU_CANONICAL_LAYER_H_
#define MOED_KERNELS_CPU_CANONICAL_LAYER_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/layer_store.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

class CanonicalLayer : public LayerStore {
 public:
  // Reads every expert. The reader's errors as they are.
  static absl::StatusOr<std::unique_ptr<LayerStore>> Make(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool);
  static LayerShape ShapeOf(const MoeDesc& desc);
  static size_t BytesOf(const MoeDesc& desc);

  size_t bytes() const override { return bytes_; }
  bool resident() const override { return false; }
  const uint8_t* GateUp(int expert, int64_t pair, std::vector<uint8_t>* scratch) const override;
  const uint8_t* Down(int expert, int64_t pair, std::vector<uint8_t>* scratch) const override;
  const float* gate_bias(int expert) const override { return biases_[expert].data(); }
  const float* up_bias(int expert) const override { return gate_bias(expert) + shape_.intermediate_stride(); }
  const float* down_bias(int expert) const override { return up_bias(expert) + shape_.intermediate_stride(); }
  InputScales input_scales(int expert) const override;

 private:
  explicit CanonicalLayer(const MoeDesc& desc) : LayerStore(ShapeOf(desc)), bytes_(BytesOf(desc)) {}
  void TakeBiases(const ExpertWeights& weights, std::vector<float>* out) const;

  const size_t bytes_;
  std::vector<ExpertWeights> experts_;
  std::vector<std::vector<float>> biases_;  // gate | up | down of each expert, padded
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CANONICAL_LAYER_H_
