// cuda_generic against the judge on the GPU: every scheme, odd shapes, every number of rows, both activation formats, and what a
// row's result may depend on. Cases tagged [small] are those that also run under compute-sanitizer.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cuda/cuda_backends.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/support/batched_rows.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/schemes.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::HaveGpu;
using testing::JudgedLayer;
using testing::MakeDesc;
using testing::RandomBatch;
using testing::RunOnGpu;
using testing::SameBits;
using testing::Skip;
using testing::Weights;

constexpr int64_t kRows[] = {0, 1, 2, 7, 8, 16, 31, 32, 33, 64, 127, 128, 129, 300, 1000};
constexpr double kFloatBound = 2e-5;  // f32 in, float32 sums
constexpr double kBf16Bound = 0.01;

const Backend& Generic() { return *cuda::CudaBackends().back(); }

LinearScheme Linear(const WeightScheme& weights) {
  LinearScheme linear;
  linear.weights = weights;
  return linear;
}

MoeDesc Desc(int experts, int top_k, int64_t hidden, int64_t intermediate, const WeightScheme& weights) {
  MoeDesc desc = MakeDesc(experts, top_k, hidden, intermediate, UniformScheme(Linear(weights)));
  desc.max_tokens = 1024;
  return desc;
}

// One scheme of each kind of codes, as checkpoints have them.
std::vector<WeightScheme> MainSchemes() {
  std::vector<WeightScheme> all = {
      Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}),
      Weights(ElementType::kInt4, ScaleType::kBf16, {1, 64}, true),
      Weights(ElementType::kInt8, ScaleType::kF16, {1, 0}),
      Weights(ElementType::kFp8E4m3, ScaleType::kF32, {64, 32}),
      Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}),
      Weights(ElementType::kBf16, ScaleType::kNone, {}),
      Weights(ElementType::kF16, ScaleType::kNone, {}),
      Weights(ElementType::kF32, ScaleType::kNone, {}),
  };
  all.push_back(Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}));
  all.back().act_order = true;
  all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}));
  all.back().global_scale = GlobalScale::kMultiplier;
  return all;
}

}  // namespace

TEST_CASE("cuda_generic: every weight scheme agrees with the judge at every number of rows") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 1;
  for (const WeightScheme& scheme : testing::WeightSchemes()) {
    const JudgedLayer layer(Desc(3, 2, 96, 160, scheme), ++seed, Generic());
    for (int64_t rows : kRows) layer.Compare(rows, DType::kF32, kFloatBound, seed + 1000);
    for (int64_t rows : {1, 33, 300}) layer.Compare(rows, DType::kBf16, kBf16Bound, seed + 2000);
    if (scheme.act_order) continue;  // its shuffled groups need an even split
    const JudgedLayer odd(Desc(5, 1, 176, 72, scheme), ++seed, Generic());
    for (int64_t rows : {0, 1, 3, 33, 129}) odd.Compare(rows, DType::kF32, kFloatBound, seed + 1000);
    odd.Compare(65, DType::kF16, kBf16Bound, seed + 3000);
  }
}

TEST_CASE("cuda_generic: odd shapes agree with the judge at every number of rows") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 100;
  for (const auto& [hidden, intermediate] : {std::pair<int64_t, int64_t>{704, 1344}, {1344, 704}, {320, 2880}, {2880, 320}}) {
    for (const WeightScheme& scheme : MainSchemes()) {
      const JudgedLayer layer(Desc(4, 2, hidden, intermediate, scheme), ++seed, Generic());
      for (int64_t rows : kRows) layer.Compare(rows, DType::kBf16, kBf16Bound, seed + 1000);
      for (int64_t rows : {1, 33, 129}) layer.Compare(rows, DType::kF32, kFloatBound, seed + 2000);
    }
  }
}

TEST_CASE("cuda_generic: sizes that no tile, block, group or pair of features divides agree with the judge", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 150;
  for (const auto& [hidden, intermediate] : {std::pair<int64_t, int64_t>{75, 67}, {129, 33}, {17, 1}}) {
    for (const WeightScheme& scheme : MainSchemes()) {
      if (scheme.act_order) continue;  // its shuffled groups need an even split
      MoeDesc desc = Desc(3, 2, hidden, intermediate, scheme);
      desc.biases = true;
      const JudgedLayer layer(desc, ++seed, Generic());
      for (int64_t rows : {1, 40}) layer.Compare(rows, DType::kF32, kFloatBound, seed + 1000);
      for (int64_t rows : {1, 9, 129}) layer.Compare(rows, DType::kBf16, kBf16Bound, seed + 2000);
    }
  }
}

TEST_CASE("cuda_generic: every rule of activation quantization agrees with the judge that quantizes in the same way") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 200;
  for (const ActivationScheme& input : testing::InputSchemes()) {
    LinearScheme linear = Linear(Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}));
    linear.input = input;
    MoeDesc desc = MakeDesc(4, 2, 128, 96, UniformScheme(linear));
    desc.max_tokens = 1024;
    const double bound = testing::SameRuleBound(input.element);
    const JudgedLayer layer(desc, ++seed, Generic());
    for (int64_t rows : {0, 1, 6, 33, 129, 300}) layer.Compare(rows, DType::kF32, bound, seed + 1000);
    desc.biases = true;
    desc.activation.clamped = true;
    desc.activation.limit = 1.0f;
    desc.activation.kind = Activation::Kind::kSwigluOai;
    ++seed;
    JudgedLayer(desc, seed, Generic()).Compare(40, DType::kBf16, bound, seed);
  }
}

TEST_CASE("cuda_generic: quantized activations meet every group, order and scheme of weights", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 300;
  const ActivationScheme inputs[] = {
      testing::Int8(ActivationMode::kDynamic, 1),
      testing::Input(ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 128}),
      testing::Input(ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}),
      testing::Input(ActivationMode::kDynamic, ElementType::kInt8, ScaleType::kF32, {1, 24}),
  };
  for (const WeightScheme& scheme : MainSchemes()) {
    for (const ActivationScheme& input : inputs) {
      LinearScheme linear = Linear(scheme);
      linear.input = input;
      MoeDesc desc = MakeDesc(3, 2, 192, 160, UniformScheme(linear));
      desc.max_tokens = 64;
      const JudgedLayer layer(desc, ++seed, Generic());
      for (int64_t rows : {1, 33}) layer.Compare(rows, DType::kF32, testing::SameRuleBound(input.element), seed + 1000);
    }
  }
}

TEST_CASE("cuda_generic: each projection may have a scheme and an act-order of its own", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  QuantScheme scheme;
  scheme.gate.weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  scheme.up.weights = Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0});
  scheme.down.weights = Weights(ElementType::kBf16, ScaleType::kNone, {1, 0});
  MoeDesc desc = MakeDesc(3, 2, 96, 64, scheme);
  desc.max_tokens = 64;
  for (int64_t rows : {1, 7, 40}) JudgedLayer(desc, 400, Generic()).Compare(rows, DType::kF32, kFloatBound, 401);
  // Act-order with groups of unequal sizes.
  WeightScheme ordered = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}, true);
  ordered.act_order = true;
  RandomBatch batch(Desc(2, 1, 96, 64, ordered), 9, 1, DType::kF32, 402);
  testing::RandomExperts experts(Desc(2, 1, 96, 64, ordered), 403);
  for (ExpertWeights& expert : experts.experts()) {
    for (int32_t& group : expert.up.group_index) group = group == 2 ? 0 : group;
    expert.up.group_index[9] = 2;
  }
  const MoeDesc uneven = Desc(2, 1, 96, 64, ordered);
  auto got = Generic().Prepare(uneven, experts, testing::Pool());
  REQUIRE(got.ok());
  const JudgedLayer unrelated(uneven, 404, Generic());
  auto y = RunOnGpu(**got, batch.view(), DType::kF32);
  REQUIRE(y.ok());
  auto judge = testing::JudgeOf(uneven, experts);
  CHECK(testing::Judge(*y, *RunOnGpu(*judge, batch.view(), DType::kF32), 96, kFloatBound).passed);
}

TEST_CASE("cuda_generic: every activation, with and without clamp and biases, and the weight on the input", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 500;
  using Kind = Activation::Kind;
  for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kSwigluOai}) {
    for (bool special : {false, true}) {
      MoeDesc desc = Desc(3, 2, 64, 80, Weights(ElementType::kInt4, ScaleType::kF16, {1, 16}));
      desc.activation.kind = kind;
      desc.activation.clamped = desc.biases = special;
      desc.activation.limit = 0.7f;
      desc.weight_on_input = special;
      const JudgedLayer layer(desc, ++seed, Generic());
      for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
        layer.Compare(19, dtype, dtype == DType::kF32 ? kFloatBound : kBf16Bound, seed);
      }
    }
  }
}

TEST_CASE("cuda_generic: absent experts, duplicates, other numbers of slots, and many experts", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WeightScheme scheme = Weights(ElementType::kInt8, ScaleType::kF16, {1, 32});
  const JudgedLayer layer(Desc(6, 3, 64, 64, scheme), 600, Generic());
  RandomBatch batch(layer.desc(), 50, 3, DType::kF32, 601);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    if (slot % 4 == 1) batch.ids[slot] = -1, batch.weights[slot] = std::numeric_limits<float>::quiet_NaN();
    if (slot % 9 == 2) batch.ids[slot] = batch.ids[slot - 1] < 0 ? 5 : batch.ids[slot - 1];
  }
  for (int32_t& id : std::span(batch.ids).first(3)) id = -1;  // a row without experts: exact zeros
  layer.CompareBatch(batch.view(), kFloatBound);
  for (int top_k : {1, 2, 6}) {
    const RandomBatch other(layer.desc(), 21, top_k, DType::kF32, 602);
    layer.CompareBatch(other.view(), kFloatBound);
  }
  // More experts than counters fit shared memory.
  const JudgedLayer many(Desc(9000, 2, 16, 16, Weights(ElementType::kBf16, ScaleType::kNone, {})), 603, Generic());
  many.Compare(257, DType::kF32, kFloatBound, 604);
}

TEST_CASE("cuda_generic: batched experts give what the standard format gives", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 700;
  for (const WeightScheme& scheme : MainSchemes()) {
    MoeDesc desc = Desc(4, 2, 96, 160, scheme);
    desc.max_tokens_per_expert = 40;
    const JudgedLayer layer(desc, ++seed, Generic());
    const RandomBatch batch(desc, 33, 2, DType::kF32, seed);
    const auto run = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE(run.ok());
    testing::CompareBatched(layer.moe(), desc, batch, *run, &testing::GpuLane());
  }
}

TEST_CASE("cuda_generic: a row's bits depend on that row only, whatever the company and the tile") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 800;
  for (const WeightScheme& scheme : MainSchemes()) {
    const JudgedLayer layer(Desc(4, 2, 192, 160, scheme), ++seed, Generic());
    for (DType dtype : {DType::kBf16, DType::kF32}) {
      const RandomBatch all(layer.desc(), 400, 2, dtype, seed);
      layer.CompareParts(all.view(), {{0, 1}, {5, 3}, {17, 40}, {100, 150}});
    }
  }
}

TEST_CASE("cuda_generic: NaN and infinity in a row leave every other row's bits alone") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 900;
  for (const WeightScheme& scheme : MainSchemes()) {
    const JudgedLayer layer(Desc(3, 2, 96, 160, scheme), ++seed, Generic());
    RandomBatch batch(layer.desc(), 37, 2, DType::kF32, seed);
    const auto clean = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    float* x = reinterpret_cast<float*>(batch.x.data());
    x[3 * 96 + 5] = std::numeric_limits<float>::quiet_NaN();
    x[20 * 96] = std::numeric_limits<float>::infinity();
    const auto dirty = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE((clean.ok() && dirty.ok()));
    for (int64_t row = 0; row < 37; ++row) {
      if (row == 20) continue;
      const bool same = SameBits(clean->data() + row * 96, dirty->data() + row * 96, 96);
      CHECK(same == (row != 3));
    }
    CHECK(std::isnan((*dirty)[3 * 96]));
  }
}

TEST_CASE("cuda_generic: fifty repeats are bitwise equal") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 1000;
  for (const WeightScheme& scheme : MainSchemes()) {
    const JudgedLayer layer(Desc(8, 2, 320, 176, scheme), ++seed, Generic());
    const RandomBatch batch(layer.desc(), 65, 2, DType::kBf16, seed);
    const auto first = RunOnGpu(layer.moe(), batch.view(), DType::kBf16);
    for (int repeat = 0; repeat < 50; ++repeat) {
      const auto again = RunOnGpu(layer.moe(), batch.view(), DType::kBf16);
      REQUIRE((first.ok() && again.ok()));
      CHECK(SameBits(first->data(), again->data(), static_cast<int64_t>(first->size())));
    }
  }
}

TEST_CASE("cuda_generic: scales that are powers of two multiply exactly, whatever their size") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 1050;
  for (const WeightScheme& scheme : {Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}),
                                     Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}),
                                     Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 64})}) {
    const MoeDesc desc = Desc(3, 2, 176, 320, scheme);
    testing::RandomExperts experts(desc, ++seed);
    // Gate's and up's scales are 2^-27 to 2^13, some beyond what one bf16 power holds beside the codes' bias; down's bring y back.
    for (ExpertWeights& expert : experts.experts()) {
      const auto set = [](LinearWeights& weights, const auto& code) {
        for (size_t i = 0; i < weights.scales.size(); ++i) weights.scales[i] = static_cast<uint8_t>(code(i));
      };
      set(expert.gate, [](size_t i) { return 100 + i * 7 % 41; });
      set(expert.up, [](size_t i) { return 140 - i * 5 % 41; });
      set(expert.down, [](size_t i) { return i % 3 == 0 ? 0 : 90 + i % 9; });
    }
    auto moe = Generic().Prepare(desc, experts, testing::Pool());
    REQUIRE(moe.ok());
    const auto judge = testing::JudgeOf(desc, experts);
    for (int64_t rows : {1, 33, 128, 300}) {
      const RandomBatch batch(desc, rows, 2, DType::kBf16, seed + 1000);
      const auto got = RunOnGpu(**moe, batch.view(), DType::kF32), want = RunOnGpu(*judge, batch.view(), DType::kF32);
      REQUIRE((got.ok() && want.ok()));
      CHECK(testing::Judge(*got, *want, 176, kBf16Bound).passed);
    }
  }
}

TEST_CASE("cuda_generic: a halved scale of one projection of one expert fails the judge, a single one too") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = Desc(3, 2, 128, 96, Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}));
  const JudgedLayer layer(desc, 1100, Generic());
  const RandomBatch batch(desc, 64, 2, DType::kF32, 1101);
  const auto want = RunOnGpu(layer.judge(), batch.view(), DType::kF32);
  for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
    for (bool all : {true, false}) {
      testing::RandomExperts wrong(desc, 1100);
      LinearWeights& weights = wrong.experts()[1].*projection;
      auto* scales = reinterpret_cast<float*>(weights.scales.data());
      for (size_t at = 0; at < (all ? weights.scales.size() / 4 : 1); ++at) scales[at] *= 0.5f;
      auto moe = Generic().Prepare(desc, wrong, testing::Pool());
      REQUIRE(moe.ok());
      CHECK_FALSE(testing::Judge(*RunOnGpu(**moe, batch.view(), DType::kF32), *want, 128, all ? 0.01 : 1e-4).passed);
    }
  }
}

TEST_CASE("cuda_generic: tensors may lie on the device, aligned or not") {
  if (!HaveGpu()) return Skip("no GPU");
  const JudgedLayer layer(Desc(4, 2, 128, 96, Weights(ElementType::kInt4, ScaleType::kF16, {1, 32})), 1200, Generic());
  const RandomBatch batch(layer.desc(), 33, 2, DType::kBf16, 1201);
  const auto want = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
  REQUIRE(want.ok());
  for (size_t offset : {0, 2, 16}) {
    const testing::DeviceBytes x(batch.x, offset);
    const testing::DeviceBytes out(std::vector<uint8_t>(33 * 128 * 4, 0xFF));
    MoeBatch view = batch.view();
    view.x.data = x.data();
    view.x.place = Place::kDevice;
    ExecContext context;
    context.lane = &testing::GpuLane();
    REQUIRE(layer.moe().Run(view, {out.data(), DType::kF32, 33, 128, Place::kDevice}, context).ok());
    const std::vector<uint8_t> got = out.Read();
    CHECK(std::memcmp(got.data(), want->data(), got.size()) == 0);
  }
}

TEST_CASE("cuda_generic: calls that break the contract are refused with the numbers", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const JudgedLayer layer(Desc(4, 2, 64, 64, Weights(ElementType::kInt8, ScaleType::kF16, {1, 0})), 1300, Generic());
  RandomBatch batch(layer.desc(), 3, 2, DType::kF32, 1301);
  batch.ids[4] = 4;
  const auto refused = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
  CHECK(absl::IsInvalidArgument(refused.status()));
  batch.ids[4] = 3;
  CHECK(RunOnGpu(layer.moe(), batch.view(), DType::kF32).ok());
  ExecContext context;
  std::vector<float> out(3 * 64);
  CHECK(absl::IsFailedPrecondition(layer.moe().Run(batch.view(), {out.data(), DType::kF32, 3, 64}, context)));
}

}  // namespace moed
