// cuda_wna16 against the judge on the GPU: wgmma's products and those for few rows, with every kind of codes, group
// and size of tile, and where a call falls back on the products of cuda_generic.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/layer_plan.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::HaveGpu;
using testing::JudgedLayer;
using testing::MakeDesc;
using testing::RandomBatch;
using testing::RunOnGpu;
using testing::Skip;
using testing::Weights;

constexpr double kBound = 0.01;

const Backend& Wna16() { return *cuda::CudaBackends().front(); }

MoeDesc Desc(int experts, int top_k, int64_t hidden, int64_t intermediate, const WeightScheme& weights) {
  LinearScheme linear;
  linear.weights = weights;
  MoeDesc desc = MakeDesc(experts, top_k, hidden, intermediate, UniformScheme(linear));
  desc.max_tokens = 2048;
  return desc;
}

std::vector<WeightScheme> Schemes() {
  std::vector<WeightScheme> all;
  for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
    for (GroupShape group :
         {GroupShape{1, 16}, GroupShape{1, 32}, GroupShape{1, 64}, GroupShape{1, 128}, GroupShape{1, 0}, GroupShape{1, 24}}) {
      all.push_back(Weights(element, ScaleType::kF16, group));
    }
    for (GroupShape group : {GroupShape{1, 16}, GroupShape{1, 32}, GroupShape{1, 128}, GroupShape{1, 0}})
      all.push_back(Weights(element, ScaleType::kF16, group, true));
    for (bool zero_points : {false, true}) {
      all.push_back(Weights(element, ScaleType::kBf16, {1, 32}, zero_points));
      all.back().act_order = true;
    }
  }
  all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, {128, 128}));
  all.push_back(Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0}));
  all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}));
  all.push_back(Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}));
  all.back().global_scale = GlobalScale::kMultiplier;
  all.push_back(Weights(ElementType::kBf16, ScaleType::kNone, {}));
  return all;
}

}  // namespace

TEST_CASE("cuda_wna16: every scheme agrees with the judge at every number of rows") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5000;
  for (const WeightScheme& scheme : Schemes()) {
    const JudgedLayer layer(Desc(3, 2, 192, 320, scheme), ++seed, Wna16());
    for (int64_t rows : {0, 1, 2, 7, 8, 9, 16, 17, 18, 31, 33, 48, 64, 96, 127, 129, 300, 1000, 2048})
      layer.Compare(rows, DType::kBf16, kBound, seed + 1);
    for (int64_t rows : {1, 100}) layer.Compare(rows, DType::kF32, 2e-5, seed + 2);
    layer.Compare(200, DType::kF16, kBound, seed + 3);
  }
}

TEST_CASE("cuda_wna16: odd shapes agree with the judge") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5200;
  for (const auto& [hidden, intermediate] :
       {std::pair<int64_t, int64_t>{704, 1344}, {1344, 176}, {2880, 320}, {320, 2880}, {75, 67}, {257, 97}, {257, 33}}) {
    for (const WeightScheme& scheme :
         {Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}), Weights(ElementType::kInt4, ScaleType::kF16, {1, 64}, true),
          Weights(ElementType::kInt8, ScaleType::kF16, {1, 64}), Weights(ElementType::kBf16, ScaleType::kNone, {})}) {
      MoeDesc desc = Desc(4, 2, hidden, intermediate, scheme);
      if (intermediate < 64 && scheme.element != ElementType::kBf16) continue;  // refused, see below
      desc.biases = true;
      const JudgedLayer layer(desc, ++seed, Wna16());
      for (int64_t rows : {1, 9, 24, 33, 128, 300}) layer.Compare(rows, DType::kBf16, kBound, seed + 1);
    }
  }
}

TEST_CASE("cuda_wna16: few rows agree with the judge however the inputs are cut into ranges") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5600;
  // Blocks of 64 inputs: 2, 3, 5, 11, 16, 17, 45 and 129, from 11 on cut into ranges of 4 or more.
  for (const auto& [hidden, intermediate] :
       {std::pair<int64_t, int64_t>{128, 192}, {320, 704}, {704, 1024}, {1088, 2880}, {8256, 96}}) {
    for (const WeightScheme& scheme : Schemes()) {
      const JudgedLayer layer(Desc(3, 2, hidden, intermediate, scheme), ++seed, Wna16());
      for (int64_t rows : {1, 8, 20}) layer.Compare(rows, DType::kBf16, kBound, seed + 1);
    }
  }
}

TEST_CASE("cuda_wna16: few rows agree with the judge in ranges of several slabs") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5650;
  WeightScheme ordered = Weights(ElementType::kInt4, ScaleType::kBf16, {1, 32});
  ordered.act_order = true;
  WeightScheme nvfp4 = Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16});
  nvfp4.global_scale = GlobalScale::kMultiplier;
  for (const WeightScheme& scheme :
       {Weights(ElementType::kInt4, ScaleType::kF16, {1, 128}), ordered, Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}),
        nvfp4, Weights(ElementType::kInt8, ScaleType::kF16, {1, 64}), Weights(ElementType::kFp8E4m3, ScaleType::kF32, {1, 0}),
        Weights(ElementType::kBf16, ScaleType::kNone, {})}) {
    // Gate and up have 45 blocks in three ranges or two, of two slabs and of three.
    const JudgedLayer layer(Desc(8, 2, 2880, 2048, scheme), ++seed, Wna16());
    for (int64_t rows : {20, 47}) layer.Compare(rows, DType::kBf16, kBound, seed + 1);
  }
}

TEST_CASE("cuda_wna16: few rows that all go to one expert, or to none, and repeats are bitwise equal") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5700;
  for (const WeightScheme& scheme : Schemes()) {
    MoeDesc desc = Desc(6, 1, 2880, 320, scheme);
    desc.biases = true;
    const JudgedLayer layer(desc, ++seed, Wna16());
    for (int64_t rows : {1, 2, 7, 8, 9, 16, 31, 33, 64}) {
      RandomBatch batch(desc, rows, 1, DType::kBf16, seed + 1);
      std::fill(batch.ids.begin(), batch.ids.end(), 4);
      layer.CompareBatch(batch.view(), kBound);
      batch.ids[static_cast<size_t>(rows) / 2] = -1;
      layer.CompareBatch(batch.view(), kBound);
      if (rows != 9 && rows != 64) continue;
      const auto first = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
      REQUIRE(first.ok());
      for (int repeat = 0; repeat < 50; ++repeat) CHECK((*RunOnGpu(layer.moe(), batch.view(), DType::kF32) == *first));
    }
  }
}

TEST_CASE("cuda_wna16: few rows of gate and up apart, weighted inputs, and activations of their own launch") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5800;
  for (Activation::Kind kind : {Activation::Kind::kSilu, Activation::Kind::kGelu, Activation::Kind::kSwigluOai}) {
    for (bool act_order : {false, true}) {
      for (bool weighted : {false, true}) {
        WeightScheme scheme = Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
        scheme.act_order = act_order;
        MoeDesc desc = Desc(5, weighted ? 1 : 2, 1088, 832, scheme);
        desc.activation.kind = kind;
        desc.weight_on_input = weighted;
        desc.biases = true;
        const JudgedLayer layer(desc, ++seed, Wna16());
        for (int64_t rows : {1, 7, 16, 25}) layer.Compare(rows, DType::kBf16, kBound, seed + 1);
      }
    }
  }
}

TEST_CASE("cuda_wna16: activations, biases and batched experts", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  MoeDesc desc = Desc(3, 2, 128, 192, Weights(ElementType::kInt4, ScaleType::kF16, {1, 64}));
  desc.activation.kind = Activation::Kind::kSwigluOai;
  desc.activation.clamped = desc.biases = true;
  desc.activation.limit = 0.8f;
  desc.max_tokens_per_expert = 200;
  const JudgedLayer layer(desc, 5300, Wna16());
  layer.Compare(150, DType::kBf16, kBound, 5301);
  for (int64_t rows : {5, 15, 120}) {
    const RandomBatch batch(desc, rows, 2, DType::kBf16, 5302);
    const auto run = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE(run.ok());
    testing::CompareBatched(layer.moe(), desc, batch, *run, &testing::GpuLane());
  }
}

TEST_CASE("cuda_wna16: repeats are bitwise equal, equal rows too, and NaN stays in its row") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5400;
  for (const WeightScheme& scheme :
       {Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}), Weights(ElementType::kBf16, ScaleType::kNone, {})}) {
    const JudgedLayer layer(Desc(4, 2, 320, 192, scheme), ++seed, Wna16());
    RandomBatch batch(layer.desc(), 400, 2, DType::kBf16, seed);
    const size_t row_bytes = 320 * sizeof(uint16_t);
    std::memcpy(batch.x.data() + 399 * row_bytes, batch.x.data(), row_bytes);
    std::copy_n(batch.ids.begin(), 2, batch.ids.end() - 2);
    std::copy_n(batch.weights.begin(), 2, batch.weights.end() - 2);
    const auto first = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE(first.ok());
    CHECK(std::memcmp(first->data(), first->data() + 399 * 320, 320 * sizeof(float)) == 0);
    for (int repeat = 0; repeat < 50; ++repeat) CHECK((*RunOnGpu(layer.moe(), batch.view(), DType::kF32) == *first));
    reinterpret_cast<uint16_t*>(batch.x.data())[7 * 320 + 3] = 0x7FC0;
    const auto dirty = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE(dirty.ok());
    for (int64_t row = 0; row < 400; ++row) {
      CHECK((std::memcmp(first->data() + row * 320, dirty->data() + row * 320, 320 * sizeof(float)) == 0) == (row != 7));
    }
  }
}

TEST_CASE("cuda_wna16: equal rows are bitwise equal in whole tiles and in what lies beyond them") {
  if (!HaveGpu()) return Skip("no GPU");
  constexpr int64_t kRows = 600, kHidden = 320;
  REQUIRE(cuda::HopperTileRowsFor(kRows, 2, {.codes = true, .bf16 = false}, false).rests > 0);
  uint64_t seed = 5450;
  for (const WeightScheme& scheme :
       {Weights(ElementType::kInt4, ScaleType::kF16, {1, 64}), Weights(ElementType::kInt8, ScaleType::kF16, {1, 0})}) {
    const JudgedLayer layer(Desc(2, 1, kHidden, 192, scheme), ++seed, Wna16());
    RandomBatch batch(layer.desc(), kRows, 1, DType::kBf16, seed);
    const size_t row_bytes = kHidden * sizeof(uint16_t);
    for (int64_t row = 1; row < kRows; ++row) {
      std::memcpy(batch.x.data() + static_cast<size_t>(row) * row_bytes, batch.x.data(), row_bytes);
      batch.weights[static_cast<size_t>(row)] = batch.weights[0];
    }
    for (int64_t row = 0; row < kRows; ++row) batch.ids[static_cast<size_t>(row)] = row < kRows / 2 ? 0 : 1;
    const auto out = RunOnGpu(layer.moe(), batch.view(), DType::kF32);
    REQUIRE(out.ok());
    for (int64_t row = 0; row < kRows; ++row) {
      const float* first = out->data() + (row < kRows / 2 ? 0 : kRows / 2) * kHidden;
      CHECK(std::memcmp(first, out->data() + row * kHidden, kHidden * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("cuda_wna16: act-order with equal orders, orders of gate's and up's own, and groups of any sizes") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5470;
  for (const bool zero_points : {false, true}) {
    for (const int group : {32, 128}) {
      for (const char* orders : {"equal", "unequal", "uneven", "uneven and unequal"}) {
        WeightScheme scheme = Weights(ElementType::kInt4, ScaleType::kF16, {1, group}, zero_points);
        scheme.act_order = true;
        MoeDesc desc = Desc(4, 2, 384, 640, scheme);
        desc.biases = true;
        testing::RandomExperts experts(desc, ++seed);
        const std::string text = orders;
        for (ExpertWeights& expert : experts.experts()) {
          std::vector<int32_t>&gate = expert.gate.group_index, &up = expert.up.group_index, &down = expert.down.group_index;
          if (text.find("uneven") != std::string::npos) {
            for (std::vector<int32_t>* index : {&gate, &up, &down}) *std::find(index->begin(), index->end(), 1) = 0;
          }
          if (text.find("unequal") != std::string::npos) std::rotate(up.begin(), up.begin() + 5, up.end());
        }
        INFO(text << ", groups of " << group << (zero_points ? ", zero points" : ""));
        auto moe = Wna16().Prepare(desc, experts, testing::Pool());
        REQUIRE(moe.ok());
        const auto judge = testing::JudgeOf(desc, experts);
        for (const DType dtype : {DType::kBf16, DType::kF32}) {
          for (int64_t rows : {1, 17, 60, 300, 1000}) {
            const RandomBatch batch(desc, rows, 2, dtype, seed + 1000);
            const auto got = RunOnGpu(**moe, batch.view(), DType::kF32), want = RunOnGpu(*judge, batch.view(), DType::kF32);
            REQUIRE((got.ok() && want.ok()));
            const testing::Judgement judgement = testing::Judge(*got, *want, 384, dtype == DType::kF32 ? 2e-5 : kBound);
            INFO(rows << " rows of " << DTypeName(dtype) << ": " << judgement.reason);
            CHECK(judgement.passed);
          }
        }
      }
    }
  }
}

TEST_CASE("cuda_wna16: the bits of a row of a deterministic layer do not depend on the rows beside it or their number") {
  if (!HaveGpu()) return Skip("no GPU");
  constexpr int64_t kMost = 2000;
  uint64_t seed = 5480;
  for (const WeightScheme& scheme :
       {Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}), Weights(ElementType::kInt4, ScaleType::kF16, {1, 64}, true),
        Weights(ElementType::kInt8, ScaleType::kF16, {1, 0}), Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}),
        Weights(ElementType::kBf16, ScaleType::kNone, {})}) {
    MoeDesc desc = Desc(4, 2, 320, 704, scheme);
    desc.deterministic = true;
    const JudgedLayer layer(desc, ++seed, Wna16());
    // From tiles of 32 rows to tiles of 256 with rests, at any place among the others.
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (int64_t rows : {1, 3, 33, 90, 150, 190, 260, 300, 430, 700, 1300}) parts.emplace_back((kMost - rows) / 3, rows);
    layer.CompareParts(RandomBatch(desc, kMost, 2, DType::kBf16, seed).view(), parts);
    layer.Compare(5, DType::kBf16, kBound, seed + 1);
  }
}

TEST_CASE("cuda_wna16: scales of any size agree with the judge, those beyond what operands hold too") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5490;
  for (const WeightScheme& scheme :
       {Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}), Weights(ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 64})}) {
    for (const int most : {140, 170}) {  // 2^13, and 2^43, which is more than kMostLifted
      const MoeDesc desc = Desc(3, 2, 176, 320, scheme);
      testing::RandomExperts experts(desc, ++seed);
      for (ExpertWeights& expert : experts.experts()) {
        const auto set = [](LinearWeights& weights, const auto& code) {
          for (size_t i = 0; i < weights.scales.size(); ++i) weights.scales[i] = static_cast<uint8_t>(code(i));
        };
        set(expert.gate, [&](size_t i) { return most - 40 + i * 7 % 41; });
        set(expert.up, [&](size_t i) { return most - i * 5 % 41; });
        set(expert.down, [&](size_t i) { return i % 3 == 0 ? 0 : 230 - most + i % 9; });
      }
      auto moe = Wna16().Prepare(desc, experts, testing::Pool());
      REQUIRE(moe.ok());
      const auto judge = testing::JudgeOf(desc, experts);
      for (int64_t rows : {1, 33, 300}) {
        const RandomBatch batch(desc, rows, 2, DType::kBf16, seed + 1000);
        const auto got = RunOnGpu(**moe, batch.view(), DType::kF32), want = RunOnGpu(*judge, batch.view(), DType::kF32);
        REQUIRE((got.ok() && want.ok()));
        CHECK(testing::Judge(*got, *want, 176, kBound).passed);
      }
    }
  }
}

TEST_CASE("cuda_wna16: zero points anywhere agree with the judge") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 5495;
  for (const int64_t group : {0, 128}) {
    const MoeDesc desc = Desc(3, 2, 192, 320, Weights(ElementType::kInt4, ScaleType::kF16, {1, static_cast<int32_t>(group)}, true));
    testing::RandomExperts experts(desc, ++seed);
    for (ExpertWeights& expert : experts.experts()) {
      for (LinearWeights* linear : {&expert.gate, &expert.up, &expert.down}) {
        for (size_t i = 0; i < linear->zero_points.size(); ++i) linear->zero_points[i] = static_cast<uint8_t>(i * 7 % 16);
      }
    }
    auto moe = Wna16().Prepare(desc, experts, testing::Pool());
    REQUIRE(moe.ok());
    const auto judge = testing::JudgeOf(desc, experts);
    for (int64_t rows : {1, 33, 300, 2000}) {
      const RandomBatch batch(desc, rows, 2, DType::kBf16, seed + 1000);
      const auto got = RunOnGpu(**moe, batch.view(), DType::kF32), want = RunOnGpu(*judge, batch.view(), DType::kF32);
      REQUIRE((got.ok() && want.ok()));
      CHECK(testing::Judge(*got, *want, 192, kBound).passed);
    }
  }
}

TEST_CASE("cuda_wna16 says no where it cannot: quantized activations, wide weights, other GPUs") {
  DeviceInfo hopper, ampere;
  hopper.has_gpu = ampere.has_gpu = true;
  hopper.cuda_major = 9, ampere.cuda_major = 8;
  hopper.gpu_free_bytes = ampere.gpu_free_bytes = uint64_t{1} << 40;
  const auto codes = [](const MoeDesc& desc, const DeviceInfo& device) {
    std::string text;
    for (const Reason& reason : Wna16().Check(desc, device).reasons) text += reason.code + " ";
    return text;
  };
  MoeDesc desc = Desc(4, 2, 128, 128, Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}));
  const MoeDesc narrow = Desc(4, 2, 257, 33, Weights(ElementType::kInt4, ScaleType::kF16, {1, 32}));
  CHECK(codes(narrow, hopper).find("shape_unsupported") != std::string::npos);
  CHECK(codes(Desc(4, 2, 257, 33, Weights(ElementType::kBf16, ScaleType::kNone, {})), hopper).find("shape_unsupported") ==
        std::string::npos);
  CHECK(codes(Desc(4, 2, 257, 33, Weights(ElementType::kInt8, ScaleType::kF16, {1, 0})), hopper).find("shape_unsupported") ==
        std::string::npos);
  const bool built = codes(desc, hopper).find("not_built") == std::string::npos;
  if (built) CHECK(codes(desc, hopper) == "");
  CHECK(codes(desc, ampere).find("gpu_unsupported") != std::string::npos);
  CHECK(codes(Desc(4, 2, 128, 128, Weights(ElementType::kF32, ScaleType::kNone, {})), hopper).find("scheme_unsupported") !=
        std::string::npos);
  desc.max_tokens_per_expert = int64_t{1} << 28;  // of 4 experts: as many rows as a call may have
  if (built) CHECK(codes(desc, hopper) == "");
  ++desc.max_tokens_per_expert;
  CHECK(codes(desc, hopper).find("shape_unsupported") != std::string::npos);
  desc.max_tokens_per_expert = 0;
  desc.scheme.down.input = testing::Int8(ActivationMode::kDynamic, 1);
  CHECK(codes(desc, hopper).find("scheme_unsupported") != std::string::npos);
}

}  // namespace moed
