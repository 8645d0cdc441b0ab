// The packed layout: every weight of every scheme is found again where the layout says, on the host.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "kernels/cuda/layer_plan.h"
#include "kernels/cuda/pack.h"
#include "kernels/number_formats.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/random_layer.h"

namespace moed::cuda {
namespace {

using testing::Weights;

// The arrays of one packed expert.
struct Packed {
  explicit Packed(const PackedShape& shape)
      : codes(shape.code_bytes(), std::byte{0xAA}), scales(shape.scale_bytes(), std::byte{0xAA}), zeros(shape.zero_bytes()),
        bias(shape.bias_bytes() / 4), order(shape.order_bytes() / 4), step_groups(shape.step_group_bytes() / 4) {}
  PackTarget target() {
    const auto data = [](auto& array) { return array.empty() ? nullptr : array.data(); };
    return {data(codes), data(scales), data(zeros), data(bias), data(order), data(step_groups), globals};
  }
  std::vector<std::byte> codes, scales, zeros;
  std::vector<float> bias;
  std::vector<int32_t> order, step_groups;
  float globals[2] = {};
};

float ScaleAt(ScaleType type, const std::byte* at) {
  uint16_t half;
  float single;
  std::memcpy(&half, at, sizeof(half));
  if (type == ScaleType::kF32) return std::memcpy(&single, at, sizeof(single)), single;
  if (type == ScaleType::kBf16) return Bf16ToFloat(half);
  if (type == ScaleType::kF16) return F16ToFloat(half);
  return type == ScaleType::kE8m0 ? E8m0ToFloat(static_cast<uint8_t>(*at)) : E4m3ToFloat(static_cast<uint8_t>(*at));
}

// The value of the code at `place` of a block, before scaling.
float CodeAt(const PackedShape& shape, const std::byte* block, CodePlace place, int zero) {
  const uint8_t byte = static_cast<uint8_t>(block[place.byte]);
  const int nibble = (byte >> place.shift) & 0xF;
  uint16_t half;
  float single;
  switch (shape.codes) {
    case Codes::kInt4: return static_cast<float>(nibble - zero);
    case Codes::kFp4: return E2m1ToFloat(static_cast<uint8_t>(nibble));
    case Codes::kInt8: return static_cast<float>(byte - zero);
    case Codes::kFp8: return E4m3ToFloat(byte);
    case Codes::kBf16: return std::memcpy(&half, block + place.byte, 2), Bf16ToFloat(half);
    case Codes::kF16: return std::memcpy(&half, block + place.byte, 2), F16ToFloat(half);
    case Codes::kF32: return std::memcpy(&single, block + place.byte, 4), single;
  }
  return 0.0f;
}

// Row `row` of projection `second` as the packed arrays tell it, by input.
std::vector<float> Unpack(const PackedShape& shape, const WeightScheme& scheme, const Packed& packed, bool second, int64_t row) {
  const int64_t tile_rows = shape.paired ? kHalfRows : kTileRows;
  const int64_t tile = row / tile_rows;
  const int in_rows = static_cast<int>(row % tile_rows);
  const int in_tile = shape.paired ? PairedRow(in_rows, second) : in_rows;
  const std::vector<int32_t> common = shape.ordered && !shape.own_order ? CommonOrder(shape, scheme) : std::vector<int32_t>();
  std::vector<float> values(static_cast<size_t>(shape.cols), NAN);
  for (int64_t at = 0; at < shape.depth(); ++at) {
    const int64_t step = at / kStepDepth;
    int64_t group = shape.groups > 0 ? std::min<int64_t>(step / shape.group_steps, shape.groups - 1) : 0;
    if (shape.own_order) group = packed.step_groups[static_cast<size_t>(step)];
    const int64_t scale_at = (tile * shape.groups + group) * kTileRows + ScalePlace(in_tile);
    const int zero = shape.zero_points ? static_cast<int>(packed.zeros[static_cast<size_t>(scale_at)])
                                       : (IsInteger(shape.codes) ? 1 << (BitsOf(shape.codes) - 1) : 0);
    const std::byte* block = packed.codes.data() + (tile * shape.blocks + at / kBlockDepth) * BlockBytes(shape.codes);
    float value = CodeAt(shape, block, PlaceOf(shape.codes, in_tile, static_cast<int>(at % kBlockDepth)), zero);
    if (shape.groups > 0)
      value *= ScaleAt(shape.scale, packed.scales.data() + scale_at * ScaleBytes(shape.scale)) * packed.globals[second];
    int64_t k = at < shape.cols ? at : -1;
    if (shape.ordered) k = shape.own_order ? packed.order[static_cast<size_t>(at)] : common[static_cast<size_t>(at)];
    if (k >= 0) values[static_cast<size_t>(k)] = value;
  }
  return values;
}

void ExpectEqual(const PackedShape& shape, const LinearWeights& weights, const Packed& packed, bool second) {
  std::vector<float> want(static_cast<size_t>(shape.cols));
  for (int64_t row = 0; row < weights.rows; ++row) {
    DequantizeRow(weights, row, want.data());
    const std::vector<float> got = Unpack(shape, weights.scheme, packed, second, row);
    for (int64_t k = 0; k < shape.cols; ++k) {
      const float tolerance = 4e-7f * std::fabs(want[static_cast<size_t>(k)]);
      const bool equal = std::fabs(got[static_cast<size_t>(k)] - want[static_cast<size_t>(k)]) <= tolerance;
      if (equal) continue;
      INFO(Describe(weights.scheme) << " [" << weights.rows << ", " << weights.cols << "] row " << row << " input " << k);
      REQUIRE(got[static_cast<size_t>(k)] == want[static_cast<size_t>(k)]);
    }
  }
}

std::vector<WeightScheme> Schemes() {
  std::vector<WeightScheme> all;
  for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
    for (GroupShape group : {GroupShape{1, 32}, GroupShape{1, 64}, GroupShape{1, 128}, GroupShape{1, 0}, GroupShape{0, 0},
                             GroupShape{1, 20}, GroupShape{1, 48}}) {
      for (bool zero_points : {false, true}) all.push_back(Weights(element, ScaleType::kF16, group, zero_points));
    }
    for (bool zero_points : {false, true}) {
      all.push_back(Weights(element, ScaleType::kBf16, {1, 32}, zero_points));
      all.back().act_order = true;
    }
  }
  all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, {128, 128}));
  all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0}));
  for (ElementType element : {ElementType::kFp4E2m1, ElementType::kFp8E4m3, ElementType::kFp6E2m3, ElementType::kFp6E3m2}) {
    all.push_back(Weights(element, ScaleType::kE8m0, {1, 32}));
  }
  for (GlobalScale global : {GlobalScale::kMultiplier, GlobalScale::kDivisor}) {
    all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}));
    all.back().global_scale = global;
  }
  for (ElementType element : {ElementType::kF32, ElementType::kBf16, ElementType::kF16})
    all.push_back(Weights(element, ScaleType::kNone, {}));
  return all;
}

}  // namespace

TEST_CASE("Every place of a block is used by exactly one code") {
  for (Codes codes : {Codes::kInt4, Codes::kInt8, Codes::kBf16, Codes::kF32}) {
    std::set<std::pair<int, int>> places;
    for (int row = 0; row < kTileRows; ++row) {
      for (int k = 0; k < kBlockDepth; ++k) {
        const CodePlace place = PlaceOf(codes, row, k);
        CHECK((place.byte >= 0 && place.byte + BitsOf(codes) / 8 <= BlockBytes(codes)));
        places.insert({place.byte, place.shift});
      }
    }
    CHECK(places.size() == size_t{kTileRows} * kBlockDepth);
  }
}

TEST_CASE("Rows of bytes lie as the 8-bit codes of a feature do: a thread's words of both are the same inputs") {
  for (int step = 0; step < kSteps; ++step) {
    for (int k = 0; k < kStepDepth; ++k) {
      const int word = BytePosition(k) / 4, at = BytePosition(k) % 4;
      for (const int row : {3, 3 + 8, 64 + 3}) {
        // Bytes 0 and 2 (1 and 3 for the later eight features) of a step's two words, one after the other.
        const int second = row % 16 / 8, thread = row % 64 / 16 * 32 + row % 8 * 4 + word;
        const int byte = (step / 2 * 2 + row / 64) * kTileThreads * kChunkBytes + thread * kChunkBytes + step % 2 * 8 + at / 2 * 4 +
                         at % 2 * 2 + second;
        CHECK(PlaceOf(Codes::kInt8, row, step * kStepDepth + k).byte == byte);
      }
    }
  }
}

TEST_CASE("A packed expert gives back every weight of every scheme, odd sizes included") {
  uint64_t seed = 1;
  for (const WeightScheme& scheme : Schemes()) {
    LinearScheme linear;
    linear.weights = scheme;
    for (const auto& [hidden, intermediate] : {std::pair<int64_t, int64_t>{96, 160}, {176, 72}, {320, 64}}) {
      if (scheme.act_order && (hidden % 32 != 0 || intermediate % 32 != 0)) continue;
      MoeDesc desc = testing::MakeDesc(1, 1, hidden, intermediate, UniformScheme(linear));
      desc.biases = true;
      const testing::RandomExperts experts(desc, ++seed);
      ExpertWeights weights;
      REQUIRE(experts.Read(0, &weights).ok());
      const LayerPlan plan = PlanOf(desc);
      CHECK(plan.paired);
      Packed gate(plan.gate), up(plan.up), down(plan.down);
      REQUIRE(PackMatrix(plan.gate, weights.gate, plan.paired ? &weights.up : nullptr, gate.target()).ok());
      REQUIRE(PackMatrix(plan.up, weights.up, nullptr, up.target()).ok());
      REQUIRE(PackMatrix(plan.down, weights.down, nullptr, down.target()).ok());
      ExpectEqual(plan.gate, weights.gate, gate, false);
      if (plan.paired) ExpectEqual(plan.gate, weights.up, gate, true);
      ExpectEqual(plan.up, weights.up, up, false);
      ExpectEqual(plan.down, weights.down, down, false);
      CHECK(down.bias[0] == weights.down.bias[0]);
      CHECK(gate.bias[1] == weights.gate.bias[1]);
      if (plan.paired) CHECK(gate.bias[PairedRow(1, true)] == weights.up.bias[1]);
    }
  }
}

// The same projection with its rows as `features` says, zeros for -1.
LinearWeights WithRows(const LinearWeights& weights, std::span<const int32_t> features) {
  LinearWeights moved = weights;
  moved.rows = static_cast<int64_t>(features.size());
  const size_t code_bytes = static_cast<size_t>(weights.row_bytes());
  const size_t scale_bytes = weights.scales.size() / static_cast<size_t>(weights.rows);
  const size_t zero_bytes = weights.zero_points.size() / static_cast<size_t>(weights.rows);
  moved.codes.assign(features.size() * code_bytes, 0);
  moved.scales.assign(features.size() * scale_bytes, 0);
  moved.zero_points.assign(features.size() * zero_bytes, 0);
  moved.bias.assign(features.size(), 0.0f);
  for (size_t to = 0; to < features.size(); ++to) {
    if (features[to] < 0) continue;
    const size_t from = static_cast<size_t>(features[to]);
    std::copy_n(weights.codes.begin() + from * code_bytes, code_bytes, moved.codes.begin() + to * code_bytes);
    std::copy_n(weights.scales.begin() + from * scale_bytes, scale_bytes, moved.scales.begin() + to * scale_bytes);
    std::copy_n(weights.zero_points.begin() + from * zero_bytes, zero_bytes, moved.zero_points.begin() + to * zero_bytes);
    moved.bias[to] = weights.bias[from];
  }
  return moved;
}

TEST_CASE("Features in another order, with gaps, are packed as rows that lie so are") {
  uint64_t seed = 100;
  for (const bool zero_points : {false, true}) {
    for (const bool act_order : {false, true}) {
      LinearScheme linear;
      linear.weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}, zero_points);
      linear.weights.act_order = act_order;
      MoeDesc desc = testing::MakeDesc(1, 1, 96, 160, UniformScheme(linear));
      desc.biases = true;
      const testing::RandomExperts experts(desc, ++seed);
      ExpertWeights weights;
      REQUIRE(experts.Read(0, &weights).ok());
      std::vector<int32_t> features;
      for (int32_t i = 0; i < 160; ++i) {
        if (i % 32 == 31) features.push_back(-1);
        features.push_back(i * 61 % 160);
      }
      const PackedShape shape = ShapeOf(linear.weights, static_cast<int64_t>(features.size()), 96, true, true, false);
      Packed by_order(shape), by_hand(shape);
      REQUIRE(PackMatrix(shape, weights.gate, &weights.up, by_order.target(), features).ok());
      const LinearWeights gate = WithRows(weights.gate, features), up = WithRows(weights.up, features);
      REQUIRE(PackMatrix(shape, gate, &up, by_hand.target()).ok());
      CHECK((by_order.codes == by_hand.codes && by_order.scales == by_hand.scales && by_order.zeros == by_hand.zeros &&
             by_order.bias == by_hand.bias));
    }
  }
}

TEST_CASE("A pair whose orders differ is refused") {
  LinearScheme linear;
  linear.weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  linear.weights.act_order = true;
  const MoeDesc desc = testing::MakeDesc(1, 1, 96, 64, UniformScheme(linear));
  testing::RandomExperts experts(desc, 9);
  ExpertWeights& weights = experts.experts()[0];
  const LayerPlan plan = PlanOf(desc);
  Packed packed(plan.gate);
  REQUIRE(PackMatrix(plan.gate, weights.gate, &weights.up, packed.target()).ok());
  std::swap(weights.up.group_index[0], *std::find(weights.up.group_index.begin(), weights.up.group_index.end(), 2));
  CHECK(absl::IsUnimplemented(PackMatrix(plan.gate, weights.gate, &weights.up, packed.target())));
}

TEST_CASE("The largest scale counts the global one, in every format") {
  LinearWeights weights;
  const auto largest = [&](ScaleType type, std::vector<uint8_t> scales) {
    weights.scheme.scale = type;
    weights.scales = std::move(scales);
    return LargestScale(weights);
  };
  CHECK(largest(ScaleType::kNone, {}) == 0.0f);
  CHECK(largest(ScaleType::kBf16, {0x80, 0x3F, 0x00, 0xC0}) == 2.0f);  // 1 and -2
  CHECK(largest(ScaleType::kF16, {0x00, 0x3C, 0x00, 0xB8}) == 1.0f);   // 1 and -0.5
  CHECK(largest(ScaleType::kF32, {0, 0, 0x80, 0x3F, 0, 0, 0, 0xC1}) == 8.0f);
  CHECK(largest(ScaleType::kE8m0, {127, 130, 0}) == 8.0f);
  CHECK(std::isnan(largest(ScaleType::kE8m0, {127, 255})));
  weights.scheme.global_scale = GlobalScale::kDivisor;
  weights.global_scale = 4.0f;
  CHECK(largest(ScaleType::kE4m3, {0x38, 0xC0}) == 0.5f);  // 1 and -2
}

TEST_CASE("Zero points are as far off as they are from the middle on average") {
  LinearWeights weights;
  weights.scheme.element = ElementType::kInt4;
  CHECK(ZeroPointOffset(weights) == 0.0);
  weights.zero_points = {8, 8, 4, 12};
  CHECK(ZeroPointOffset(weights) == 0.25);
  weights.scheme.element = ElementType::kInt8;
  weights.zero_points = {0, 128};
  CHECK(ZeroPointOffset(weights) == 0.5);
}

TEST_CASE("Act-order groups of unequal sizes need the uneven layout, which takes any") {
  WeightScheme scheme = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  scheme.act_order = true;
  LinearScheme linear;
  linear.weights = scheme;
  const MoeDesc desc = testing::MakeDesc(1, 1, 96, 64, UniformScheme(linear));
  testing::RandomExperts experts(desc, 7);
  LinearWeights weights = experts.experts()[0].gate;
  *std::find(weights.group_index.begin(), weights.group_index.end(), 1) = 0;  // 33, 31 and 32
  const PackedShape even = ShapeOf(scheme, 64, 96, false, false, false), uneven = ShapeOf(scheme, 64, 96, false, false, true);
  Packed refused(even), packed(uneven);
  CHECK(absl::IsUnimplemented(PackMatrix(even, weights, nullptr, refused.target())));
  REQUIRE(PackMatrix(uneven, weights, nullptr, packed.target()).ok());
  ExpectEqual(uneven, weights, packed, false);
}

TEST_CASE("A NaN among FP8 weights is refused by its place") {
  LinearScheme linear;
  linear.weights = Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0});
  const MoeDesc desc = testing::MakeDesc(1, 1, 64, 64, UniformScheme(linear));
  testing::RandomExperts experts(desc, 8);
  LinearWeights weights = experts.experts()[0].gate;
  weights.codes[64 * 3 + 5] = 0xFF;
  const PackedShape shape = ShapeOf(linear.weights, 64, 64, false, false, false);
  Packed packed(shape);
  const absl::Status status = PackMatrix(shape, weights, nullptr, packed.target());
  CHECK(absl::IsInvalidArgument(status));
  CHECK(status.message().find("row 3, column 5") != std::string::npos);
}

}  // namespace moed::cuda
