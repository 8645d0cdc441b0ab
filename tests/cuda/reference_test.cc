// The GPU's reference against the CPU's: the same weights, the same codes, double sums in another order.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/activation_quant.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/reference.h"
#include "tests/cuda/gpu.h"
#include "tests/support/batched_rows.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::HaveGpu;
using testing::Judge;
using testing::MakeDesc;
using testing::Pool;
using testing::RandomBatch;
using testing::RandomExperts;
using testing::RunLayer;
using testing::Skip;
using testing::Weights;

// Nothing but the last bits of doubles differs, which now and then turn the last bit of a float32; sums in float32 would be off by
// more than this.
constexpr double kBound = 2e-8;
// Where h is quantized, those bits may move a value that sits on a border of rounding to float32.
constexpr double kQuantizedBound = 1e-5;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Layers {
  std::unique_ptr<PreparedMoe> gpu, cpu;
};

Layers PrepareBoth(const MoeDesc& desc, const ExpertReader& experts) {
  const Backend& backend = cuda::ReferenceBackend();
  REQUIRE(backend.Check(desc, testing::ThisGpu()).ok());
  Layers layers = {testing::Prepare(backend, desc, experts), testing::Prepare(cpu::ReferenceBackend(), desc, experts)};
  CHECK(layers.gpu->ResidentBytes() == backend.PreparedBytes(desc));
  CHECK(layers.gpu->ExecutedScheme() == desc.scheme);
  return layers;
}

void CompareCall(const Layers& layers, const MoeDesc& desc, const MoeBatch& batch, DType out, double bound) {
  const auto got = RunLayer(*layers.gpu, batch, out, Pool());
  const auto want = RunLayer(*layers.cpu, batch, out, Pool());
  INFO(got.status().ToString());
  REQUIRE((got.ok() && want.ok()));
  const testing::Judgement judgement = Judge(*got, *want, desc.hidden, bound);
  INFO(Describe(desc.scheme) << " H=" << desc.hidden << " I=" << desc.intermediate << " M=" << batch.x.rows << ": "
                             << judgement.reason);
  CHECK(judgement.passed);
}

// Both formats, for each number of rows.
void Compare(MoeDesc desc, const std::vector<int64_t>& rows, double bound, uint64_t seed) {
  desc.max_tokens_per_expert = std::max<int64_t>(1, *std::max_element(rows.begin(), rows.end()));
  const RandomExperts experts(desc, seed);
  const Layers layers = PrepareBoth(desc, experts);
  for (int64_t count : rows) {
    const RandomBatch batch(desc, count, desc.top_k, DType::kF32, seed + count);
    CompareCall(layers, desc, batch.view(), DType::kF32, bound);
    if (desc.weight_on_input) continue;
    testing::CompareBatched(*layers.gpu, desc, batch, *RunLayer(*layers.gpu, batch.view(), DType::kF32, Pool()));
  }
}

LinearScheme Int8Linear(const ActivationScheme& input) {
  LinearScheme linear;
  linear.weights = Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
  linear.input = input;
  return linear;
}

MoeDesc PlainDesc(int experts, int top_k, int64_t hidden, int64_t intermediate) {
  return MakeDesc(experts, top_k, hidden, intermediate, testing::PlainScheme(ElementType::kBf16));
}

// A call with each tensor on the host or on the GPU, there at an odd address where `offset` is odd.
std::vector<uint8_t> RunPlaced(const PreparedMoe& moe, MoeBatch batch, DType out_dtype, Place x, Place y, size_t offset) {
  const auto* bytes = static_cast<const uint8_t*>(batch.x.data);
  MutableTensorView out = {nullptr, out_dtype, batch.x.rows, batch.x.cols, y};
  std::vector<uint8_t> result(out.bytes(), 0xFF);
  const testing::DeviceBytes x_there({bytes, batch.x.bytes()}, offset), y_there(result, offset);
  if (x == Place::kDevice) batch.x.data = x_there.data();
  batch.x.place = x;
  out.data = y == Place::kDevice ? y_there.data() : result.data();
  ExecContext context;
  REQUIRE(moe.Run(batch, out, context).ok());
  return y == Place::kDevice ? y_there.Read() : result;
}

}  // namespace

TEST_CASE("The GPU's reference agrees with the CPU's on every weight scheme, odd sizes included") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 1;
  for (const WeightScheme& scheme : testing::WeightSchemes()) {
    LinearScheme linear;
    linear.weights = scheme;
    Compare(MakeDesc(3, 2, 96, 160, UniformScheme(linear)), {0, 1, 2, 33}, kBound, ++seed);
    if (scheme.act_order) continue;  // its shuffled groups need an even split
    Compare(MakeDesc(2, 1, 176, 72, UniformScheme(linear)), {1, 33}, kBound, ++seed);
    Compare(MakeDesc(5, 3, 64, 48, UniformScheme(linear)), {2, 33}, kBound, ++seed);
  }
}

TEST_CASE("The GPU's reference agrees with the CPU's where gate, up and down have schemes of their own") {
  if (!HaveGpu()) return Skip("no GPU");
  QuantScheme scheme;
  scheme.gate.weights = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  scheme.up.weights = Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0});
  scheme.up.input = testing::Int8(ActivationMode::kDynamic, 1);
  scheme.down.weights = Weights(ElementType::kF32, ScaleType::kNone, {1, 0});
  Compare(MakeDesc(3, 2, 96, 64, scheme), {0, 1, 7}, kBound, 500);
}

TEST_CASE("The GPU's reference quantizes activations to the CPU's codes by every rule") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 1000;
  for (const ActivationScheme& input : testing::InputSchemes()) {
    const QuantScheme scheme = UniformScheme(Int8Linear(input));
    Compare(MakeDesc(4, 2, 96, 160, scheme), {0, 1, 2, 33}, kQuantizedBound, ++seed);
    Compare(MakeDesc(3, 2, 176, 72, scheme), {2, 33}, kQuantizedBound, ++seed);
    MoeDesc desc = MakeDesc(4, 2, 64, 48, scheme);
    desc.biases = true;
    desc.activation = {.kind = Activation::Kind::kSwigluOai, .clamped = true, .limit = 1.0f};
    Compare(desc, {1, 33}, kQuantizedBound, ++seed);
  }
}

TEST_CASE("The GPU's reference quantizes subnormal, tiny and large hidden states, and ties, to the CPU's codes") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const ActivationScheme& input : testing::InputSchemes()) {
    if (SpansRows(input)) continue;  // one scale would hide all rows but the largest
    QuantScheme scheme = testing::PlainScheme(ElementType::kF32);
    scheme.gate.input = scheme.up.input = input;
    MoeDesc desc = MakeDesc(1, 1, 96, 24, scheme);
    desc.activation.kind = Activation::Kind::kSwigluOai;  // near gate / 2 for small rows: they stay seen
    RandomBatch batch(desc, 7, 1, DType::kF32, 1500);
    const float factors[] = {0x1p-148f, 0x1p-140f, 0x1p-132f, 0x1p-126f, 0x1p-110f, 1.0f, 0x1p30f};
    std::vector<float> x(7 * 96);
    std::memcpy(x.data(), batch.x.data(), batch.x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] *= factors[i / 96];
    for (size_t c = 0; c < 96; ++c) x[5 * 96 + c] = c % 32 == 0 ? 127.0f : static_cast<float>(c) / 2;
    std::memcpy(batch.x.data(), x.data(), batch.x.size());
    for (float lift : {0x1p110f, 1.0f}) {  // lifts results of the first rows out of float32's subnormals
      RandomExperts experts(desc, 1501);
      std::vector<uint8_t>& down = experts.experts()[0].down.codes;
      std::vector<float> weights(down.size() / sizeof(float));
      std::memcpy(weights.data(), down.data(), down.size());
      for (float& weight : weights) weight *= lift;
      std::memcpy(down.data(), weights.data(), down.size());
      MoeBatch part = batch.view();
      part.x = lift == 1.0f ? part.x.slice(4, 3) : part.x.slice(0, 5);
      part.ids = part.ids.first(part.x.rows);
      part.weights = part.weights.first(part.x.rows);
      CompareCall(PrepareBoth(desc, experts), desc, part, DType::kF32, kBound);
    }
  }
}

TEST_CASE("The GPU's reference agrees with the CPU's on every activation, with biases and limits") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2000;
  using Kind = Activation::Kind;
  for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kSwigluOai}) {
    for (bool clamped : {false, true}) {
      MoeDesc desc = PlainDesc(3, 2, 176, 72);
      desc.biases = true;
      desc.activation = {.kind = kind, .clamped = clamped, .limit = 0.5f};
      Compare(desc, {1, 9}, kBound, ++seed);
    }
  }
}

TEST_CASE("The router's weight on the input is applied before quantization, a scale that spans rows included") {
  if (!HaveGpu()) return Skip("no GPU");
  std::vector<QuantScheme> schemes = {testing::PlainScheme(ElementType::kF16)};
  for (int32_t rows : {0, 1}) schemes.push_back(UniformScheme(Int8Linear(testing::Int8(ActivationMode::kDynamic, rows))));
  for (const QuantScheme& scheme : schemes) {
    MoeDesc desc = MakeDesc(4, 2, 96, 160, scheme);
    desc.weight_on_input = true;
    Compare(desc, {0, 1, 2, 33}, kQuantizedBound, 3000);
  }
}

TEST_CASE("Hidden states and results of every type lie on the host or on the GPU, at any address") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = PlainDesc(3, 2, 64, 48);
  const RandomExperts experts(desc, 4000);
  const Layers layers = PrepareBoth(desc, experts);
  for (DType in : {DType::kF32, DType::kBf16, DType::kF16}) {
    const RandomBatch batch(desc, 5, 2, in, 4001);
    for (DType out : {DType::kF32, DType::kBf16, DType::kF16}) {
      CompareCall(layers, desc, batch.view(), out, kBound);
      const auto want = RunPlaced(*layers.gpu, batch.view(), out, Place::kHost, Place::kHost, 0);
      for (size_t offset : {0, 1}) {
        CHECK(RunPlaced(*layers.gpu, batch.view(), out, Place::kDevice, Place::kHost, offset) == want);
        CHECK(RunPlaced(*layers.gpu, batch.view(), out, Place::kHost, Place::kDevice, offset) == want);
        CHECK(RunPlaced(*layers.gpu, batch.view(), out, Place::kDevice, Place::kDevice, offset) == want);
      }
    }
  }
}

TEST_CASE("Batched experts agree with the CPU's reference, on the GPU too, and padding stays as it was") {
  if (!HaveGpu()) return Skip("no GPU");
  for (int32_t rows : {0, 1}) {  // of a scale: all, or one
    MoeDesc desc = MakeDesc(4, 2, 96, 72, UniformScheme(Int8Linear(testing::Int8(ActivationMode::kDynamic, rows))));
    desc.max_tokens_per_expert = 70;
    const RandomExperts experts(desc, 5000);
    const Layers layers = PrepareBoth(desc, experts);
    for (const std::vector<int32_t>& counts : {std::vector<int32_t>{3, 0, 70, 1}, {0, 0, 0, 0}}) {
      const testing::BatchedRows batch(desc, counts, DType::kBf16, 5001);
      const auto got = RunBatchedLayer(*layers.gpu, batch, DType::kF32, Pool());
      const auto want = RunBatchedLayer(*layers.cpu, batch, DType::kF32, Pool());
      REQUIRE((got.ok() && want.ok()));
      CHECK(got->intact);
      CHECK(Judge(got->y, want->y, desc.hidden, kQuantizedBound).passed);

      const std::vector<uint8_t> pattern(4 * desc.max_tokens_per_expert * desc.hidden * sizeof(float), 0xA5);
      const testing::DeviceBytes x(batch.x), y(pattern);
      BatchedExperts there = batch.view();
      there.x.data = x.data();
      there.x.place = Place::kDevice;
      ExecContext context;
      REQUIRE(layers.gpu->RunBatched(there, {y.data(), DType::kF32, there.x.rows, desc.hidden, Place::kDevice}, context).ok());
      std::vector<uint8_t> expected = pattern;
      const size_t row_bytes = desc.hidden * sizeof(float);
      for (size_t e = 0, at = 0; e < counts.size(); at += counts[e++]) {
        std::memcpy(expected.data() + e * desc.max_tokens_per_expert * row_bytes, got->y.data() + at * desc.hidden,
                    counts[e] * row_bytes);
      }
      CHECK(y.Read() == expected);
    }
  }
}

TEST_CASE("Ids without an expert add nothing, each of several equal ids counts, and rows without experts are zero") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = PlainDesc(3, 2, 96, 72);
  const RandomExperts experts(desc, 6000);
  const Layers layers = PrepareBoth(desc, experts);
  RandomBatch batch(desc, 4, 3, DType::kF32, 6001);
  batch.ids = {-1, 2, 2, /**/ -1, -1, -1, /**/ 1, 1, 1, /**/ 0, -1, 2};
  batch.weights[0] = batch.weights[3] = batch.weights[10] = kNaN;
  CompareCall(layers, desc, batch.view(), DType::kF32, kBound);
  const auto got = RunLayer(*layers.gpu, batch.view(), DType::kF32, Pool());
  CHECK(std::all_of(got->begin() + 96, got->begin() + 192, [](float y) { return y == 0.0f; }));
}

TEST_CASE("A NaN spoils its own row, and every row where one scale spans them, also from a row without experts") {
  if (!HaveGpu()) return Skip("no GPU");
  for (int32_t rows : {0, 1}) {
    const MoeDesc desc = MakeDesc(2, 1, 64, 48, UniformScheme(Int8Linear(testing::Int8(ActivationMode::kDynamic, rows))));
    const RandomExperts experts(desc, 7000);
    const Layers layers = PrepareBoth(desc, experts);
    RandomBatch batch(desc, 3, 1, DType::kF32, 7001);
    const auto before = RunLayer(*layers.gpu, batch.view(), DType::kF32, Pool());
    batch.ids[1] = -1;
    for (float bad : {kNaN, HUGE_VALF}) {
      std::memcpy(batch.x.data() + 64 * sizeof(float), &bad, sizeof(bad));
      CompareCall(layers, desc, batch.view(), DType::kF32, kQuantizedBound);
      const auto after = RunLayer(*layers.gpu, batch.view(), DType::kF32, Pool());
      const bool same = std::memcmp(before->data(), after->data(), 64 * sizeof(float)) == 0;
      CHECK(same == (rows == 1));
      CHECK(std::isnan((*after)[0]) == (rows == 0));
    }
  }
}

TEST_CASE("Rows of a call of several chunks are bitwise what they are alone") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = PlainDesc(3, 2, 64, 48);
  const RandomExperts experts(desc, 8000);
  const Layers layers = PrepareBoth(desc, experts);
  const RandomBatch batch(desc, 1100, 2, DType::kF32, 8001);
  CompareCall(layers, desc, batch.view(), DType::kF32, kBound);
  const auto all = RunLayer(*layers.gpu, batch.view(), DType::kF32, Pool());
  for (int64_t row : {0, 1023, 1024, 1099}) {
    MoeBatch alone = batch.view();
    alone.x = alone.x.slice(row, 1);
    alone.ids = alone.ids.subspan(row * 2, 2);
    alone.weights = alone.weights.subspan(row * 2, 2);
    const auto one = RunLayer(*layers.gpu, alone, DType::kF32, Pool());
    CHECK(std::memcmp(one->data(), all->data() + row * 64, 64 * sizeof(float)) == 0);
  }
}

TEST_CASE("A call that breaks the contract is refused and writes nothing") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = PlainDesc(3, 2, 64, 48);
  const RandomExperts experts(desc, 9000);
  const auto moe = testing::Prepare(cuda::ReferenceBackend(), desc, experts);
  RandomBatch batch(desc, 2, 2, DType::kF32, 9001);
  batch.ids[3] = 3;
  std::vector<float> out(128, 7.0f);
  ExecContext context;
  const absl::Status status = moe->Run(batch.view(), {out.data(), DType::kF32, 2, 64}, context);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::all_of(out.begin(), out.end(), [](float y) { return y == 7.0f; }));
  const testing::BatchedRows rows(PlainDesc(3, 2, 64, 48), {0, 0, 0}, DType::kF32, 9002);
  CHECK(moe->RunBatched(rows.view(), {out.data(), DType::kF32, 0, 64}, context).code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("Halved scales of one projection of one expert are found, and so is a single one") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = MakeDesc(3, 1, 96, 160, testing::Int4Scheme(32, ScaleType::kF32));
  const RandomExperts experts(desc, 10000);
  const RandomBatch batch(desc, 16, 1, DType::kF32, 10001);
  REQUIRE(std::count(batch.ids.begin(), batch.ids.end(), 1) > 0);
  const auto reference = testing::Prepare(cpu::ReferenceBackend(), desc, experts);
  const auto want = RunLayer(*reference, batch.view(), DType::kF32, Pool());
  for (LinearWeights ExpertWeights::*projection : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
    for (bool single : {false, true}) {
      RandomExperts wrong = experts;
      std::vector<uint8_t>& scales = (wrong.experts()[1].*projection).scales;
      for (size_t at = 0; at < (single ? 1 : scales.size() / sizeof(float)); ++at) {
        float scale;
        std::memcpy(&scale, &scales[at * sizeof(float)], sizeof(scale));
        scale *= 0.5f;
        std::memcpy(&scales[at * sizeof(float)], &scale, sizeof(scale));
      }
      const auto moe = testing::Prepare(cuda::ReferenceBackend(), desc, wrong);
      const auto got = RunLayer(*moe, batch.view(), DType::kF32, Pool());
      REQUIRE(got.ok());
      CHECK_FALSE(Judge(*got, *want, desc.hidden, single ? 1e-4 : 0.1).passed);
    }
  }
}

}  // namespace moed
