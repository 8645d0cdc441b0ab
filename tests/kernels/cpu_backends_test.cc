// Every CPU backend against the reference: schemes, shapes, row counts, activations, dtypes, and the row rule.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/random_layer.h"

namespace moed {
namespace {

using testing::BackendsFor;
using testing::Judge;
using testing::Pool;
using testing::Prepare;
using testing::RandomBatch;
using testing::RandomExperts;
using testing::RunLayer;

// The CPU backends compute in float32 from exact weights, so they are held far below the bounds of the schemes.
constexpr double kF32Bound = 2e-5;
constexpr double kBf16Bound = 4e-3;        // h in bf16
constexpr double kBf16OutputBound = 5e-3;  // and one rounding of the result
constexpr double kF16OutputBound = 6e-4;

// Every runnable backend against the reference on one layer, for several row counts; float32 in and out.
void CompareAll(const MoeDesc& desc, const std::vector<int64_t>& row_counts, uint64_t seed) {
  RandomExperts experts(desc, seed);
  std::unique_ptr<PreparedMoe> reference = Prepare(cpu::ReferenceBackend(), desc, experts);
  std::vector<std::unique_ptr<PreparedMoe>> prepared;
  for (const Backend* backend : BackendsFor(desc)) {
    prepared.push_back(Prepare(*backend, desc, experts));
    CHECK(prepared.back()->ResidentBytes() == backend->PreparedBytes(desc));
    CHECK(prepared.back()->ExecutedScheme() == desc.scheme);
  }
  for (int64_t rows : row_counts) {
    RandomBatch batch(desc, rows, desc.top_k, DType::kF32, seed + rows);
    absl::StatusOr<std::vector<float>> want = RunLayer(*reference, batch.view(), DType::kF32, Pool());
    REQUIRE(want.ok());
    for (const auto& moe : prepared) {
      absl::StatusOr<std::vector<float>> got = RunLayer(*moe, batch.view(), DType::kF32, Pool());
      REQUIRE(got.ok());
      const testing::Judgement judgement = Judge(*got, *want, desc.hidden, kF32Bound);
      INFO(Describe(desc.scheme) << " H=" << desc.hidden << " I=" << desc.intermediate << " M=" << rows << ": " << judgement.reason);
      CHECK(judgement.passed);
    }
  }
}

}  // namespace

TEST_CASE("Int4 of every group size agrees with the reference") {
  const int32_t groups[] = {32, 64, 128, 256, 0, 16, 20, 12, 1000};
  uint64_t seed = 1;
  for (int32_t group : groups) {
    for (ScaleType scale : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
      CompareAll(testing::MakeDesc(5, 2, 256, 192, testing::Int4Scheme(group, scale)), {0, 1, 2, 33}, ++seed);
    }
  }
}

TEST_CASE("Unquantized weights of every type agree with the reference") {
  uint64_t seed = 100;
  for (ElementType element : {ElementType::kBf16, ElementType::kF16, ElementType::kF32}) {
    CompareAll(testing::MakeDesc(4, 2, 320, 176, testing::PlainScheme(element)), {0, 1, 3, 33}, ++seed);
  }
}

TEST_CASE("Odd sizes agree with the reference, short last groups included") {
  struct Size { int64_t hidden, intermediate; int32_t group; };
  const Size sizes[] = {{176, 320, 32}, {320, 704, 128}, {704, 176, 64}, {1344, 72, 32}, {2880, 176, 128}, {40, 2880, 0},
                        {1, 1, 0}, {7, 13, 4}, {33, 9, 32}, {100, 50, 64}};
  uint64_t seed = 200;
  for (const Size& size : sizes) {
    CompareAll(testing::MakeDesc(3, 2, size.hidden, size.intermediate, testing::Int4Scheme(size.group, ScaleType::kF16)),
               {1, 2, 33}, ++seed);
    CompareAll(testing::MakeDesc(3, 2, size.hidden, size.intermediate, testing::PlainScheme(ElementType::kBf16)), {1, 5},
               ++seed);
  }
}

TEST_CASE("Every row count around the tile and block borders agrees with the reference") {
  std::vector<int64_t> rows;
  for (int64_t m = 0; m <= 40; ++m) rows.push_back(m);
  for (int64_t m : {63, 64, 65, 127, 191, 192, 193, 400}) rows.push_back(m);
  MoeDesc desc = testing::MakeDesc(1, 1, 64, 48, testing::Int4Scheme(32, ScaleType::kF16));
  CompareAll(desc, rows, 300);
  CompareAll(testing::MakeDesc(1, 1, 48, 64, testing::PlainScheme(ElementType::kF16)), rows, 301);
}

TEST_CASE("Activations, clamps and biases agree with the reference") {
  uint64_t seed = 400;
  for (Activation::Kind kind :
       {Activation::Kind::kSilu, Activation::Kind::kGelu, Activation::Kind::kGeluTanh, Activation::Kind::kSwigluOai}) {
    for (bool clamped : {false, true}) {
      MoeDesc desc = testing::MakeDesc(4, 2, 96, 80, testing::Int4Scheme(32, ScaleType::kBf16));
      desc.activation.kind = kind;
      desc.activation.clamped = clamped;
      desc.activation.limit = 0.7f;
      desc.biases = true;
      CompareAll(desc, {1, 9}, ++seed);
    }
  }
}

TEST_CASE("A weight on the input scales each copy of the row by its own slot") {
  MoeDesc desc = testing::MakeDesc(4, 3, 96, 80, testing::Int4Scheme(32, ScaleType::kF16));
  desc.weight_on_input = true;
  CompareAll(desc, {1, 2, 17}, 500);
}

TEST_CASE("Inputs and outputs of 16 bits are rounded once") {
  MoeDesc desc = testing::MakeDesc(4, 2, 200, 96, testing::Int4Scheme(32, ScaleType::kF16));
  RandomExperts experts(desc, 600);
  std::unique_ptr<PreparedMoe> reference = Prepare(cpu::ReferenceBackend(), desc, experts);
  for (const Backend* backend : BackendsFor(desc)) {
    std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    for (DType dtype : {DType::kBf16, DType::kF16}) {
      RandomBatch batch(desc, 11, 2, dtype, 601);
      const auto want = RunLayer(*reference, batch.view(), DType::kF32, Pool());
      const auto wide = RunLayer(*moe, batch.view(), DType::kF32, Pool());
      const auto narrow = RunLayer(*moe, batch.view(), dtype, Pool());
      REQUIRE((want.ok() && wide.ok() && narrow.ok()));
      // Backends with bf16 products round h to bf16; inputs of f16 and f32 meet float32 arithmetic everywhere.
      CHECK(Judge(*wide, *want, desc.hidden, dtype == DType::kBf16 ? kBf16Bound : kF32Bound).passed);
      CHECK(Judge(*narrow, *want, desc.hidden, dtype == DType::kBf16 ? kBf16OutputBound : kF16OutputBound).passed);
    }
  }
}

TEST_CASE("Slots without an expert contribute nothing and their weights are ignored") {
  MoeDesc desc = testing::MakeDesc(6, 2, 64, 48, testing::Int4Scheme(32, ScaleType::kF16));
  RandomExperts experts(desc, 700);
  for (const Backend* backend : BackendsFor(desc)) {
    std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    RandomBatch batch(desc, 4, 2, DType::kF32, 701);
    batch.ids = {-1, -1, 3, -1, -1, 0, 2, 5};
    batch.weights = {1.0f, NAN, 0.5f, NAN, NAN, 2.0f, 0.25f, 0.75f};
    const auto got = RunLayer(*moe, batch.view(), DType::kF32, Pool());
    REQUIRE(got.ok());
    for (int64_t c = 0; c < 64; ++c) CHECK((*got)[c] == 0.0f);
    RandomBatch single = batch;
    single.top_k = 1;
    single.ids = {5, 3, 0, 2};
    single.weights = {1.0f, 0.5f, 2.0f, 0.25f};
    const auto one = RunLayer(*moe, single.view(), DType::kF32, Pool());
    REQUIRE(one.ok());
    CHECK(std::memcmp(got->data() + 64, one->data() + 64, 2 * 64 * sizeof(float)) == 0);
  }
}

TEST_CASE("An expert named twice in a row counts once per slot") {
  MoeDesc desc = testing::MakeDesc(5, 2, 64, 48, testing::PlainScheme(ElementType::kBf16));
  RandomExperts experts(desc, 800);
  for (const Backend* backend : BackendsFor(desc)) {
    std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    RandomBatch twice(desc, 1, 2, DType::kF32, 801);
    twice.ids = {2, 2};
    twice.weights = {0.3f, 0.7f};
    RandomBatch once = twice;
    once.top_k = 1;
    once.ids = {2};
    once.weights = {1.0f};
    const auto a = RunLayer(*moe, twice.view(), DType::kF32, Pool());
    const auto b = RunLayer(*moe, once.view(), DType::kF32, Pool());
    REQUIRE((a.ok() && b.ok()));
    CHECK(Judge(*a, *b, 64, 1e-6).passed);
  }
}

TEST_CASE("With `deterministic` a row's result is bitwise the same alone, in any batch and at any position") {
  for (const QuantScheme& scheme : {testing::Int4Scheme(32, ScaleType::kF16), testing::PlainScheme(ElementType::kBf16)}) {
    MoeDesc desc = testing::MakeDesc(3, 2, 160, 112, scheme);
    desc.deterministic = true;
    RandomExperts experts(desc, 900);
    for (const Backend* backend : BackendsFor(desc)) {
      std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
      RandomBatch all(desc, 300, 2, DType::kBf16, 901);
      const auto whole = RunLayer(*moe, all.view(), DType::kF32, Pool());
      REQUIRE(whole.ok());
      for (int64_t begin : {0, 1, 150, 299}) {
        for (int64_t count : {1, 2, 3, 5, 40}) {
          if (begin + count > 300) continue;
          MoeBatch part = all.view();
          part.x = part.x.slice(begin, count);
          part.ids = part.ids.subspan(begin * 2, count * 2);
          part.weights = part.weights.subspan(begin * 2, count * 2);
          const auto some = RunLayer(*moe, part, DType::kF32, Pool());
          REQUIRE(some.ok());
          CHECK(std::memcmp(some->data(), whole->data() + begin * 160, count * 160 * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("NaN and Inf in one row leave every other row bitwise as it was") {
  MoeDesc desc = testing::MakeDesc(3, 2, 96, 64, testing::Int4Scheme(32, ScaleType::kF16));
  RandomExperts experts(desc, 1000);
  for (const Backend* backend : BackendsFor(desc)) {
    std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    RandomBatch clean(desc, 20, 2, DType::kF32, 1001);
    RandomBatch dirty = clean;
    reinterpret_cast<float*>(dirty.x.data())[7 * 96 + 5] = NAN;
    reinterpret_cast<float*>(dirty.x.data())[12 * 96] = INFINITY;
    const auto a = RunLayer(*moe, clean.view(), DType::kF32, Pool());
    const auto b = RunLayer(*moe, dirty.view(), DType::kF32, Pool());
    REQUIRE((a.ok() && b.ok()));
    CHECK(std::isnan((*b)[7 * 96]));
    for (int64_t row = 0; row < 20; ++row) {
      if (row == 7 || row == 12) continue;
      CHECK(std::memcmp(a->data() + row * 96, b->data() + row * 96, 96 * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("A call that breaks the contract is refused with the numbers and writes nothing") {
  MoeDesc desc = testing::MakeDesc(4, 2, 32, 32, testing::PlainScheme(ElementType::kBf16));
  desc.max_tokens = 8;
  RandomExperts experts(desc, 1100);
  std::vector<const Backend*> backends = BackendsFor(desc);
  backends.push_back(&cpu::ReferenceBackend());
  for (const Backend* backend : backends) {
    std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    RandomBatch good(desc, 3, 2, DType::kF32, 1101);
    const auto refused = [&](const MoeBatch& batch, const std::string& text) {
      const auto result = RunLayer(*moe, batch, DType::kF32, Pool());
      REQUIRE(!result.ok());
      CHECK(result.status().code() == absl::StatusCode::kInvalidArgument);
      CHECK(std::string(result.status().message()).find(text) != std::string::npos);
    };
    RandomBatch bad = good;
    bad.ids[3] = 4;
    refused(bad.view(), "row 1, slot 1: got 4, want -1 to 3");
    bad.ids[3] = -2;
    refused(bad.view(), "got -2");
    refused(RandomBatch(desc, 9, 2, DType::kF32, 1102).view(), "9 rows");
    MoeBatch wide = good.view();
    wide.x.cols = 31;
    refused(wide, "31 columns, want H = 32");
    MoeBatch short_ids = good.view();
    short_ids.ids = short_ids.ids.subspan(1);
    refused(short_ids, "5 ids");
    CHECK(RunLayer(*moe, good.view(), DType::kF32, Pool()).ok());
  }
}

TEST_CASE("The judge sees a halved projection, and at the same rule a single halved scale") {
  MoeDesc desc = testing::MakeDesc(3, 2, 128, 96, testing::Int4Scheme(32, ScaleType::kF32));
  RandomExperts experts(desc, 1200);
  std::unique_ptr<PreparedMoe> reference = Prepare(cpu::ReferenceBackend(), desc, experts);
  RandomBatch batch(desc, 24, 2, DType::kF32, 1201);
  const auto want = RunLayer(*reference, batch.view(), DType::kF32, Pool());
  REQUIRE(want.ok());
  for (const Backend* backend : BackendsFor(desc)) {
    CHECK(Judge(*RunLayer(*Prepare(*backend, desc, experts), batch.view(), DType::kF32, Pool()), *want, 128, 1e-4).passed);
    for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
      RandomExperts all = experts, single = experts;
      std::vector<uint8_t>& scales = (all.experts()[1].*projection).scales;
      for (size_t at = 0; at < scales.size(); at += 4) *reinterpret_cast<float*>(&scales[at]) *= 0.5f;
      *reinterpret_cast<float*>((single.experts()[1].*projection).scales.data()) *= 0.5f;
      CHECK_FALSE(Judge(*RunLayer(*Prepare(*backend, desc, all), batch.view(), DType::kF32, Pool()), *want, 128, 0.01).passed);
      CHECK_FALSE(Judge(*RunLayer(*Prepare(*backend, desc, single), batch.view(), DType::kF32, Pool()), *want, 128, 1e-4).passed);
    }
  }
}

TEST_CASE("The judge fails NaN, non-zero where zero is due, and sizes that do not fit") {
  const std::vector<float> ref = {1, 2, 0, 0};
  CHECK(Judge(std::vector<float>{1, 2, 0, 0}, ref, 2, 0.0).passed);
  CHECK_FALSE(Judge(std::vector<float>{1, NAN, 0, 0}, ref, 2, 1e9).passed);
  CHECK_FALSE(Judge(std::vector<float>{1, 2, 0, 1e-30f}, ref, 2, 1e9).passed);
  CHECK_FALSE(Judge(std::vector<float>{1, 2}, ref, 2, 1e9).passed);
  CHECK_FALSE(Judge(std::vector<float>{1, 2.1f, 0, 0}, ref, 2, 0.01).passed);
}

TEST_CASE("Verdicts name every reason with its numbers") {
  MoeDesc desc = testing::MakeDesc(4, 2, 64, 64, testing::Int4Scheme(32, ScaleType::kF16));
  desc.scheme.gate.weights.act_order = true;
  desc.scheme.down.weights.element = ElementType::kFp6E2m3;
  DeviceInfo old;  // no instruction-set extension at all
  for (const Backend* backend : cpu::CpuBackends()) {
    const Verdict verdict = backend->Check(desc, old);
    if (backend->Name() == "cpu_generic") {
      CHECK(verdict.ok());  // it runs every scheme
      continue;
    }
    REQUIRE(verdict.reasons.size() >= 3);  // the missing flags, fp6, gate against up; some want other activations
    CHECK(verdict.reasons[0].code == "isa_missing");
    CHECK(verdict.reasons[1].text.find("down: weights are fp6_e2m3") != std::string::npos);
    CHECK(verdict.reasons[2].text.find("differ") != std::string::npos);
  }
  desc.scheme.down.input.mode = ActivationMode::kDynamic;
  desc.scheme.down.input.element = ElementType::kFp6E2m3;
  CHECK(cpu::CpuBackends().back()->Check(desc, old).reasons.size() == 1);
  CHECK(cpu::ReferenceBackend().Check(desc, old).reasons.size() == 1);
  MoeDesc large = testing::MakeDesc(1000, 2, 4096, 4096, testing::Int4Scheme(32, ScaleType::kF16));
  DeviceInfo small;
  small.memory_bytes = 1 << 20;
  const Verdict verdict = cpu::CpuBackends().back()->Check(large, small);
  REQUIRE(verdict.reasons.size() == 1);
  CHECK(verdict.reasons[0].code == "memory");
  CHECK(verdict.reasons[0].text.find("1048576") != std::string::npos);
}

}  // namespace moed
