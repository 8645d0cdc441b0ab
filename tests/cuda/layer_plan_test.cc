// A layer's plan on the GPU, from its description: operands, and where arrays lie. Tiles are judged in tile_plan_test.cc.
#include "kernels/cuda/layer_plan.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <utility>

#include "kernels/cuda/call_sizes.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"

namespace moed::cuda {
namespace {

using testing::Input;
using testing::Int8;
using testing::MakeDesc;
using testing::Weights;

// Arrays as [begin, end) bytes of one memory.
struct Array {
  const char* name;
  size_t begin, bytes;
};

void CheckApart(std::vector<Array> arrays, size_t begin, size_t end) {
  std::sort(arrays.begin(), arrays.end(), [](const Array& a, const Array& b) { return a.begin < b.begin; });
  size_t free = begin;
  for (const Array& array : arrays) {
    if (array.bytes == 0) continue;
    INFO(array.name << " at " << array.begin << ", " << array.bytes << " bytes");
    CHECK(array.begin >= free);
    CHECK(array.begin % kArrayAlignment == 0);
    free = array.begin + array.bytes;
    CHECK(free <= end);
  }
}

LinearScheme Linear(const WeightScheme& weights, const ActivationScheme& input = {}) {
  LinearScheme linear;
  linear.weights = weights;
  linear.input = input;
  return linear;
}

WeightScheme Int4(bool act_order = false) {
  WeightScheme scheme = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  scheme.act_order = act_order;
  return scheme;
}

ActivationScheme Dynamic(ElementType element, ScaleType scale, int32_t group) {
  return Input(ActivationMode::kDynamic, element, scale, {1, group});
}

ActivationScheme NvFp4() {
  ActivationScheme input = Dynamic(ElementType::kFp4E2m1, ScaleType::kE4m3, 16);
  input.global_scale = true;
  return input;
}

LayerPlan PlanFor(const LinearScheme& linear) { return PlanOf(MakeDesc(4, 2, 256, 192, UniformScheme(linear))); }

// Descriptions of every kind of weights and inputs, paired and not.
std::vector<MoeDesc> Descs() {
  std::vector<QuantScheme> schemes;
  for (const WeightScheme& weights : testing::WeightSchemes()) schemes.push_back(UniformScheme(Linear(weights)));
  for (const ActivationScheme& input : testing::InputSchemes()) {
    for (bool act_order : {false, true}) schemes.push_back(UniformScheme(Linear(Int4(act_order), input)));
    schemes.push_back(UniformScheme(Linear(Weights(ElementType::kInt8, ScaleType::kF32, {1, 24}), input)));
  }
  std::vector<MoeDesc> descs;
  for (const QuantScheme& scheme : schemes) {
    descs.push_back(MakeDesc(7, 2, 192, 160, scheme));
    descs.push_back(MakeDesc(1, 1, 96, 224, scheme));
    descs.back().biases = descs.back().weight_on_input = true;
    descs.back().activation.kind = Activation::Kind::kGelu;
  }
  return descs;
}

size_t PartialBytes(const LayerPlan& plan, const MoeDesc& desc, int64_t slots) {
  size_t most = 0;
  for (int64_t of = 1; of <= std::min<int64_t>(slots, kMostFewRowsOfMany * desc.num_experts); ++of) {
    const int32_t rows = FewRowsTileRowsFor(of, desc.num_experts, KindsOf(plan));
    if (rows == 0) continue;
    const int64_t tiles = TileCapacity(of, desc.num_experts, rows);
    for (const PackedShape* shape : {&plan.gate, &plan.up, &plan.down}) {
      if (shape == &plan.up && plan.paired) continue;
      const int64_t ranges = FewRowsRanges(tiles, ExpectedTilesOf(of, desc.num_experts, rows), rows, *shape);
      if (ranges > 1) most = std::max(most, static_cast<size_t>(tiles * shape->row_tiles * ranges * kTileRows * rows) * 4);
    }
  }
  return most;
}

// Every array of a part's call with the bytes that its kernels read and write.
std::vector<Array> ArraysOf(const PartWorkspace& w, const MoeDesc& desc, const LayerPlan& plan, int64_t rows, int64_t slots,
                            DType dtype) {
  const size_t s = static_cast<size_t>(slots);
  const auto operand = [&](const OperandPlan& input, const PackedShape& shape, int terms) {
    return static_cast<size_t>((input.by_sorted_row ? slots : rows) * shape.depth() * input.terms(terms)) * sizeof(uint16_t);
  };
  const auto scales = [&](const OperandPlan& input) {
    return input.quantized ? static_cast<size_t>((input.by_sorted_row ? slots : rows) * input.groups) * sizeof(float) : 0;
  };
  int64_t tiles = 0;
  for (bool terms : {false, true}) {
    tiles = std::max(tiles, TileCapacity(slots, desc.num_experts, TileRowsFor(slots, desc.num_experts, terms)));
  }
  for (const int32_t of_kind : {HopperTileRowsFor(slots, desc.num_experts, KindsOf(plan), false).rows,
                                HopperTileRowsFor(slots, desc.num_experts, KindsOf(plan), true).rows,
                                FewRowsTileRowsFor(slots, desc.num_experts, KindsOf(plan))}) {
    if (of_kind > 0) tiles = std::max(tiles, TileCapacity(slots, desc.num_experts, of_kind));
  }
  const size_t experts = static_cast<size_t>(desc.num_experts), blocks = static_cast<size_t>(SortBlocks(slots, desc.num_experts));
  std::vector<Array> arrays = {{"count", w.count, experts * std::max<size_t>(blocks, 2) * 4},
                               {"source", w.source, s * 4},
                               {"slot", w.slot, s * 4},
                               {"expert", w.expert, s * 4},
                               {"rank", w.rank, s * 4},
                               {"position", w.position, s * 4},
                               {"tiles", w.tiles, static_cast<size_t>(tiles) * kTileBytes},
                               {"totals", w.totals, 12},
                               {"absmax", w.absmax, 8},
                               {"gate_x", w.gate_x, operand(plan.gate_x, plan.gate, TermsOf(dtype))},
                               {"gate_scales", w.gate_scales, scales(plan.gate_x)},
                               {"h_operand", w.h_operand, operand(plan.down_h, plan.down, TermsOfH(dtype))},
                               {"h_scales", w.h_scales, scales(plan.down_h)},
                               {"y", w.y, s * static_cast<size_t>(desc.hidden) * 4}};
  if (FitsHopper(desc.scheme)) {
    arrays.push_back({"finished", w.finished, kFewRowsCounters * 4});
    arrays.push_back({"partials", w.partials, PartialBytes(plan, desc, slots)});
  }
  if (!plan.paired) {
    arrays.push_back({"up_x", w.up_x, operand(plan.up_x, plan.up, TermsOf(dtype))});
    arrays.push_back({"up_scales", w.up_scales, scales(plan.up_x)});
    arrays.push_back({"up_out", w.up_out, s * static_cast<size_t>(plan.gate_stride()) * 4});
  }
  if (plan.activates_apart) arrays.push_back({"gate_out", w.gate_out, s * static_cast<size_t>(plan.gate_stride()) * 4});
  if (!plan.direct_h() || TermsOfH(dtype) > 1) arrays.push_back({"h", w.h, s * static_cast<size_t>(plan.h_stride()) * 4});
  return arrays;
}

}  // namespace

TEST_CASE("layer plan: arrays of a call lie apart, aligned, behind where they may begin, and hold what kernels write") {
  for (const MoeDesc& desc : Descs()) {
    for (const LayerPlan& plan : PlansOf(desc)) {
      for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
        for (const auto& [rows, slots] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {33, 66}, {512, 1024}, {300, 300}}) {
          for (size_t begin : {size_t{0}, size_t{768}}) {
            const PartWorkspace w = WorkspaceOf(desc, plan, false, rows, slots, dtype, begin);
            INFO(Describe(desc.scheme) << ", " << rows << " rows, " << slots << " slots, " << DTypeName(dtype));
            CheckApart(ArraysOf(w, desc, plan, rows, slots, dtype), begin, w.end);
            CHECK(w.end % kArrayAlignment == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("layer plan: a call of the largest size is counted in 64 bits") {
  const MoeDesc desc = MakeDesc(65535, 8, 16384, 8192, UniformScheme(Linear(Int4())));
  const LayerPlan plan = PlanOf(desc);
  const int64_t rows = int64_t{1} << 20, slots = int64_t{1} << 23;
  const PartWorkspace w = WorkspaceOf(desc, plan, false, rows, slots, DType::kF32, 0);
  CheckApart(ArraysOf(w, desc, plan, rows, slots, DType::kF32), 0, w.end);
  CHECK(w.end > static_cast<size_t>(slots) * 16384 * 4);
  CHECK(OffsetsOf(plan, 65535).bytes > size_t{65535} * 3 * 16384 * 8192 / 2);
}

TEST_CASE("layer plan: a layer's bytes are the sum of its arrays, which lie apart") {
  for (const MoeDesc& desc : Descs()) {
    for (const LayerPlan& plan : PlansOf(desc)) {
      const size_t experts = static_cast<size_t>(desc.num_experts);
      const LayerOffsets offsets = OffsetsOf(plan, desc.num_experts);
      std::vector<Array> arrays;
      const auto add = [&](const PackedShape& shape, const MatrixOffsets& at) {
        const size_t common = shape.ordered && !shape.own_order ? static_cast<size_t>(shape.depth()) * sizeof(int32_t) : 0;
        arrays.push_back({"codes", at.codes, shape.code_bytes() * experts});
        arrays.push_back({"scales", at.scales, shape.scale_bytes() * experts});
        arrays.push_back({"zeros", at.zeros, shape.zero_bytes() * experts});
        arrays.push_back({"bias", at.bias, shape.bias_bytes() * experts});
        arrays.push_back({"order", at.order, shape.order_bytes() * experts});
        arrays.push_back({"step_groups", at.step_groups, shape.step_group_bytes() * experts});
        arrays.push_back({"globals", at.globals, 2 * sizeof(float) * experts});
        arrays.push_back({"common_order", at.common_order, common});
      };
      add(plan.gate, offsets.gate);
      if (!plan.paired) add(plan.up, offsets.up);
      add(plan.down, offsets.down);
      arrays.push_back({"stored", offsets.stored, 3 * sizeof(float) * experts});
      INFO(Describe(desc.scheme));
      CheckApart(arrays, 0, offsets.bytes);
      size_t sum = 0;
      for (const Array& array : arrays) sum += (array.bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
      CHECK(offsets.bytes == sum);
      // A layer that loads one expert at a time fills each array piece by piece: pieces must keep the elements aligned.
      for (const PackedShape* shape : {&plan.gate, &plan.down}) {
        CHECK(shape->code_bytes() % 16 == 0);
        CHECK(shape->bias_bytes() % sizeof(float) == 0);
        CHECK(shape->order_bytes() % sizeof(int32_t) == 0);
      }
    }
  }
}

TEST_CASE("layer plan: gate and up are one matrix when described alike and without values of single experts") {
  CHECK(PlanFor(Linear(Int4())).paired);
  CHECK(PlanFor(Linear(Int4(), Int8(ActivationMode::kDynamic, 1))).paired);
  CHECK(PlanFor(Linear(Int4(), Int8(ActivationMode::kDynamic, 0))).paired);
  // In act-order where their orders are equal.
  const MoeDesc ordered = MakeDesc(4, 2, 256, 192, UniformScheme(Linear(Int4(true))));
  CHECK(PlanOf(ordered, {.equal = true}).paired);
  CHECK_FALSE(PlanOf(ordered, {.equal = false}).paired);
  CHECK_FALSE(PlanFor(Linear(Int4(), Int8(ActivationMode::kStatic, 0))).paired);
  CHECK_FALSE(PlanFor(Linear(Int4(), NvFp4())).paired);
  QuantScheme scheme = UniformScheme(Linear(Int4()));
  scheme.down = Linear(Int4(true), Int8(ActivationMode::kStatic, 0));
  CHECK(PlanOf(MakeDesc(4, 2, 256, 192, scheme)).paired);
  scheme.up = Linear(Weights(ElementType::kInt4, ScaleType::kF16, {1, 64}));
  const LayerPlan apart = PlanOf(MakeDesc(4, 2, 256, 192, scheme));
  CHECK_FALSE(apart.paired);
  CHECK_FALSE(apart.gate.paired);
  CHECK(apart.gate.groups == 8);
  CHECK(apart.up.groups == 4);
}

TEST_CASE("layer plan: an operand's terms are those of its values, one of codes, three of codes times scales") {
  const OperandPlan plain = PlanFor(Linear(Int4())).gate_x;
  CHECK_FALSE(plain.quantized);
  CHECK_FALSE(plain.has_scales());
  CHECK_FALSE(plain.by_sorted_row);
  for (int terms : {1, 2, 3}) CHECK(plain.terms(terms) == terms);
  CHECK(TermsOf(DType::kF32) == 3);
  CHECK(TermsOf(DType::kF16) == 2);
  CHECK(TermsOf(DType::kBf16) == 1);
  CHECK(TermsOfH(DType::kF32) == 3);
  CHECK(TermsOfH(DType::kF16) == 1);

  const OperandPlan row = PlanFor(Linear(Int4(), Int8(ActivationMode::kDynamic, 1))).gate_x;
  CHECK((row.quantized && row.has_scales() && !row.scaled_values && !row.spans_rows && !row.stored && !row.by_sorted_row));
  CHECK((row.group == 0 && row.groups == 1 && row.scale_steps == 0));
  CHECK(row.terms(3) == 1);

  const OperandPlan all = PlanFor(Linear(Int4(), Int8(ActivationMode::kDynamic, 0))).gate_x;
  CHECK((all.quantized && all.spans_rows && all.groups == 1));

  const OperandPlan grouped = PlanFor(Linear(Int4(), Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 128))).gate_x;
  CHECK((grouped.has_scales() && grouped.group == 128 && grouped.groups == 2 && grouped.scale_steps == 8));
  CHECK(grouped.terms(2) == 1);

  const OperandPlan odd = PlanFor(Linear(Int4(), Dynamic(ElementType::kInt8, ScaleType::kF32, 24))).gate_x;
  CHECK((odd.quantized && odd.scaled_values && !odd.has_scales() && odd.scale_steps == 0 && odd.groups == 11));
  CHECK(odd.terms(1) == 3);

  const OperandPlan stored = PlanFor(Linear(Int4(), Int8(ActivationMode::kStatic, 0))).gate_x;
  CHECK((stored.quantized && stored.stored && stored.by_sorted_row && stored.has_scales() && stored.groups == 1));

  const OperandPlan nv = PlanFor(Linear(Int4(), NvFp4())).gate_x;
  CHECK((nv.stored && nv.by_sorted_row && nv.scale_steps == 1 && nv.groups == 16));
}

TEST_CASE("layer plan: codes are bytes where 8-bit weights meet codes of their kind, integers only under one scale") {
  const auto bytes = [](const WeightScheme& weights, const ActivationScheme& input) {
    return PlanFor(Linear(weights, input)).gate_x.bytes;
  };
  const WeightScheme int8 = Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
  const WeightScheme fp8 = Weights(ElementType::kFp8E4m3, ScaleType::kF32, {128, 128});
  const ActivationScheme row = Int8(ActivationMode::kDynamic, 1), groups = Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 128);
  CHECK(bytes(int8, row));
  CHECK(bytes(int8, Int8(ActivationMode::kDynamic, 0)));
  CHECK(bytes(int8, Int8(ActivationMode::kStatic, 0)));
  CHECK(bytes(fp8, groups));
  CHECK_FALSE(bytes(int8, groups));
  CHECK_FALSE(bytes(fp8, row));
  CHECK_FALSE(bytes(Int4(), row));
  CHECK_FALSE(bytes(int8, ActivationScheme()));
  CHECK_FALSE(bytes(int8, Dynamic(ElementType::kInt8, ScaleType::kF32, 128)));
  CHECK_FALSE(bytes(Weights(ElementType::kInt8, ScaleType::kF32, {1, 128}), row));
  CHECK_FALSE(bytes(Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}, true), row));
  CHECK_FALSE(bytes(fp8, Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 24)));
  // Sums of more inputs would not fit into 32 bits.
  MoeDesc desc = MakeDesc(1, 1, 131008, 64, UniformScheme(Linear(int8, row)));
  CHECK(PlanOf(desc).gate_x.bytes);
  desc.hidden = 131009;
  CHECK_FALSE(PlanOf(desc).gate_x.bytes);
  CHECK(PlanOf(desc).down_h.bytes);
}

TEST_CASE("layer plan: scales multiply operands where they are powers of two of half blocks, without a global one") {
  const auto powers = [](const WeightScheme& weights) { return ScalesArePowers(PlanFor(Linear(weights)).gate, weights); };
  WeightScheme mx = Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32});
  CHECK(powers(mx));
  CHECK(powers(Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32})));
  CHECK(powers(Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 128})));
  CHECK_FALSE(powers(Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 16})));
  CHECK_FALSE(powers(Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 32})));
  CHECK_FALSE(powers(Weights(ElementType::kInt4, ScaleType::kE8m0, {1, 32})));
  mx.global_scale = GlobalScale::kMultiplier;
  CHECK_FALSE(powers(mx));
}

TEST_CASE("layer plan: a slot of a product of bytes ends with every group of weights and rows") {
  PackedShape shape;
  shape.codes = Codes::kFp8;
  shape.groups = 1;
  shape.group_steps = INT32_MAX;
  CHECK(ByteSlotSteps(shape, 0) == 8);
  CHECK(ByteSlotSteps(shape, 16) == 8);
  CHECK(ByteSlotSteps(shape, 4) == 2);
  CHECK(ByteSlotSteps(shape, 3) == 1);
  shape.groups = 12;
  shape.group_steps = 8;
  CHECK(ByteSlotSteps(shape, 0) == 8);
  CHECK(ByteSlotSteps(shape, 8) == 8);
  CHECK(ByteSlotSteps(shape, 2) == 2);
  shape.group_steps = 6;
  CHECK(ByteSlotSteps(shape, 8) == 2);
  shape.group_steps = 1;
  CHECK(ByteSlotSteps(shape, 8) == 1);
  // Groups of act-order end where the blocks' slots let them.
  shape.own_order = true;
  shape.group_steps = 8;
  shape.slots = 1;
  CHECK(ByteSlotSteps(shape, 0) == 2);
  shape.slots = kSteps;
  CHECK(ByteSlotSteps(shape, 0) == 1);
  shape.codes = Codes::kInt8;
  CHECK(ByteSlotSteps(shape, 0) == 0);
}

TEST_CASE("layer plan: gate's and up's features lie in the order of down's positions, where h is not quantized") {
  const LayerPlan ordered = PlanFor(Linear(Int4(true)));
  CHECK((ordered.ordered_features && ordered.direct_h() && ordered.gate.rows == 192));
  const LayerPlan padded = PlanFor(Linear(Weights(ElementType::kInt8, ScaleType::kF32, {1, 24})));
  CHECK((padded.ordered_features && padded.direct_h()));
  CHECK(padded.gate.rows == padded.down.positions);
  CHECK(padded.h_stride() == 8 * 32 - 8);  // 192 inputs in groups of 24, each but the last padded to 32
  CHECK_FALSE(PlanFor(Linear(Int4())).ordered_features);
  CHECK_FALSE(PlanFor(Linear(Int4(true), Int8(ActivationMode::kDynamic, 1))).ordered_features);
}

TEST_CASE("layer plan: a layer has several plans only where act-order leaves them open") {
  const auto plans = [](const QuantScheme& scheme) { return PlansOf(MakeDesc(4, 2, 256, 192, scheme)).size(); };
  CHECK(plans(UniformScheme(Linear(Int4()))) == 1);
  CHECK(plans(UniformScheme(Linear(Int4(true)))) == 4);
  QuantScheme down_only = UniformScheme(Linear(Int4()));
  down_only.down = Linear(Int4(true));
  CHECK(plans(down_only) == 2);
}

TEST_CASE("layer plan: operands follow the weights' order, and h is written as an operand only where it is used as it is") {
  const LayerPlan plain = PlanFor(Linear(Int4()));
  CHECK(plain.direct_h());
  CHECK(plain.down_h.by_sorted_row);
  CHECK_FALSE(PlanFor(Linear(Int4(), Int8(ActivationMode::kDynamic, 1))).direct_h());
  // Act-order: each expert orders the inputs in its own way, so that groups of input scales no longer fall on steps.
  const LayerPlan ordered = PlanFor(Linear(Int4(true), Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 128)));
  CHECK((ordered.gate_x.by_sorted_row && ordered.up_x.by_sorted_row && ordered.gate_x.scaled_values));
  CHECK_FALSE((ordered.ordered_features || ordered.direct_h()));
  CHECK_FALSE(PlanFor(Linear(Int4(true), Int8(ActivationMode::kDynamic, 1))).gate_x.scaled_values);
  // Groups of weights that are padded to whole steps make one order for all experts.
  const LayerPlan padded = PlanFor(Linear(Weights(ElementType::kInt8, ScaleType::kF32, {1, 24})));
  CHECK((padded.gate.ordered && !padded.gate.own_order && !padded.gate_x.by_sorted_row));
  MoeDesc desc = MakeDesc(4, 2, 256, 192, UniformScheme(Linear(Int4())));
  desc.weight_on_input = true;
  CHECK(PlanOf(desc).gate_x.by_sorted_row);
}

}  // namespace moed::cuda
