// Every CPU backend against the reference on every weight scheme and every rule of activation quantization, in both activation
// formats.
#include <catch2/catch.hpp>

#include <algorithm>

#include "kernels/activation_quant.h"
#include "kernels/cpu/reference.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"

namespace moed {
namespace {

using testing::BackendsFor;
using testing::CompareBatched;
using testing::Input;
using testing::InputSchemes;
using testing::Judge;
using testing::Pool;
using testing::RandomBatch;
using testing::RandomExperts;
using testing::RunLayer;
using testing::SameRuleBound;
using testing::Weights;
using testing::WeightSchemes;

void Compare(MoeDesc desc, const std::vector<int64_t>& rows, double bound, uint64_t seed) {
  desc.max_tokens_per_expert = std::max<int64_t>(1, *std::max_element(rows.begin(), rows.end()));
  RandomExperts experts(desc, seed);
  REQUIRE(cpu::ReferenceBackend().Check(desc, DeviceInfo()).ok());
  auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
  REQUIRE(reference.ok());
  for (const Backend* backend : BackendsFor(desc)) {
    auto moe = backend->Prepare(desc, experts, Pool());
    REQUIRE(moe.ok());
    CHECK((*moe)->ResidentBytes() == backend->PreparedBytes(desc));
    for (int64_t count : rows) {
      RandomBatch batch(desc, count, desc.top_k, DType::kF32, seed + count);
      const auto got = RunLayer(**moe, batch.view(), DType::kF32, Pool());
      const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
      REQUIRE((got.ok() && want.ok()));
      const testing::Judgement judgement = Judge(*got, *want, desc.hidden, bound);
      INFO(backend->Name() << ": " << Describe(desc.scheme) << " H=" << desc.hidden << " I=" << desc.intermediate << " M=" << count
                           << ": " << judgement.reason);
      CHECK(judgement.passed);
      CompareBatched(**moe, desc, batch, *got);
      if (backend->Name() == "cpu_generic") CompareBatched(**reference, desc, batch, *want);
    }
  }
}

}  // namespace

TEST_CASE("Every weight scheme agrees with the reference, odd sizes included") {
  uint64_t seed = 1;
  for (const WeightScheme& scheme : WeightSchemes()) {
    LinearScheme linear;
    linear.weights = scheme;
    Compare(testing::MakeDesc(3, 2, 96, 160, UniformScheme(linear)), {0, 1, 2, 4, 5}, 2e-5, ++seed);
    if (scheme.act_order) continue;  // its shuffled groups need an even split
    Compare(testing::MakeDesc(2, 1, 176, 72, UniformScheme(linear)), {1, 3, 33}, 2e-5, ++seed);
  }
}

TEST_CASE("Gate, up and down may each have a scheme of their own") {
  QuantScheme scheme;
  scheme.gate.weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  scheme.up.weights = Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0});
  scheme.down.weights = Weights(ElementType::kBf16, ScaleType::kNone, {1, 0});
  Compare(testing::MakeDesc(3, 2, 96, 64, scheme), {1, 7}, 2e-5, 500);
}

TEST_CASE("Every rule of activation quantization agrees with the reference that quantizes in the same way") {
  uint64_t seed = 1000;
  for (const ActivationScheme& input : InputSchemes()) {
    LinearScheme linear;
    linear.weights = Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
    linear.input = input;
    MoeDesc desc = testing::MakeDesc(4, 2, 128, 96, UniformScheme(linear));
    Compare(desc, {0, 1, 6, 33}, SameRuleBound(input.element), ++seed);
    desc.biases = true;
    desc.activation.clamped = true;
    desc.activation.limit = 1.0f;
    desc.activation.kind = Activation::Kind::kSwigluOai;
    Compare(desc, {3}, SameRuleBound(input.element), ++seed);
  }
}

TEST_CASE("Each projection of each expert has its own static scale") {
  LinearScheme linear;
  linear.weights = Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
  linear.input = Input(ActivationMode::kStatic, ElementType::kInt8, ScaleType::kF32, {0, 0});
  const MoeDesc desc = testing::MakeDesc(3, 2, 64, 48, UniformScheme(linear));
  RandomExperts experts(desc, 2000);
  RandomBatch batch(desc, 16, 2, DType::kF32, 2001);
  auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
  const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
  for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
    RandomExperts wrong = experts;  // the scale of one projection of one expert, as another's
    (wrong.experts()[1].*projection).input_scale *= 4.0f;
    for (const Backend* backend : BackendsFor(desc)) {
      auto moe = backend->Prepare(desc, wrong, Pool());
      CHECK_FALSE(Judge(*RunLayer(**moe, batch.view(), DType::kF32, Pool()), *want, 64, 0.02).passed);
    }
  }
}

TEST_CASE("A per-token scale sees its own row only, a per-request scale all of them") {
  for (bool per_request : {false, true}) {
    LinearScheme linear;
    linear.input = Input(ActivationMode::kDynamic, ElementType::kInt8, ScaleType::kF32, {per_request ? 0 : 1, 0});
    const MoeDesc desc = testing::MakeDesc(2, 1, 64, 48, UniformScheme(linear));
    RandomExperts experts(desc, 3000);
    RandomBatch batch(desc, 2, 1, DType::kF32, 3001);
    RandomBatch louder = batch;
    for (int64_t c = 0; c < 64; ++c) reinterpret_cast<float*>(louder.x.data())[64 + c] *= 1000.0f;
    for (const Backend* backend : BackendsFor(desc)) {
      auto moe = backend->Prepare(desc, experts, Pool());
      const auto a = RunLayer(**moe, batch.view(), DType::kF32, Pool());
      const auto b = RunLayer(**moe, louder.view(), DType::kF32, Pool());
      const bool same = std::equal(a->begin(), a->begin() + 64, b->begin());
      CHECK(same == !per_request);
    }
  }
}

}  // namespace moed
