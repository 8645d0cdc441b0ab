// Products of 8-bit codes by 8-bit codes (bytes-inl.cuh) on the GPU against the judge that quantizes in the same way: the schemes
// that take them, sizes that nothing divides, every size of a tile, and what a row's result may depend on. Cases tagged [small]
// also run under compute-sanitizer.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/layer_plan.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/schemes.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::HaveGpu;
using testing::Input;
using testing::JudgedLayer;
using testing::MakeDesc;
using testing::RandomBatch;
using testing::RunOnGpu;
using testing::SameBits;
using testing::Skip;
using testing::Weights;

const Backend& Generic() { return *cuda::CudaBackends().back(); }

// Slots of all inputs (int8), of 128, 32 and 16 inputs; scales of rows, of their groups, and stored ones.
std::vector<LinearScheme> ByteSchemes() {
  using Mode = ActivationMode;
  const ElementType int8 = ElementType::kInt8, fp8 = ElementType::kFp8E4m3;
  const WeightScheme int8_rows = Weights(int8, ScaleType::kF32, {1, 0}), fp8_rows = Weights(fp8, ScaleType::kF32, {1, 0});
  const WeightScheme blocks = Weights(fp8, ScaleType::kF32, {128, 128}), mx = Weights(fp8, ScaleType::kE8m0, {1, 32});
  const ActivationScheme groups = Input(Mode::kDynamic, fp8, ScaleType::kF32, {1, 128});
  const ActivationScheme row = Input(Mode::kDynamic, fp8, ScaleType::kF32, {1, 0});
  const std::pair<WeightScheme, ActivationScheme> all[] = {
      {int8_rows, testing::Int8(Mode::kDynamic, 1)},
      {int8_rows, testing::Int8(Mode::kDynamic, 0)},
      {int8_rows, testing::Int8(Mode::kStatic, 0)},
      {blocks, groups},
      {blocks, row},
      {fp8_rows, row},
      {fp8_rows, Input(Mode::kStatic, fp8, ScaleType::kF32, {0, 0})},
      {mx, Input(Mode::kDynamic, fp8, ScaleType::kE8m0, {1, 32}, ScaleRule::kMxFloor)},
      {Weights(fp8, ScaleType::kF16, {1, 64}), groups},
      {Weights(fp8, ScaleType::kF32, {1, 16}), groups},
      {Weights(fp8, ScaleType::kF32, {1, 24}), row},
  };
  std::vector<LinearScheme> schemes;
  for (const auto& [weights, input] : all) {
    schemes.emplace_back();
    schemes.back().weights = weights;
    schemes.back().input = input;
  }
  return schemes;
}

MoeDesc Desc(int experts, int64_t hidden, int64_t intermediate, const LinearScheme& linear) {
  MoeDesc desc = MakeDesc(experts, 2, hidden, intermediate, UniformScheme(linear));
  desc.max_tokens = 1024;
  return desc;
}

}  // namespace

// In sections, since under the race checker each takes minutes.
TEST_CASE("cuda_generic: products of bytes agree with the judge at sizes that no block or unit divides", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const auto compare = [](int64_t hidden, int64_t intermediate, uint64_t seed) {
    for (const LinearScheme& linear : ByteSchemes()) {
      MoeDesc desc = Desc(3, hidden, intermediate, linear);
      REQUIRE(cuda::PlanOf(desc).gate_x.bytes);
      desc.biases = true;
      const JudgedLayer layer(desc, ++seed, Generic());
      const double bound = testing::SameRuleBound(linear.input.element);
      for (int64_t rows : {1, 33, 128}) layer.Compare(rows, DType::kF32, bound, seed + 1000);
    }
  };
  SECTION("176 x 320") { compare(176, 320, 2000); }
  SECTION("75 x 67") { compare(75, 67, 2020); }
  SECTION("320 x 64") { compare(320, 64, 2040); }
}

TEST_CASE("cuda_generic: products of bytes agree with the judge at every number of rows") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2100;
  for (const auto& [hidden, intermediate] : {std::pair<int64_t, int64_t>{704, 1344}, {2880, 320}, {320, 2880}}) {
    for (const LinearScheme& linear : ByteSchemes()) {
      const JudgedLayer layer(Desc(4, hidden, intermediate, linear), ++seed, Generic());
      const double bound = testing::SameRuleBound(linear.input.element);
      for (int64_t rows : {0, 1, 7, 33, 64, 96, 128, 300}) layer.Compare(rows, DType::kBf16, bound, seed + 1000);
    }
  }
}

TEST_CASE("cuda_generic: products of bytes give a row the same bits in every company and tile") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2200;
  for (const LinearScheme& linear : ByteSchemes()) {
    // One scale for all rows makes rows depend on each other.
    if (linear.input.mode == ActivationMode::kDynamic && linear.input.group.rows == 0) continue;
    const JudgedLayer layer(Desc(4, 192, 160, linear), ++seed, Generic());
    const RandomBatch all(layer.desc(), 400, 2, DType::kBf16, seed);
    layer.CompareParts(all.view(), {{0, 1}, {5, 3}, {9, 12}, {17, 40}, {70, 60}, {100, 150}});
  }
}

TEST_CASE("cuda_generic: products of bytes keep a row's NaN to that row, and rows of zeros give zeros") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2300;
  for (const LinearScheme& linear : ByteSchemes()) {
    if (linear.input.mode == ActivationMode::kDynamic && linear.input.group.rows == 0) continue;
    const JudgedLayer layer(Desc(3, 192, 160, linear), ++seed, Generic());
    RandomBatch batch(layer.desc(), 37, 2, DType::kF32, seed);
    const auto clean = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    float* x = reinterpret_cast<float*>(batch.x.data());
    x[3 * 192 + 5] = std::numeric_limits<float>::quiet_NaN();
    x[20 * 192] = std::numeric_limits<float>::infinity();
    std::fill_n(x + 11 * 192, 192, 0.0f);
    const auto dirty = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE((clean.ok() && dirty.ok()));
    for (int64_t row = 0; row < 37; ++row) {
      const float* got = dirty->data() + row * 192;
      if (row == 3) CHECK(std::all_of(got, got + 192, [](float y) { return std::isnan(y); }));
      if (row == 11) CHECK(std::all_of(got, got + 192, [](float y) { return y == 0.0f; }));
      if (row != 3 && row != 11 && row != 20) CHECK(SameBits(clean->data() + row * 192, got, 192));
    }
    // An infinity has no scale of its own: what a stored scale makes of it is the largest code.
    const bool stored = linear.input.mode == ActivationMode::kStatic;
    CHECK(std::isnan((*dirty)[20 * 192]) == !stored);
  }
}

}  // namespace moed
