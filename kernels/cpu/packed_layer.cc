#include "kernels/cpu/packed_layer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/prepare_experts.h"

namespace moed::cpu {
namespace {

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t ExpertBytes(const LayerShape& shape) {
  const int64_t panels = shape.gate_up_pairs * 2 * shape.gate_up.format.panel_bytes + shape.down_pairs * 2 * shape.down.format.panel_bytes;
  const int64_t biases = (2 * shape.intermediate_stride() + shape.hidden_stride()) * static_cast<int64_t>(sizeof(float));
  return CeilDivide(panels + biases, 64) * 64;
}

// out[padded] = bias, then zeros; all zeros when there is none. Returns the end.
float* CopyBias(const std::vector<float>& bias, int64_t padded, float* out) {
  std::fill(std::copy(bias.begin(), bias.end(), out), out + padded, 0.0f);
  return out + padded;
}

// What one projection's weights lack for the packed layout, in words with the projection named.
void CheckProjection(const char* projection, const WeightScheme& weights, std::vector<Reason>* why) {
  const auto no = [&](const std::string& text) { why->push_back({"scheme_unsupported", absl::StrCat(projection, ": ", text)}); };
  if (ElementBits(weights.element) == 6) no(absl::StrCat("weights are ", ElementName(weights.element), ", 6-bit codes have no packed layout"));
}

}  // namespace

bool HasPackedLayout(const QuantScheme& scheme, std::vector<Reason>* why) {
  std::vector<Reason> reasons;
  CheckProjection("gate", scheme.gate.weights, &reasons);
  CheckProjection("up", scheme.up.weights, &reasons);
  CheckProjection("down", scheme.down.weights, &reasons);
  if (!(scheme.gate.weights == scheme.up.weights)) {
    reasons.push_back({"scheme_unsupported", absl::StrCat("gate (", Describe(scheme.gate.weights), ") and up (",
                                                          Describe(scheme.up.weights), ") differ")});
  }
  if (why != nullptr) why->insert(why->end(), reasons.begin(), reasons.end());
  return reasons.empty();
}

LayerShape PackedLayer::ShapeOf(const MoeDesc& desc) {
  LayerShape shape;
  shape.gate_up = MakeLayout(desc.scheme.gate.weights, desc.hidden);
  shape.down = MakeLayout(desc.scheme.down.weights, desc.intermediate);
  shape.gate_up_pairs = CeilDivide(desc.intermediate, kPanelWidth);
  shape.down_pairs = CeilDivide(desc.hidden, kPairWidth);
  return shape;
}

namespace {

// Bytes of the orders of all experts, at most: gate's and up's may turn out to be equal.
size_t OrderBytes(const MoeDesc& desc, const LayerShape& shape) {
  const int64_t gate_up = desc.scheme.gate.weights.act_order ? 2 * shape.gate_up.format.depth : 0;
  const int64_t down = desc.scheme.down.weights.act_order ? shape.down.format.depth : 0;
  return static_cast<size_t>((gate_up + down) * desc.num_experts) * sizeof(int32_t);
}

}  // namespace

size_t PackedLayer::BytesOf(const MoeDesc& desc) {
  const LayerShape shape = ShapeOf(desc);
  return static_cast<size_t>(ExpertBytes(shape)) * static_cast<size_t>(desc.num_experts) + OrderBytes(desc, shape);
}

PackedLayer::PackedLayer(const MoeDesc& desc) : LayerStore(ShapeOf(desc)), input_scales_(desc.num_experts) {
  gate_up_bytes_ = shape_.gate_up_pairs * 2 * shape_.gate_up.format.panel_bytes;
  down_bytes_ = shape_.down_pairs * 2 * shape_.down.format.panel_bytes;
  expert_bytes_ = ExpertBytes(shape_);
  order_bytes_ = OrderBytes(desc, shape_);
  if (order_bytes_ > 0) orders_.resize(desc.num_experts);
}

absl::StatusOr<std::unique_ptr<LayerStore>> PackedLayer::Make(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool) {
  std::unique_ptr<PackedLayer> layer(new PackedLayer(desc));
  const size_t bytes = static_cast<size_t>(layer->expert_bytes_ * desc.num_experts);
  if (!layer->buffer_.Allocate(bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of packed experts"));
  }
  absl::Status status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, const ExpertWeights& weights) {
    return layer->PackExpert(desc, expert, weights);
  });
  if (!status.ok()) return status;
  return std::unique_ptr<LayerStore>(std::move(layer));
}

absl::Status PackedLayer::TakeOrders(int expert, const ExpertWeights& weights, PackedLayout* gate, PackedLayout* up, PackedLayout* down) {
  const std::pair<const LinearWeights*, PackedLayout*> projections[] = {{&weights.gate, gate}, {&weights.up, up}, {&weights.down, down}};
  for (size_t p = 0; p < 3; ++p) {
    const auto& [linear, layout] = projections[p];
    if (!linear->scheme.act_order) continue;
    layout->source = ActOrder(*layout, *linear);
    if (layout->source.empty()) return absl::UnimplementedError(absl::StrCat("expert ", expert, ": act-order groups of uneven size"));
    if (p != 1 || layout->source != gate->source) orders_[expert][p] = layout->source;
  }
  return absl::OkStatus();
}

absl::Status PackedLayer::PackExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights) {
  absl::Status status = CheckExpert(desc, expert, weights);
  if (!status.ok()) return status;
  PackedLayout gate = shape_.gate_up, up = shape_.gate_up, down = shape_.down;
  status = TakeOrders(expert, weights, &gate, &up, &down);
  if (!status.ok()) return status;
  input_scales_[expert] = {weights.gate.input_scale, weights.up.input_scale, weights.down.input_scale};
  uint8_t* const begin = buffer_.data() + expert * expert_bytes_;
  uint8_t* out = begin;
  for (int64_t pair = 0; pair < shape_.gate_up_pairs; ++pair) {
    PackPanel(gate, weights.gate, pair, out);
    PackPanel(up, weights.up, pair, out + shape_.gate_up.format.panel_bytes);
    out += 2 * shape_.gate_up.format.panel_bytes;
  }
  for (int64_t panel = 0; panel < 2 * shape_.down_pairs; ++panel) {
    PackPanel(down, weights.down, panel, out);
    out += shape_.down.format.panel_bytes;
  }
  float* biases = reinterpret_cast<float*>(out);
  biases = CopyBias(weights.gate.bias, shape_.intermediate_stride(), biases);
  biases = CopyBias(weights.up.bias, shape_.intermediate_stride(), biases);
  biases = CopyBias(weights.down.bias, shape_.hidden_stride(), biases);
  std::fill(reinterpret_cast<uint8_t*>(biases), begin + expert_bytes_, uint8_t{0});
  return absl::OkStatus();
}

}  // namespace moed::cpu
