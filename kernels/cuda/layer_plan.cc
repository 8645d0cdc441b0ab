#include "kernels/cuda/layer_plan.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <cstdint>

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
bool CanPair(const QuantScheme& scheme, bool equal_orders) {
  const ActivationScheme& input = scheme.gate.input;
  const bool own_values = input.mode == ActivationMode::kStatic || (input.mode == ActivationMode::kDynamic && input.global_scale);
  return scheme.gate == scheme.up && (!scheme.gate.weights.act_order || equal_orders) && !own_values;
}

// Whether codes of `input`, scaled as `plan` says, are multiplied as bytes: as exact integers, where features and rows have one
// scale each, or E4M3 by E4M3.
bool MultipliesBytes(const ActivationScheme& input, const OperandPlan& plan, const PackedShape& shape) {
  if (plan.scaled_values) return false;
  if (shape.codes == Codes::kFp8) return input.element == ElementType::kFp8E4m3;
  if (shape.codes != Codes::kInt8 || input.element != ElementType::kInt8) return false;
  constexpr int64_t kMostInputs = INT32_MAX / (128 * 128);  // whose sum fits into 32 bits whatever the codes are
  return !shape.zero_points && shape.groups == 1 && plan.scale_steps == 0 && shape.depth() <= kMostInputs;
}

OperandPlan OperandOf(const ActivationScheme& input, const PackedShape& shape, bool weighted, bool sorted) {
  OperandPlan plan;
  plan.by_sorted_row = sorted || weighted || shape.own_order;
  if (input.mode == ActivationMode::kNone) return plan;
  plan.quantized = true;
  plan.spans_rows = SpansRows(input);
  plan.stored = input.mode == ActivationMode::kStatic || input.global_scale;
  plan.by_sorted_row = plan.by_sorted_row || plan.stored;
  if (input.mode == ActivationMode::kDynamic && !plan.spans_rows && input.group.cols > 0) {
    plan.group = input.group.cols;
    plan.groups = GroupCount(shape.cols, input.group.cols);
    plan.scaled_values = shape.ordered || plan.group % kStepDepth != 0;
    plan.scale_steps = plan.scaled_values ? 0 : plan.group / kStepDepth;
  }
  plan.bytes = MultipliesBytes(input, plan, shape);
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

LayerPlan PlanOf(const MoeDesc& desc, OrderTraits orders) {
  const QuantScheme& scheme = desc.scheme;
  const bool uneven = orders.uneven;
  LayerPlan plan;
  plan.paired = CanPair(scheme, orders.equal);
  const Activation::Kind kind = desc.activation.kind;
  plan.activates_apart = !plan.paired || (kind != Activation::Kind::kSilu && kind != Activation::Kind::kSwigluOai);
  plan.down = ShapeOf(scheme.down.weights, desc.hidden, desc.intermediate, false, desc.biases, uneven);
  plan.ordered_features = plan.down.ordered && scheme.down.input.mode == ActivationMode::kNone;
  const int64_t features = plan.h_stride();
  plan.gate = ShapeOf(scheme.gate.weights, features, desc.hidden, plan.paired, desc.biases, uneven);
  plan.up = ShapeOf(scheme.up.weights, features, desc.hidden, false, desc.biases, uneven);
  plan.gate_x = OperandOf(scheme.gate.input, plan.gate, desc.weight_on_input, false);
  plan.up_x = OperandOf(scheme.up.input, plan.up, desc.weight_on_input, false);
  plan.down_h = OperandOf(scheme.down.input, plan.down, false, true);
  return plan;
}

std::vector<LayerPlan> PlansOf(const MoeDesc& desc) {
  std::vector<LayerPlan> plans;
  for (const bool uneven : {false, true}) {
    for (const bool equal : {true, false}) {
      const LayerPlan plan = PlanOf(desc, {uneven, equal});
      if (std::find(plans.begin(), plans.end(), plan) == plans.end()) plans.push_back(plan);
    }
  }
  return plans;
}

bool ScalesArePowers(const PackedShape& shape, const WeightScheme& scheme) {
  return (shape.codes == Codes::kFp4 || shape.codes == Codes::kFp8) && shape.scale == ScaleType::kE8m0 && shape.slots <= 2 &&
         scheme.global_scale == GlobalScale::kNone;
}

int32_t ByteSlotSteps(const PackedShape& shape, int32_t scale_steps) {
  if (shape.codes == Codes::kInt8) return 0;
  // An order of each expert's own lets groups end after any slot of a block.
  const int32_t group_steps = shape.own_order ? kSteps / shape.slots : shape.groups > 1 ? shape.group_steps : 0;
  for (const int32_t steps : {8, 2}) {
    if (group_steps % steps == 0 && scale_steps % steps == 0) return steps;
  }
  return 1;
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

int32_t SortBlocks(int64_t slots, int64_t experts) {
  constexpr int64_t kChunk = 1024, kMostInOne = 2 * kChunk, kMostBlocks = 128;
  constexpr int64_t kMostCounts = 16384;  // of all blocks, since every block reads them all
  if (slots <= kMostInOne || experts > kSharedExperts) return 1;
  return static_cast<int32_t>(std::min({(slots + kChunk - 1) / kChunk, kMostBlocks, kMostCounts / std::max<int64_t>(experts, 1)}));
}

int64_t SortScratch(int64_t slots, int64_t experts) { return std::max<int64_t>(2, SortBlocks(slots, experts)) * experts; }

namespace {

// Tiles of `rows` rows that an expert makes on average. Its rows are taken as normally distributed, as random routing makes them.
double ExpectedTiles(double mean, int rows) {
  const double deviation = std::sqrt(mean);
  if (deviation > 2 * rows) return mean / rows + 0.5;
  const int surely = std::max(0, static_cast<int>((mean - 4 * deviation) / rows));
  double tiles = 1 + surely;
  for (int full = surely + 1; full * rows < mean + 4 * deviation; ++full) {
    tiles += std::erfc((full * rows - mean) / deviation / std::sqrt(2.0)) / 2;  // an expert with more than so many full tiles
  }
  return tiles;
}

// The cheapest of `choices` up to `most` for experts of `mean` rows: rows are multiplied in whole tiles, and a tile costs as much
// as so many rows more, for its weights.
int32_t CheapestTile(std::span<const int> choices, int most, double mean, double tile_cost) {
  int32_t best = 0;
  double least = 0;
  for (const int rows : choices) {
    if (rows > most) break;
    const double cost = ExpectedTiles(mean, rows) * (rows + tile_cost);
    if (best == 0 || cost < least) best = rows, least = cost;
  }
  return best;
}

double MeanRows(int64_t slots, int64_t experts) {
  return slots == 0 ? 0.0 : static_cast<double>(slots) / static_cast<double>(std::min(slots, experts));
}

}  // namespace

int32_t TileRowsFor(int64_t slots, int64_t experts, bool terms) {
  constexpr double kTileCost = 24;
  const int most = terms ? kMostTermRows : kTileRowChoices[std::size(kTileRowChoices) - 1];
  return CheapestTile(kTileRowChoices, most, MeanRows(slots, experts), kTileCost);
}

namespace {

bool HopperDecodes(const WeightScheme& weights) {
  const Codes codes = CodesOf(weights.element);
  return codes != Codes::kF16 && codes != Codes::kF32;
}

}  // namespace

bool HasManyGroups(const PackedShape& shape) {
  return shape.groups > 1 && (shape.slots > 1 || shape.group_steps % (2 * kSteps) != 0);
}

WeightKinds KindsOf(const LayerPlan& plan) {
  WeightKinds kinds;
  for (const PackedShape* shape : {&plan.gate, &plan.up, &plan.down}) {
    if (shape == &plan.up && plan.paired) continue;
    (shape->codes == Codes::kBf16 ? kinds.bf16 : kinds.codes) = true;
    kinds.zeros = kinds.zeros || shape->zero_points;
    kinds.many = kinds.many || HasManyGroups(*shape);
    kinds.whole = kinds.whole || (BitsOf(shape->codes) == 8 && shape->groups <= 1);
  }
  return kinds;
}

namespace {

// The share of experts whose rows beyond whole tiles of `rows` are 1 to `rests`; their rows taken as in ExpectedTiles.
double ShareOfRests(double mean, int rows, int rests) {
  const double deviation = std::sqrt(mean);
  if (deviation > rows) return static_cast<double>(rests) / rows;
  const auto below = [&](double count) { return std::erfc((mean - count) / deviation / std::sqrt(2.0)) / 2; };
  double share = 0;
  for (int full = std::max(0, static_cast<int>((mean - 4 * deviation) / rows)); full * rows < mean + 4 * deviation; ++full)
    share += below(full * rows + rests) - below(full * rows);
  return share;
}

bool Exists(const HopperTile& tile, WeightKinds kinds, bool words) {
  return (!kinds.codes || tile.codes > 0) && (!kinds.zeros || tile.zeros) && (!kinds.bf16 || tile.bf16 > 0) &&
         (!words || HopperHasWords(tile.rows));
}

}  // namespace

namespace {

// Of a layer with weights of both kinds, most are codes. Many groups cost what stages of two blocks save. 8-bit codes with one
// scale take longer in tiles of 80 rows than in those of 96, as measured.
int CostOf(const HopperTile& tile, WeightKinds kinds) {
  constexpr int kSlowRows = 80, kSlowCost = 112;
  if (kinds.whole && tile.rows == kSlowRows) return kSlowCost;
  return kinds.many ? std::max(tile.codes, tile.bf16) : kinds.codes ? tile.codes : tile.bf16;
}

}  // namespace

HopperTileRows HopperTileRowsFor(int64_t slots, int64_t experts, WeightKinds kinds, bool words) {
  constexpr int kRestsFrom = 256;  // rows; rests of smaller tiles, and of bf16's, are not worth their launches
  const double mean = MeanRows(slots, experts);
  HopperTileRows best;
  double least = 0;
  const auto offer = [&](double cost, double handicap, HopperTileRows rows) {
    if (best.rows == 0 || cost * (1 + handicap) < least) best = rows, least = cost * (1 + handicap);
  };
  for (const HopperTile& tile : kHopperTiles) {
    if (!Exists(tile, kinds, words)) continue;
    const double tiles = ExpectedTiles(mean, tile.rows);
    offer(tiles * CostOf(tile, kinds), 0, {tile.rows, 0});
    if (words || kinds.bf16 || tile.rows < kRestsFrom || slots <= kFewSlots || mean < tile.rows) continue;
    for (const HopperTile& rest : kHopperTiles) {
      if (rest.rows * 2 > tile.rows || !Exists(rest, kinds, false)) continue;
      const double share = ShareOfRests(mean, tile.rows, rest.rows);
      offer((tiles - share) * CostOf(tile, kinds) + share * CostOf(rest, kinds), kRestsGain, {tile.rows, rest.rows});
    }
  }
  return best;
}

int32_t FewRowsTileRowsFor(int64_t slots, int64_t experts, WeightKinds kinds) {
  constexpr double kTileCost = 64;
  if (slots > (kinds.many && !kinds.bf16 ? kMostFewRowsOfMany : kMostFewRows) * std::min(slots, experts)) return 0;
  const int most = kinds.bf16 ? kMostFewRowsOfBf16Tile : kFewRowsTileRowChoices[std::size(kFewRowsTileRowChoices) - 1];
  return CheapestTile(kFewRowsTileRowChoices, most, MeanRows(slots, experts), kTileCost);
}

int64_t ExpectedTilesOf(int64_t slots, int64_t experts, int32_t rows) {
  if (slots == 0) return 0;
  const double count = static_cast<double>(slots), all = static_cast<double>(experts);
  const double reached = all * (1.0 - std::pow(1.0 - 1.0 / all, count));  // experts that have a row
  const double tiles = ExpectedTiles(count / reached, rows) * reached;
  return std::min(TileCapacity(slots, experts, rows), static_cast<int64_t>(std::lround(tiles)));
}

int32_t FewRowsSlotSteps(const PackedShape& shape) {
  if (shape.groups <= 1 && !shape.zero_points) return 0;
  if (shape.slots > 1) return kSteps / shape.slots;
  return shape.group_steps % (2 * kSteps) == 0 || shape.groups == 1 ? 2 * kSteps : kSteps;
}

int32_t FewRowsRanges(int64_t tiles, int64_t expected, int32_t rows, const PackedShape& shape) {
  // What a thread block costs besides its inputs, in blocks of 64 of them; and the square of how many of them at once make the most
  // of a multiprocessor. Both fit what was measured for ranges of 1 to 13.
  constexpr double kStart = 16, kBusySquared = 17;
  const int64_t most = shape.blocks / kFewestRangeBlocks, places = tiles * shape.row_tiles;
  int32_t best = 1;
  double least = 0;
  for (int64_t ranges = 1; ranges <= most; ++ranges) {
    if (ranges > 1 && (places > kFewRowsCounters || places * ranges * std::max(rows, 16) > kFewRowsBlocks * 16)) break;
    const double blocks = std::max(static_cast<double>(expected * shape.row_tiles * ranges), 1.0) / kProcessors;  // of each
    const double turns = std::max(std::ceil(blocks), kBusySquared / blocks);
    const double cost = turns * (std::ceil(static_cast<double>(shape.blocks) / static_cast<double>(ranges)) + kStart);
    if (ranges == 1 || cost < least) best = static_cast<int32_t>(ranges), least = cost;
  }
  return best;
}

namespace {

// Floats of GemmArgs::partials for any number of tiles up to that of `slots` rows.
int64_t PartialsOf(const PackedShape& shape, int64_t slots, int64_t experts) {
  const int64_t ranges = shape.blocks / kFewestRangeBlocks;
  if (ranges < 2) return 0;
  const int64_t tiles = TileCapacity(slots, experts, kFewRowsTileRowChoices[0]);
  const int64_t blocks = std::min<int64_t>(kFewRowsBlocks, tiles * shape.row_tiles * ranges * 2);  // of 16 rows, from 32
  return blocks * kTileRows * 16;
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

PartWorkspace WorkspaceOf(const MoeDesc& desc, const LayerPlan& plan, bool hopper, int64_t rows, int64_t slots, DType dtype,
                          size_t begin) {
  Cursor cursor(begin);
  const auto take = [&](int64_t count, size_t bytes) {
    return cursor.Take(static_cast<size_t>(std::max<int64_t>(count, 1)) * bytes);
  };
  const auto operand = [&](const OperandPlan& input, const PackedShape& shape, int value_terms, size_t* data, size_t* scales) {
    const bool sorted = input.by_sorted_row || (hopper && input.terms(value_terms) == 1);
    const int64_t count = sorted ? slots : rows;
    *data = take(count * shape.depth() * input.terms(value_terms), sizeof(uint16_t));
    *scales = take(input.quantized ? count * input.groups : 0, sizeof(float));
  };
  PartWorkspace w;
  w.count = take(SortScratch(slots, desc.num_experts), sizeof(int32_t));
  w.source = take(slots, sizeof(int32_t));
  w.slot = take(slots, sizeof(int32_t));
  w.expert = take(slots, sizeof(int32_t));
  w.rank = take(slots, sizeof(int32_t));
  w.position = take(slots, sizeof(int32_t));
  w.tiles = take(TileCapacity(slots, desc.num_experts, kTileRowChoices[0]), kTileBytes);
  w.totals = take(3, sizeof(int32_t));
  w.absmax = take(2, sizeof(uint32_t));
  if (FitsHopper(desc.scheme)) {
    // As much as any smaller call takes, whatever ranges this one has: a lane's memory is that of the largest call.
    int64_t partials = 0;
    for (const PackedShape* shape : {&plan.gate, &plan.up, &plan.down}) {
      partials = std::max(partials, PartialsOf(*shape, slots, desc.num_experts));
    }
    w.finished = take(kFewRowsCounters, sizeof(uint32_t));
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

size_t LargestWorkspace(const MoeDesc& desc, const LayerPlan& plan, bool hopper, int64_t rows, int64_t slots) {
  size_t most = 0;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16})
    most = std::max(most, WorkspaceOf(desc, plan, hopper, rows, slots, dtype, 0).end);
  return most;
}

}  // namespace moed::cuda
