#include "kernels/cuda/layer_plan.h"

#include <algorithm>

#include "kernels/activation_quant.h"
#include "kernels/cuda/call_sizes.h"

namespace moed::cuda {
namespace {

// Hands out pieces of memory one after the other.
class Cursor {
 public:
  explicit Cursor(size_t at) : at_(at) {}
  size_t Take(size_t bytes) {
    const size_t begin = at_;
    at_ += (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
    return begin;
  }
  size_t at() const { return at_; }

 private:
  size_t at_;
};

// Gate and up can be one matrix with one operand when they are described alike and no expert has a value of its own for one of
// them.
bool CanPair(const QuantScheme& scheme) {
  const ActivationScheme& input = scheme.gate.input;
  const bool own_values = input.mode == ActivationMode::kStatic || (input.mode == ActivationMode::kDynamic && input.global_scale);
  return scheme.gate == scheme.up && !scheme.gate.weights.act_order && !own_values;
}

OperandPlan OperandOf(const ActivationScheme& input, const PackedShape& shape, bool weighted, bool sorted) {
  OperandPlan plan;
  plan.by_sorted_row = sorted || weighted || shape.own_order;
  if (input.mode == ActivationMode::kNone) return plan;
  plan.quantized = true;
  plan.spans_rows = SpansRows(input);
  plan.stored = input.mode == ActivationMode::kStatic || input.global_scale;
  plan.by_sorted_row = plan.by_sorted_row || plan.stored;
  const bool grouped = input.mode == ActivationMode::kDynamic && !plan.spans_rows && input.group.cols > 0;
  if (!grouped) return plan;
  plan.group = input.group.cols;
  plan.groups = GroupCount(shape.cols, input.group.cols);
  plan.scaled_values = shape.ordered || plan.group % kStepDepth != 0;
  plan.scale_steps = plan.scaled_values ? 0 : plan.group / kStepDepth;
  return plan;
}

MatrixOffsets TakeMatrix(const PackedShape& shape, size_t experts, Cursor* cursor) {
  MatrixOffsets offsets;
  offsets.codes = cursor->Take(shape.code_bytes() * experts);
  offsets.scales = cursor->Take(shape.scale_bytes() * experts);
  offsets.zeros = cursor->Take(shape.zero_bytes() * experts);
  offsets.bias = cursor->Take(shape.bias_bytes() * experts);
  offsets.order = cursor->Take(shape.order_bytes() * experts);
  offsets.step_groups = cursor->Take(shape.step_group_bytes() * experts);
  offsets.globals = cursor->Take(2 * sizeof(float) * experts);
  offsets.common_order = cursor->Take(shape.ordered && !shape.own_order ? static_cast<size_t>(shape.depth()) * sizeof(int32_t) : 0);
  return offsets;
}

}  // namespace

LayerPlan PlanOf(const MoeDesc& desc, bool uneven) {
  const QuantScheme& scheme = desc.scheme;
  LayerPlan plan;
  plan.paired = CanPair(scheme);
  const Activation::Kind kind = desc.activation.kind;
  plan.activates_apart = !plan.paired || (kind != Activation::Kind::kSilu && kind != Activation::Kind::kSwigluOai);
  plan.gate = ShapeOf(scheme.gate.weights, desc.intermediate, desc.hidden, plan.paired, desc.biases, uneven);
  plan.up = ShapeOf(scheme.up.weights, desc.intermediate, desc.hidden, false, desc.biases, uneven);
  plan.down = ShapeOf(scheme.down.weights, desc.hidden, desc.intermediate, false, desc.biases, uneven);
  plan.gate_x = OperandOf(scheme.gate.input, plan.gate, desc.weight_on_input, false);
  plan.up_x = OperandOf(scheme.up.input, plan.up, desc.weight_on_input, false);
  plan.down_h = OperandOf(scheme.down.input, plan.down, false, true);
  return plan;
}

LayerOffsets OffsetsOf(const LayerPlan& plan, int num_experts) {
  const size_t experts = static_cast<size_t>(num_experts);
  Cursor cursor(0);
  LayerOffsets offsets;
  offsets.gate = TakeMatrix(plan.gate, experts, &cursor);
  if (!plan.paired) offsets.up = TakeMatrix(plan.up, experts, &cursor);
  offsets.down = TakeMatrix(plan.down, experts, &cursor);
  offsets.stored = cursor.Take(3 * sizeof(float) * experts);
  offsets.bytes = cursor.at();
  return offsets;
}

int64_t TileCapacity(int64_t slots, int64_t experts, int64_t tile_rows) {
  return (slots + std::min(slots, experts) * (tile_rows - 1)) / tile_rows;
}

int32_t TileRowsFor(int64_t slots, int64_t experts, bool terms) {
  const int most = terms ? kMostTermRows : kTileRowChoices[std::size(kTileRowChoices) - 1];
  // Half as many again as an expert has on average: most experts then fit one tile.
  for (const int rows : kTileRowChoices) {
    if (rows == most || 2 * rows * experts >= 3 * slots) return rows;
  }
  return most;
}

namespace {

bool HopperDecodes(const WeightScheme& weights) {
  const Codes codes = CodesOf(weights.element);
  return codes != Codes::kF16 && codes != Codes::kF32 && !weights.zero_points;
}

}  // namespace

int32_t HopperTileRowsFor(int64_t slots, int64_t experts, bool decoded) {
  const int64_t fewest = decoded ? 64 : 12;  // rows of an expert on average, as measured on an H200 (docs/performance.md)
  if (slots < fewest * std::min(slots, experts)) return 0;
  for (const int rows : kHopperTileRowChoices) {
    if (2 * rows * experts >= 3 * slots) return rows;
  }
  return kHopperTileRowChoices[std::size(kHopperTileRowChoices) - 1];
}

int32_t FewRowsTileRowsFor(int64_t slots, int64_t experts) {
  const int64_t reached = std::min(slots, experts);
  constexpr int64_t kMostRows = 12;   // of an expert on average; above, several tiles decode its weights
  constexpr int64_t kMostOfEight = 5; // the same for tiles of 8
  if (slots > kMostRows * reached) return 0;
  return kFewRowsTileRowChoices[slots > kMostOfEight * reached ? 1 : 0];
}

int32_t FewRowsRanges(int64_t tiles, const PackedShape& shape) {
  const int64_t blocks = std::max<int64_t>(tiles * shape.row_tiles, 1);
  const int64_t wanted = (kFewRowsBlocks + blocks - 1) / blocks;
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(shape.blocks / kFewestRangeBlocks, 1)));
}

namespace {

// Floats of GemmArgs::partials for any number of tiles up to that of `slots` rows.
int64_t PartialsOf(const PackedShape& shape, int64_t slots, int64_t experts) {
  const int64_t ranges = shape.blocks / kFewestRangeBlocks;
  if (ranges < 2) return 0;
  const int64_t tiles = TileCapacity(slots, experts, kFewRowsTileRowChoices[0]);
  const int64_t blocks = std::min<int64_t>(2 * kFewRowsBlocks, tiles * shape.row_tiles * ranges);
  return blocks * kTileRows * kFewRowsTileRowChoices[std::size(kFewRowsTileRowChoices) - 1];
}

}  // namespace

bool FitsHopper(const QuantScheme& scheme) {
  for (const LinearScheme* linear : {&scheme.gate, &scheme.up, &scheme.down}) {
    if (linear->input.mode != ActivationMode::kNone || !HopperDecodes(linear->weights)) return false;
  }
  return true;
}

bool HopperRounds(const QuantScheme& scheme) {
  for (const LinearScheme* linear : {&scheme.gate, &scheme.up, &scheme.down}) {
    if (!IsUnquantized(linear->weights.element) && linear->weights.group.cols != 0) return true;
  }
  return false;
}

bool FitsHopperW8A8(const QuantScheme& scheme) {
  for (const LinearScheme* linear : {&scheme.gate, &scheme.up, &scheme.down}) {
    const ActivationScheme& input = linear->input;
    const bool by_row = input.mode == ActivationMode::kStatic || (input.mode == ActivationMode::kDynamic && input.group.cols == 0);
    const bool eight_bits = input.element == ElementType::kInt8 || input.element == ElementType::kFp8E4m3;
    const bool one_scale = !IsUnquantized(linear->weights.element) && linear->weights.group.cols == 0 && !linear->weights.act_order;
    if (!by_row || !eight_bits || !one_scale || !HopperDecodes(linear->weights)) return false;
  }
  return true;
}

PartWorkspace WorkspaceOf(const MoeDesc& desc, const LayerPlan& plan, int64_t rows, int64_t slots, DType dtype, size_t begin) {
  Cursor cursor(begin);
  const auto take = [&](int64_t count, size_t bytes) {
    return cursor.Take(static_cast<size_t>(std::max<int64_t>(count, 1)) * bytes);
  };
  const auto operand = [&](const OperandPlan& input, const PackedShape& shape, int value_terms, size_t* data, size_t* scales) {
    const int64_t count = input.by_sorted_row ? slots : rows;
    *data = take(count * shape.depth() * input.terms(value_terms), sizeof(uint16_t));
    *scales = take(input.quantized ? count * input.groups : 0, sizeof(float));
  };
  PartWorkspace w;
  w.count = take(2 * desc.num_experts + 1, sizeof(int32_t));
  w.source = take(slots, sizeof(int32_t));
  w.slot = take(slots, sizeof(int32_t));
  w.expert = take(slots, sizeof(int32_t));
  w.position = take(slots, sizeof(int32_t));
  w.tiles = take(TileCapacity(slots, desc.num_experts, kTileRowChoices[0]), kTileBytes);
  w.totals = take(2, sizeof(int32_t));
  w.absmax = take(2, sizeof(uint32_t));
  if (FitsHopper(desc.scheme) || FitsHopperW8A8(desc.scheme)) {
    // As much as any smaller call takes, whatever ranges this one has: a lane's memory is that of the largest call.
    int64_t partials = 0;
    for (const PackedShape* shape : {&plan.gate, &plan.up, &plan.down}) {
      partials = std::max(partials, PartialsOf(*shape, slots, desc.num_experts));
    }
    w.finished = take(kFewRowsBlocks, sizeof(uint32_t));
    w.partials = take(partials, sizeof(float));
  }
  operand(plan.gate_x, plan.gate, TermsOf(dtype), &w.gate_x, &w.gate_scales);
  if (!plan.paired) {
    operand(plan.up_x, plan.up, TermsOf(dtype), &w.up_x, &w.up_scales);
    w.up_out = take(slots * plan.gate_stride(), sizeof(float));
  }
  if (plan.activates_apart) w.gate_out = take(slots * plan.gate_stride(), sizeof(float));
  const bool staged_h = !plan.direct_h() || TermsOfH(dtype) > 1;
  if (staged_h) w.h = take(slots * plan.h_stride(), sizeof(float));
  operand(plan.down_h, plan.down, TermsOfH(dtype), &w.h_operand, &w.h_scales);
  w.y = take(slots * desc.hidden, sizeof(float));
  w.end = cursor.at();
  return w;
}

}  // namespace moed::cuda
