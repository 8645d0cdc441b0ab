#include "kernels/cpu/canonical_layer.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/packed_layer.h"
#include "kernels/prepare_experts.h"

namespace moed::cpu {
namespace {

// Panel `panel` of `weights` as float32 in the packed layout of an unquantized matrix.
void DecodePanel(const LinearWeights& weights, int64_t panel, float* out) {
  const int64_t depth = (weights.cols + kBlockDepth - 1) / kBlockDepth * kBlockDepth;
  std::fill(out, out + depth * kPanelWidth, 0.0f);
  std::vector<float> row(static_cast<size_t>(weights.cols));
  for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
    const int64_t n = panel * kPanelWidth + lane;
    if (n >= weights.rows) return;
    DequantizeRow(weights, n, row.data());
    for (int64_t k = 0; k < weights.cols; ++k) out[k * kPanelWidth + lane] = row[static_cast<size_t>(k)];
  }
}

// Two panels one after the other.
const uint8_t* DecodePair(const PanelFormat& format, const LinearWeights& first, int64_t first_panel, const LinearWeights& second,
                          int64_t second_panel, std::vector<uint8_t>* scratch) {
  scratch->resize(static_cast<size_t>(2 * format.panel_bytes));
  DecodePanel(first, first_panel, reinterpret_cast<float*>(scratch->data()));
  DecodePanel(second, second_panel, reinterpret_cast<float*>(scratch->data() + format.panel_bytes));
  return scratch->data();
}

}  // namespace

LayerShape CanonicalLayer::ShapeOf(const MoeDesc& desc) {
  MoeDesc decoded = desc;
  LinearScheme plain;
  plain.weights.element = ElementType::kF32;
  decoded.scheme = UniformScheme(plain);
  LayerShape shape = PackedLayer::ShapeOf(decoded);
  shape.packed = false;
  return shape;
}

size_t CanonicalLayer::BytesOf(const MoeDesc& desc) {
  const LayerShape shape = ShapeOf(desc);
  const size_t biases = static_cast<size_t>(2 * shape.intermediate_stride() + shape.hidden_stride()) * sizeof(float);
  MoeDesc without = desc;
  without.biases = false;  // kept padded and apart
  return (CanonicalExpertBytes(without) + biases) * static_cast<size_t>(desc.num_experts);
}

absl::StatusOr<std::unique_ptr<LayerStore>> CanonicalLayer::Make(const MoeDesc& desc, const ExpertReader& reader,
                                                                 WorkerPool& pool) {
  std::unique_ptr<CanonicalLayer> layer(new CanonicalLayer(desc));
  layer->experts_.resize(desc.num_experts);
  layer->biases_.resize(desc.num_experts);
  absl::Status status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, ExpertWeights& weights) {
    absl::Status valid = CheckExpert(desc, expert, weights);
    if (!valid.ok()) return valid;
    layer->TakeBiases(weights, &layer->biases_[expert]);
    layer->experts_[expert] = std::move(weights);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return std::unique_ptr<LayerStore>(std::move(layer));
}

void CanonicalLayer::TakeBiases(const ExpertWeights& weights, std::vector<float>* out) const {
  out->assign(static_cast<size_t>(2 * shape_.intermediate_stride() + shape_.hidden_stride()), 0.0f);
  std::copy(weights.gate.bias.begin(), weights.gate.bias.end(), out->begin());
  std::copy(weights.up.bias.begin(), weights.up.bias.end(), out->begin() + shape_.intermediate_stride());
  std::copy(weights.down.bias.begin(), weights.down.bias.end(), out->begin() + 2 * shape_.intermediate_stride());
}

const uint8_t* CanonicalLayer::GateUp(int expert, int64_t pair, std::vector<uint8_t>* scratch) const {
  const ExpertWeights& weights = experts_[expert];
  return DecodePair(shape_.gate_up.format, weights.gate, pair, weights.up, pair, scratch);
}

const uint8_t* CanonicalLayer::Down(int expert, int64_t pair, std::vector<uint8_t>* scratch) const {
  const LinearWeights& weights = experts_[expert].down;
  return DecodePair(shape_.down.format, weights, 2 * pair, weights, 2 * pair + 1, scratch);
}

InputScales CanonicalLayer::input_scales(int expert) const {
  const ExpertWeights& weights = experts_[expert];
  return {weights.gate.input_scale, weights.up.input_scale, weights.down.input_scale};
}

}  // namespace moed::cpu
