// Servers that hold ranges of experts: the parts sum to the whole, ids outside contribute 0, the shared expert comes once.
#include <catch2/catch.hpp>

#include "engine/engine.h"
#include "kernels/backends.h"
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
