// Servers that hold ranges of experts: the parts sum to the whole, ids outside contribute 0, the shared expert comes once.
#include <catch2/catch.hpp>

#include <cmath>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/judge.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

absl::StatusOr<std::vector<float>> RunRange(const std::string& path, int layer, int first, int end, const ForwardCall& base, int64_t hidden) {
  EngineOptions options;
  options.threads = 2;
  options.device = ThisDevice();
  options.first_expert = first;
  options.end_expert = end;
  Engine engine(options, LinkedBackends());
  absl::Status status = engine.Plan("m", path);
  if (status.ok()) status = engine.Load("m", {});
  if (!status.ok()) return status;
  ForwardCall call = base;
  call.layer = layer;
  std::vector<float> out(static_cast<size_t>(base.hidden.rows * hidden));
  ForwardInfo info;
  status = engine.Forward("m", call, {out.data(), DType::kF32, base.hidden.rows, hidden}, &info);
  if (!status.ok()) return status;
  return out;
}

CaseInput InF32(CaseInput input) {
  input.dtype = DType::kF32;
  return input;
}

}  // namespace

TEST_CASE("B52: ten experts on four servers (3, 3, 2, 2) sum to the whole, whoever routes") {
  TempDir dir;
  CheckpointBuilder builder;
  ModelSpec spec{.family = ModelFamily::kDeepseekV3, .hidden = 64, .intermediate = 32, .num_experts = 10, .top_k = 3};
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  const int layer = AddModel(spec, &builder)[0].layer;
  REQUIRE(builder.Write(dir.path()).ok());
  const std::vector<float> x = CaseHidden(7, 64), logits = CaseLogits(7, 10);
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int at = 0; at < 21; ++at) {
    ids.push_back((at * 7) % 11 - 1);
    weights.push_back(0.25f + 0.01f * static_cast<float>(at));
  }
  std::vector<ForwardCall> calls(3);
  for (ForwardCall& call : calls) call.hidden = {x.data(), DType::kF32, 7, 64};
  calls[1].routing = RoutingByLogits{logits};
  calls[2].routing = RoutingByIds{3, ids, weights};
  for (const ForwardCall& call : calls) {
    const auto whole = RunRange(dir.path(), layer, 0, 0, call, 64);
    REQUIRE(whole.ok());
    std::vector<float> sum(7 * 64, 0.0f);
    for (const auto& [first, end] : {std::pair(0, 3), std::pair(3, 6), std::pair(6, 8), std::pair(8, 10)}) {
      const auto part = RunRange(dir.path(), layer, first, end, call, 64);
      REQUIRE(part.ok());
      for (size_t at = 0; at < sum.size(); ++at) sum[at] += (*part)[at];
    }
    const Judgement judgement = Judge(sum, *whole, 64, 1e-5);
    INFO(judgement.reason);
    CHECK(judgement.passed);
  }
}

TEST_CASE("B52: each rank has the input scales of its own experts, each expert is on one rank, and other ranks' ids add 0") {
  const CaseScheme& scheme = CaseSchemeNamed("nvfp4 W4A4");
  const CaseModel model(SpecOf(scheme, 10, 3, 256, 128), scheme, [](CheckpointBuilder& builder) {
    // From 1 / 4 to 128 times the usual: a neighbour's scale would show.
    SetInputScales(&builder, [](int expert, int projection) {
      return std::ldexp(projection == kDown ? 64.0f : 2.0f, expert - 2) / (6.0f * 448.0f);
    });
  });
  const std::pair<int, int> ranges[] = {{0, 3}, {3, 6}, {6, 8}, {8, 10}};
  const CaseInput input = RoutedInput(40, 256, 10, 3);
  for (const std::string& backend : model.Backends()) {
    INFO(backend);
    CaseEngine whole(model, backend);
    const std::vector<float> want = whole.Rows(InF32(input));
    const uint64_t all_bytes = whole.engine().Status()[0].layers[0].bytes;
    std::vector<float> sum(want.size(), 0.0f);
    std::vector<int> owners(10, 0);
    for (const auto& [first, end] : ranges) {
      EngineOptions options;
      options.first_expert = first;
      options.end_expert = end;
      CaseEngine rank(model, backend, options);
      const std::vector<float> part = rank.Rows(InF32(input));
      for (size_t at = 0; at < sum.size(); ++at) sum[at] += part[at];
      CHECK(rank.engine().Status()[0].layers[0].bytes == all_bytes / 10 * static_cast<uint64_t>(end - first));
      for (int expert = 0; expert < 10; ++expert) {
        CaseInput one = InF32(input.Part(expert, 1));
        one.ids = {expert, 9 - expert, expert};
        one.weights = {0.5f, 0.0f, 0.25f};
        const std::vector<float> y = rank.Rows(one);
        const bool mine = first <= expert && expert < end;
        owners[expert] += mine;
        CHECK(y == (mine ? whole.Rows(one) : std::vector<float>(256, 0.0f)));
      }
    }
    CHECK(owners == std::vector<int>(10, 1));
    const Judgement judgement = Judge(sum, want, 256, 1e-5);
    INFO(judgement.reason);
    CHECK(judgement.passed);
  }
}

TEST_CASE("The range of all experts is the whole, to the bit, whatever the scheme") {
  const std::vector<float> x = CaseHidden(5, 128);
  ForwardCall call;
  call.hidden = {x.data(), DType::kF32, 5, 128};
  for (const CaseScheme& scheme : CaseSchemes()) {
    INFO(scheme.name);
    const CaseModel model(SpecOf(scheme, 4, 2, 128, 128), scheme);
    const auto whole = RunRange(model.path(), 0, 0, 0, call, 128), all = RunRange(model.path(), 0, 0, 4, call, 128);
    REQUIRE(whole.ok());
    REQUIRE(all.ok());
    CHECK(*all == *whole);
  }
}

TEST_CASE("Only the layers that are asked for are held, and one that the checkpoint lacks is refused with those that it has") {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel({.family = ModelFamily::kQwen3Moe, .num_layers = 3, .hidden = 64, .intermediate = 32}, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  EngineOptions options;
  options.threads = 1;
  options.device = ThisDevice();
  options.layers = {2, 0};
  Engine engine(options, LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  const auto status = engine.FindModel("m");
  REQUIRE(status.ok());
  REQUIRE(status->layers.size() == 2);
  CHECK(status->layers[0].layer == 0);
  CHECK(status->layers[1].layer == 2);
  CHECK(engine.SelfCheck("m", -1, 2, 1)->size() == 2);
  options.layers = {1, 3};
  const absl::Status refused = Engine(options, LinkedBackends()).Plan("m", dir.path());
  CHECK(absl::IsNotFound(refused));
  CHECK(std::string(refused.message()).find("has no MoE layer 3; its MoE layers are 0, 1, 2") != std::string::npos);
}

TEST_CASE("A range beyond the model is refused with both ranges") {
  TempDir dir;
  CheckpointBuilder builder;
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 4};
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  const std::vector<float> x = CaseHidden(1, 64);
  ForwardCall call;
  call.hidden = {x.data(), DType::kF32, 1, 64};
  for (const auto& [first, end] : {std::pair(0, 5), std::pair(2, 2), std::pair(-1, 2)}) {
    const auto result = RunRange(dir.path(), 0, first, end, call, 64);
    REQUIRE_FALSE(result.ok());
    CHECK(std::string(result.status().message()).find("want a range within 0:4") != std::string::npos);
  }
}

}  // namespace moed
