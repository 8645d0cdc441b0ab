// The dot-product backends (integer, bf16, tiles) against the reference that quantizes in the same way: every scheme that they take,
// odd sizes, row counts around every tile border, extreme codes, planted errors, damaged rows.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/reference.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/random_layer.h"

namespace moed {
namespace {

using testing::BackendsFor;
using testing::CompareBatched;
using testing::Int8;
using testing::Judge;
using testing::Pool;
using testing::RandomBatch;
using testing::RandomExperts;
using testing::RunLayer;
using testing::Weights;

// The same codes, exact sums: what is left is a code of h that lies on a rounding border, a step of one in 127.
constexpr double kInt8Bound = 0.006;
// Products of bf16 and h rounded to bf16.
constexpr double kBf16Bound = 0.006;

WeightScheme Nvfp4() {
  WeightScheme scheme = Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16});
  scheme.global_scale = GlobalScale::kMultiplier;
  return scheme;
}

// Integers and FP4 of every group size that matters: tensor, channel, 16 to 1024, no multiple of 8, longer than a chunk.
std::vector<WeightScheme> IntegerSchemes() {
  std::vector<WeightScheme> all;
  for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
    for (bool zero_points : {false, true}) {
      for (GroupShape group : {GroupShape{0, 0}, GroupShape{1, 0}, GroupShape{1, 16}, GroupShape{1, 20}, GroupShape{1, 32}, GroupShape{1, 64},
                               GroupShape{1, 96}, GroupShape{1, 128}, GroupShape{1, 640}}) {
        all.push_back(Weights(element, ScaleType::kBf16, group, zero_points));
      }
    }
  }
  all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}));
  all.push_back(Nvfp4());
  return all;
}

QuantScheme SchemeOf(const WeightScheme& weights, const ActivationScheme& input) { return UniformScheme({weights, input}); }

void CompareWith(MoeDesc desc, const RandomExperts& experts, DType dtype, const std::vector<int64_t>& rows, double bound,
                 uint64_t seed) {
  desc.max_tokens_per_expert = *std::max_element(rows.begin(), rows.end());
  auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
  REQUIRE(reference.ok());
  std::vector<std::pair<std::string, std::unique_ptr<PreparedMoe>>> able;
  for (const Backend* backend : BackendsFor(desc)) {
    if (backend->Name() == "cpu_generic") continue;  // has no dot products
    auto moe = backend->Prepare(desc, experts, Pool());
    REQUIRE(moe.ok());
    able.emplace_back(backend->Name(), *std::move(moe));
  }
  for (int64_t count : rows) {
    RandomBatch batch(desc, count, desc.top_k, dtype, seed + count);
    const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
    REQUIRE(want.ok());
    for (const auto& [name, moe] : able) {
      const auto got = RunLayer(*moe, batch.view(), DType::kF32, Pool());
      REQUIRE(got.ok());
      const testing::Judgement judgement = Judge(*got, *want, desc.hidden, bound);
      INFO(name << ": " << Describe(desc.scheme) << " H=" << desc.hidden << " I=" << desc.intermediate << " M=" << count << ": "
                << judgement.reason);
      CHECK(judgement.passed);
      if (!desc.weight_on_input) CompareBatched(*moe, desc, batch, *got);
    }
  }
}

void Compare(const MoeDesc& desc, DType dtype, const std::vector<int64_t>& rows, double bound, uint64_t seed) {
  CompareWith(desc, RandomExperts(desc, seed), dtype, rows, bound, seed);
}

}  // namespace

TEST_CASE("Int8 activations agree with the same-rule reference for every integer and FP4 weight scheme") {
  uint64_t seed = 1;
  for (const WeightScheme& weights : IntegerSchemes()) {
    const QuantScheme scheme = SchemeOf(weights, Int8(ActivationMode::kDynamic, 1));
    Compare(testing::MakeDesc(3, 2, 1344, 704, scheme), DType::kBf16, {0, 1, 4, 33}, kInt8Bound, ++seed);
    Compare(testing::MakeDesc(2, 1, 176, 72, scheme), DType::kF32, {1, 3, 7, 17}, kInt8Bound, ++seed);
  }
}

TEST_CASE("16-bit activations on bf16 agree with the reference for every weight scheme that bf16 holds") {
  std::vector<WeightScheme> all = IntegerSchemes();
  all.push_back(Weights(ElementType::kBf16, ScaleType::kNone, {1, 0}));
  for (GroupShape group : {GroupShape{0, 0}, GroupShape{1, 0}, GroupShape{128, 128}, GroupShape{64, 32}}) {
    all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, group));
  }
  all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}));
  uint64_t seed = 1000;
  for (const WeightScheme& weights : all) {
    const QuantScheme scheme = SchemeOf(weights, ActivationScheme());
    Compare(testing::MakeDesc(3, 2, 1344, 704, scheme), DType::kBf16, {0, 1, 4, 33}, kBf16Bound, ++seed);
    Compare(testing::MakeDesc(2, 1, 176, 72, scheme), DType::kBf16, {1, 3, 7, 17}, kBf16Bound, ++seed);
  }
}

TEST_CASE("Odd sizes and every row count around a tile's border agree with the reference") {
  const ActivationScheme int8 = Int8(ActivationMode::kDynamic, 1);
  std::vector<int64_t> rows;
  for (int64_t m = 0; m <= 36; ++m) rows.push_back(m);
  for (int64_t m : {47, 48, 49, 63, 64, 65, 127, 191, 192, 193, 300, 400}) rows.push_back(m);
  uint64_t seed = 2000;
  for (const WeightScheme& weights : {Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}), Weights(ElementType::kInt8, ScaleType::kF32, {1, 0})}) {
    Compare(testing::MakeDesc(1, 1, 104, 48, SchemeOf(weights, int8)), DType::kBf16, rows, 2 * kInt8Bound, ++seed);
    Compare(testing::MakeDesc(1, 1, 104, 48, SchemeOf(weights, ActivationScheme())), DType::kBf16, rows, kBf16Bound, ++seed);
  }
  struct Size { int64_t hidden, intermediate; int32_t group; };
  for (const Size& size : {Size{2880, 320, 32}, Size{320, 2880, 128}, Size{704, 176, 64}, Size{40, 24, 0}, Size{8, 8, 0}, Size{1, 1, 0},
                           Size{7, 13, 4}, Size{100, 50, 64}, Size{33, 9, 32}}) {
    const WeightScheme int4 = Weights(ElementType::kInt4, ScaleType::kF16, {1, size.group}, true);
    const WeightScheme bf16 = Weights(ElementType::kBf16, ScaleType::kNone, {1, 0});
    // One slot a row: two of them may cancel where a row has a few features only.
    Compare(testing::MakeDesc(3, 1, size.hidden, size.intermediate, SchemeOf(int4, int8)), DType::kBf16, {1, 2, 33}, 0.02, ++seed);
    Compare(testing::MakeDesc(3, 1, size.hidden, size.intermediate, SchemeOf(int4, ActivationScheme())), DType::kBf16, {1, 2, 33}, 0.01, ++seed);
    Compare(testing::MakeDesc(3, 1, size.hidden, size.intermediate, SchemeOf(bf16, ActivationScheme())), DType::kBf16, {1, 33}, 0.01, ++seed);
  }
}

TEST_CASE("Act-order agrees with the reference, with equal and with different orders of gate and up") {
  uint64_t seed = 2500;
  for (const ActivationScheme& input : {ActivationScheme(), Int8(ActivationMode::kDynamic, 1), Int8(ActivationMode::kStatic, 0)}) {
    for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
      for (int32_t group : {32, 128}) {
        WeightScheme weights = Weights(element, ScaleType::kF16, {1, group}, group == 32);
        weights.act_order = true;
        const MoeDesc desc = testing::MakeDesc(3, 2, 640, 384, SchemeOf(weights, input));
        Compare(desc, DType::kBf16, {0, 1, 4, 33}, 0.01, ++seed);
        RandomExperts experts(desc, ++seed);
        for (ExpertWeights& expert : experts.experts()) std::reverse(expert.up.group_index.begin(), expert.up.group_index.end());
        CompareWith(desc, experts, DType::kF32, {1, 9}, 0.01, seed);
      }
    }
  }
}

TEST_CASE("Act-order groups of uneven size run all the same") {
  WeightScheme weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  weights.act_order = true;
  const MoeDesc desc = testing::MakeDesc(2, 1, 128, 64, SchemeOf(weights, ActivationScheme()));
  RandomExperts experts(desc, 2600);
  for (int32_t& group : experts.experts()[1].gate.group_index) group = group == 3 ? 0 : group;
  CompareWith(desc, experts, DType::kF32, {1, 9}, 1e-4, 2601);
}

TEST_CASE("Static and per-request int8 scales, biases, clamps and weighted inputs agree with the reference") {
  uint64_t seed = 3000;
  for (const ActivationScheme& input : {Int8(ActivationMode::kStatic, 0), Int8(ActivationMode::kDynamic, 0), Int8(ActivationMode::kDynamic, 1)}) {
    for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
      MoeDesc desc = testing::MakeDesc(4, 2, 192, 112, SchemeOf(Weights(element, ScaleType::kF32, {1, 32}), input));
      Compare(desc, DType::kBf16, {1, 6, 40}, 0.01, ++seed);
      desc.biases = true;
      desc.activation = {Activation::Kind::kSwigluOai, 1.702f, true, 1.0f};
      desc.weight_on_input = true;
      Compare(desc, DType::kF32, {1, 5}, 0.02, ++seed);
    }
  }
}

TEST_CASE("An int8 scale rounded up to a power of two is honoured") {
  ActivationScheme input = Int8(ActivationMode::kDynamic, 1);
  input.rule = ScaleRule::kAbsMaxPow2Up;
  const QuantScheme scheme = SchemeOf(Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}), input);
  Compare(testing::MakeDesc(3, 2, 192, 112, scheme), DType::kBf16, {1, 5, 40}, 0.01, 3700);
}

// Largest codes against largest codes: where an instruction saturates or a sum overflows, this is where it shows.
TEST_CASE("Extreme codes and zero points do not saturate, whatever sums overflow to on the way") {
  const WeightScheme schemes[] = {
      Weights(ElementType::kInt4, ScaleType::kF32, {1, 0}), Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}),
      Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}, true), Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}),
      Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32})};
  constexpr int64_t kRows = 40;  // the first nine go another way than all of them
  for (const WeightScheme& weights : schemes) {
    for (int fill : {0x00, 0xFF, 0x77}) {
      MoeDesc desc = testing::MakeDesc(1, 1, 2048, 64, SchemeOf(weights, Int8(ActivationMode::kStatic, 0)));
      RandomExperts experts(desc, 4000);
      for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up}) {
        LinearWeights& linear = experts.experts()[0].*projection;
        std::fill(linear.codes.begin(), linear.codes.end(), static_cast<uint8_t>(fill));
        std::fill(linear.zero_points.begin(), linear.zero_points.end(), static_cast<uint8_t>(fill == 0xFF ? 0 : 15));
        linear.input_scale = 1.0f / 128;
      }
      auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
      for (const auto& [value, rows] : {std::pair{-1.0f, int64_t{9}}, std::pair{1.0f, int64_t{9}}, std::pair{-1.0f, kRows}}) {
        RandomBatch batch(desc, rows, 1, DType::kF32, 4001);
        for (int64_t i = 0; i < rows * 2048; ++i) reinterpret_cast<float*>(batch.x.data())[i] = value;
        const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
        for (const Backend* backend : BackendsFor(desc)) {
          auto moe = backend->Prepare(desc, experts, Pool());
          INFO(backend->Name() << " " << Describe(desc.scheme) << " codes " << fill << " x " << value << " M=" << rows);
          CHECK(Judge(*RunLayer(**moe, batch.view(), DType::kF32, Pool()), *want, 2048, 0.02).passed);
        }
      }
    }
  }
}

TEST_CASE("Gate and up whose int8 scales span a row here and the request there agree with the reference") {
  uint64_t seed = 3500;
  for (const auto& [gate_rows, up_rows] : {std::pair{1, 0}, std::pair{0, 1}}) {
    QuantScheme scheme = SchemeOf(Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}), Int8(ActivationMode::kDynamic, 1));
    scheme.gate.input = Int8(ActivationMode::kDynamic, gate_rows);
    scheme.up.input = Int8(ActivationMode::kDynamic, up_rows);
    Compare(testing::MakeDesc(4, 2, 192, 112, scheme), DType::kBf16, {1, 5, 40, 200}, 0.01, ++seed);
  }
}

TEST_CASE("A scale that spans the request counts rows without an expert, where the other projection's is static too") {
  QuantScheme scheme = SchemeOf(Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}), Int8(ActivationMode::kStatic, 0));
  scheme.up.input = Int8(ActivationMode::kDynamic, 0);
  const MoeDesc desc = testing::MakeDesc(4, 2, 192, 112, scheme);
  RandomExperts experts(desc, 3600);
  RandomBatch batch(desc, 12, 2, DType::kF32, 3601);
  for (int k = 0; k < 192; ++k) reinterpret_cast<float*>(batch.x.data())[5 * 192 + k] *= 20.0f;
  batch.ids[10] = batch.ids[11] = -1;
  auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
  const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
  for (const Backend* backend : BackendsFor(desc)) {
    auto moe = backend->Prepare(desc, experts, Pool());
    INFO(backend->Name());
    CHECK(Judge(*RunLayer(**moe, batch.view(), DType::kF32, Pool()), *want, 192, 0.02).passed);
  }
}

TEST_CASE("Sums over more features than 32 bits hold are still right") {
  constexpr int64_t kHidden = 147456;  // x 128 x 128: more than 2^31
  const WeightScheme weights = Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
  const MoeDesc desc = testing::MakeDesc(1, 1, kHidden, 16, SchemeOf(weights, Int8(ActivationMode::kStatic, 0)));
  RandomExperts experts(desc, 4500);
  for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up}) {
    LinearWeights& linear = experts.experts()[0].*projection;
    std::fill(linear.codes.begin(), linear.codes.end(), uint8_t{0});  // -128
    for (size_t at = 0; at < linear.scales.size(); at += 4) *reinterpret_cast<float*>(&linear.scales[at]) = 1e-5f;
    linear.input_scale = 1.0f / 128;
  }
  auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
  RandomBatch batch(desc, 6, 1, DType::kF32, 4501);
  std::fill_n(reinterpret_cast<float*>(batch.x.data()), 6 * kHidden, -1.0f);
  const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
  for (const Backend* backend : BackendsFor(desc)) {
    auto moe = backend->Prepare(desc, experts, Pool());
    INFO(backend->Name());
    CHECK(Judge(*RunLayer(**moe, batch.view(), DType::kF32, Pool()), *want, kHidden, 0.01).passed);
  }
}

TEST_CASE("With `deterministic` a row of dot products is bitwise the same in any company") {
  std::vector<QuantScheme> schemes;
  for (const ActivationScheme& input : {ActivationScheme(), Int8(ActivationMode::kDynamic, 1)}) {
    schemes.push_back(SchemeOf(Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}, true), input));
    schemes.push_back(SchemeOf(Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}), input));
  }
  schemes.push_back(SchemeOf(Weights(ElementType::kBf16, ScaleType::kNone, {1, 0}), ActivationScheme()));
  for (const QuantScheme& scheme : schemes) {
    MoeDesc desc = testing::MakeDesc(2, 1, 1056, 112, scheme);
    desc.deterministic = true;
    RandomExperts experts(desc, 5000);
    RandomBatch all(desc, 250, 1, DType::kBf16, 5001);
    for (const Backend* backend : BackendsFor(desc)) {
      auto moe = backend->Prepare(desc, experts, Pool());
      const auto whole = RunLayer(**moe, all.view(), DType::kF32, Pool());
      REQUIRE(whole.ok());
      for (int64_t begin : {0, 117, 240}) {
        for (int64_t count : {1, 2, 3, 5, 9, 10}) {
          MoeBatch part = all.view();
          part.x = part.x.slice(begin, count);
          part.ids = part.ids.subspan(begin, count);
          part.weights = part.weights.subspan(begin, count);
          const auto some = RunLayer(**moe, part, DType::kF32, Pool());
          INFO(backend->Name() << ": " << Describe(scheme) << " rows " << begin << " + " << count);
          CHECK(std::memcmp(some->data(), whole->data() + begin * 1056, count * 1056 * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("NaN and Inf in a row stay in that row") {
  for (const ActivationScheme& input : {ActivationScheme(), Int8(ActivationMode::kDynamic, 1), Int8(ActivationMode::kStatic, 0)}) {
    const MoeDesc desc = testing::MakeDesc(3, 2, 96, 64, SchemeOf(Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}), input));
    RandomExperts experts(desc, 6000);
    RandomBatch clean(desc, 20, 2, DType::kBf16, 6001);
    RandomBatch dirty = clean;
    reinterpret_cast<uint16_t*>(dirty.x.data())[7 * 96 + 5] = 0x7FC0;  // NaN
    reinterpret_cast<uint16_t*>(dirty.x.data())[12 * 96] = 0x7F80;     // infinity
    for (const Backend* backend : BackendsFor(desc)) {
      auto moe = backend->Prepare(desc, experts, Pool());
      const auto a = RunLayer(**moe, clean.view(), DType::kF32, Pool());
      const auto b = RunLayer(**moe, dirty.view(), DType::kF32, Pool());
      INFO(backend->Name() << ": " << Describe(desc.scheme));
      CHECK(std::isnan((*b)[7 * 96]));
      for (int64_t row = 0; row < 20; ++row) {
        if (row != 7 && row != 12) CHECK(std::memcmp(a->data() + row * 96, b->data() + row * 96, 96 * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("The judge sees one wrong scale, one wrong zero point and one wrong row of codes in dot products") {
  const WeightScheme weights = Weights(ElementType::kInt4, ScaleType::kF32, {1, 32}, true);
  for (const ActivationScheme& input : {ActivationScheme(), Int8(ActivationMode::kDynamic, 1)}) {
    const MoeDesc desc = testing::MakeDesc(2, 1, 128, 96, SchemeOf(weights, input));
    RandomExperts experts(desc, 7000);
    RandomBatch batch(desc, 24, 1, DType::kBf16, 7001);
    auto reference = cpu::ReferenceBackend().Prepare(desc, experts, Pool());
    const auto want = RunLayer(**reference, batch.view(), DType::kF32, Pool());
    for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
      RandomExperts scales = experts, zeros = experts, codes = experts;
      std::vector<uint8_t>& bytes = (scales.experts()[1].*projection).scales;
      for (size_t at = 0; at < bytes.size(); at += 4) *reinterpret_cast<float*>(&bytes[at]) *= 0.5f;
      for (uint8_t& zero : (zeros.experts()[1].*projection).zero_points) zero = static_cast<uint8_t>(zero ^ 1);
      std::fill_n((codes.experts()[1].*projection).codes.begin(), 64, uint8_t{0});
      for (const Backend* backend : BackendsFor(desc)) {
        INFO(backend->Name() << ": " << Describe(desc.scheme));
        const auto run = [&](const RandomExperts& with) {
          return Judge(*RunLayer(**backend->Prepare(desc, with, Pool()), batch.view(), DType::kF32, Pool()), *want, 128, kInt8Bound).passed;
        };
        CHECK(run(experts));
        CHECK_FALSE(run(scales));
        CHECK_FALSE(run(zeros));
        CHECK_FALSE(run(codes));
      }
    }
  }
}

}  // namespace moed
