#include "kernels/cpu/packed_layer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/prepare_experts.h"

namespace moed::cpu {
namespace {

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// out[padded] = bias, then zeros; all zeros when there is none.
void CopyBias(const std::vector<float>& bias, int64_t padded, float* out) {
  std::fill(out, out + padded, 0.0f);
  std::copy(bias.begin(), bias.end(), out);
}

// What a reader hands over must be what the description promised: the packer indexes by it.
absl::Status CheckShape(const char* projection, int expert, const LinearWeights& weights, const WeightScheme& scheme, int64_t rows,
                        int64_t cols, bool bias) {
  if (weights.rows == rows && weights.cols == cols && weights.scheme == scheme &&
      static_cast<int64_t>(weights.bias.size()) == (bias ? rows : 0)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("expert ", expert, " ", projection, ": read [", weights.rows, ", ", weights.cols, "] ",
                                          Describe(weights.scheme), ", want [", rows, ", ", cols, "] ", Describe(scheme)));
}

}  // namespace

LayerShape MakeShape(const MoeDesc& desc) {
  LayerShape shape;
  shape.gate_up = MakeLayout(desc.scheme.gate.weights, desc.hidden);
  shape.down = MakeLayout(desc.scheme.down.weights, desc.intermediate);
  shape.gate_up_pairs = CeilDivide(desc.intermediate, kPanelWidth);
  shape.down_pairs = CeilDivide(desc.hidden, kPairWidth);
  shape.gate_up_bytes = shape.gate_up_pairs * 2 * shape.gate_up.format.panel_bytes;
  shape.down_bytes = shape.down_pairs * 2 * shape.down.format.panel_bytes;
  const int64_t bias_bytes = (2 * shape.intermediate_stride() + shape.hidden_stride()) * static_cast<int64_t>(sizeof(float));
  shape.expert_bytes = CeilDivide(shape.gate_up_bytes + shape.down_bytes + bias_bytes, 64) * 64;
  return shape;
}

absl::StatusOr<std::unique_ptr<PackedLayer>> PackedLayer::Make(const MoeDesc& desc, const ExpertReader& reader,
                                                               WorkerPool& pool) {
  std::unique_ptr<PackedLayer> layer(new PackedLayer(MakeShape(desc)));
  const size_t bytes = static_cast<size_t>(layer->shape_.expert_bytes) * desc.num_experts;
  if (!layer->buffer_.Allocate(bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of packed experts"));
  }
  absl::Status status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, const ExpertWeights& weights) {
    return layer->PackExpert(desc, expert, weights);
  });
  if (!status.ok()) return status;
  return layer;
}

absl::Status PackedLayer::PackExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights) {
  const QuantScheme& scheme = desc.scheme;
  for (const absl::Status& status :
       {CheckShape("gate", expert, weights.gate, scheme.gate.weights, desc.intermediate, desc.hidden, desc.biases),
        CheckShape("up", expert, weights.up, scheme.up.weights, desc.intermediate, desc.hidden, desc.biases),
        CheckShape("down", expert, weights.down, scheme.down.weights, desc.hidden, desc.intermediate, desc.biases)}) {
    if (!status.ok()) return status;
  }
  uint8_t* base = buffer_.data() + expert * shape_.expert_bytes;
  uint8_t* out = base;
  for (int64_t pair = 0; pair < shape_.gate_up_pairs; ++pair) {
    PackPanel(shape_.gate_up, weights.gate, pair, out);
    PackPanel(shape_.gate_up, weights.up, pair, out + shape_.gate_up.format.panel_bytes);
    out += 2 * shape_.gate_up.format.panel_bytes;
  }
  for (int64_t panel = 0; panel < 2 * shape_.down_pairs; ++panel) {
    PackPanel(shape_.down, weights.down, panel, out);
    out += shape_.down.format.panel_bytes;
  }
  float* biases = reinterpret_cast<float*>(out);
  CopyBias(weights.gate.bias, shape_.intermediate_stride(), biases);
  CopyBias(weights.up.bias, shape_.intermediate_stride(), biases + shape_.intermediate_stride());
  CopyBias(weights.down.bias, shape_.hidden_stride(), biases + 2 * shape_.intermediate_stride());
  const uint8_t* end = reinterpret_cast<uint8_t*>(biases + 2 * shape_.intermediate_stride() + shape_.hidden_stride());
  std::memset(base + (end - base), 0, static_cast<size_t>(shape_.expert_bytes - (end - base)));
  return absl::OkStatus();
}

}  // namespace moed::cpu
