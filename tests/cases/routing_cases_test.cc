// Routing as callers see it, on every backend: weights on the input, logits that are no numbers, "no expert", experts named
// twice, ties, groups. What the rules compute in every detail is tests/engine/routing_test.cc.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/judge.h"

namespace moed::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double Silu(double z) { return z / (1.0 + std::exp(-z)); }

// deepseek_v3 with experts PC(1, 1), expert e's down projection times e + 1; scores as they are, weights sum to 1.
ModelSpec GroupedSpec(int experts, int top_k, int groups, int kept) {
  ModelSpec spec{
      .family = ModelFamily::kDeepseekV3, .hidden = 64, .intermediate = 32, .num_experts = experts, .top_k = top_k};
  const WeightFn probe = PcWeights(64, 32, 1.0f, 1.0f);
  spec.weights = [=](int e, int p, int64_t n) { return probe(e, p, n) * (p == kDown ? static_cast<float>(e + 1) : 1.0f); };
  spec.num_shared_experts = 0;
  spec.n_group = groups;
  spec.topk_group = kept;
  spec.routed_scaling = 1.0;
  return spec;
}

CaseModel::Change WithBias(const std::vector<float>& bias) {
  return [=](CheckpointBuilder& builder) {
    const std::string name = "model.layers.1.mlp.gate.e_score_correction_bias";
    REQUIRE(builder.Remove(name) == 1);
    builder.AddFloats(name, StDtype::kF32, {static_cast<int64_t>(bias.size())}, bias);
  };
}

// `rows` rows of (1, 0, 0, ...), each with these logits.
CaseInput ByLogits(int64_t rows, const std::vector<float>& logits) {
  CaseInput input = UnitInput(rows, 64);
  for (int64_t row = 0; row < rows; ++row) input.logits.insert(input.logits.end(), logits.begin(), logits.end());
  return input;
}

// Routes `logits` on every backend, alone and in company, again and again: always these ids in this order, and where
// `weights` are given these weights and what GroupedSpec's experts make of them.
void CheckRouting(const CaseModel& model, const std::vector<float>& logits, const std::vector<int32_t>& ids,
                  const std::vector<float>& weights = {}) {
  for (const std::string& backend : model.Backends()) {
    INFO(backend);
    CaseEngine engine(model, backend);
    for (int64_t rows : {1, 64}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        const std::vector<float> y = engine.Rows(ByLogits(rows, logits));
        std::vector<int32_t> want;
        for (int64_t row = 0; row < rows; ++row) want.insert(want.end(), ids.begin(), ids.end());
        REQUIRE(engine.info().ids == want);
        double sum = 0.0;
        for (size_t slot = 0; slot < weights.size(); ++slot) {
          CHECK(engine.info().weights[slot] == Approx(weights[slot]).margin(6e-6));
          sum += weights[slot] * (ids[slot] + 1) * Silu(1.0);
        }
        if (!weights.empty()) CHECK(y[5] == Approx(sum).epsilon(1e-3));
      }
    }
  }
}

// llama4, whose weights multiply the experts' input: experts PC(2, 2) and PC(1, 2), a shared expert of zeros.
void MakeLlama4(CheckpointBuilder& builder, int top_k) {
  const nlohmann::json text = {{"model_type", "llama4_text"},  {"hidden_size", 64},
                               {"num_hidden_layers", 1},       {"intermediate_size", 32},
                               {"intermediate_size_mlp", 64},  {"num_local_experts", 2},
                               {"num_experts_per_tok", top_k}, {"interleave_moe_layer_step", 1}};
  builder.SetConfig(nlohmann::json{{"model_type", "llama4"}, {"text_config", text}}.dump());
  while (!builder.tensors().empty()) builder.Remove(std::string(builder.tensors().back().name));
  std::vector<float> gate_up(2 * 64 * 64, 0.0f);
  for (size_t column = 0; column < 32; ++column) {
    gate_up[column] = 2.0f;
    gate_up[32 + column] = gate_up[64 * 64 + 32 + column] = 2.0f;
    gate_up[64 * 64 + column] = 1.0f;
  }
  const std::string block = "language_model.model.layers.0.feed_forward.";
  builder.AddFloats(block + "experts.gate_up_proj", StDtype::kBf16, {2, 64, 64}, gate_up);
  builder.AddFloats(block + "experts.down_proj", StDtype::kBf16, {2, 32, 64}, std::vector<float>(2 * 32 * 64, 1.0f / 32));
  builder.AddFloats(block + "router.weight", StDtype::kBf16, {2, 64}, std::vector<float>(2 * 64));
  for (const char* name : {"gate_proj", "up_proj"}) {
    builder.AddFloats(block + "shared_expert." + name + ".weight", StDtype::kBf16, {32, 64}, std::vector<float>(32 * 64));
  }
  builder.AddFloats(block + "shared_expert.down_proj.weight", StDtype::kBf16, {64, 32}, std::vector<float>(64 * 32));
}

}  // namespace

TEST_CASE("B41: the weight multiplies the expert's input or its output as the model says, once, for every k") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 2, .top_k = 1};
  spec.weights = PcWeights(64, 32, 2.0f, 2.0f);
  const CaseModel on_output(spec);
  CaseInput one = UnitInput(1, 64);
  one.ids = {0};
  one.weights = {0.5f};
  for (const std::string& backend : on_output.Backends()) {
    INFO(backend);
    CHECK(CaseEngine(on_output, backend).Rows(one)[9] == Approx(1.7616).epsilon(0.01));
  }
  for (int model_k : {1, 2}) {
    const CaseModel on_input(spec, {}, [=](CheckpointBuilder& builder) { MakeLlama4(builder, model_k); });
    for (const std::string& backend : on_input.Backends()) {
      INFO(backend << ", k of the model " << model_k);
      CaseEngine engine(on_input, backend);
      CHECK(engine.Rows(one)[9] == Approx(0.7311).epsilon(0.01));  // 0.3655: on the output, too
      // Two copies of the row, each by its own weight; also of the same expert, negative, and zero.
      const double weights[] = {0.5, 0.25, -1.0, 0.0, 2.0};
      for (double first : weights) {
        for (double second : weights) {
          CaseInput two = UnitInput(1, 64);
          two.weights = {static_cast<float>(first), static_cast<float>(second)};
          two.ids = {0, 1};
          const double want = Silu(2 * first) * 2 * first + Silu(second) * 2 * second;
          CHECK(engine.Rows(two)[9] == Approx(want).epsilon(0.01).margin(1e-6));
          two.ids = {0, 0};
          CHECK(engine.Rows(two)[9] ==
                Approx(Silu(2 * first) * 2 * first + Silu(2 * second) * 2 * second).epsilon(0.01).margin(1e-6));
          two.ids = {1, -1};
          CHECK(engine.Rows(two)[9] == Approx(Silu(first) * 2 * first).epsilon(0.01).margin(1e-6));
        }
      }
    }
  }
}

TEST_CASE("B42: logits that are no numbers are refused by row, and the calls beside them are what they were") {
  const CaseModel model(SpecOf({}, 12, 4, 64, 32));
  const std::vector<float> good = {0.1f, -2.f, 3.f, 0.f, 1.f, 2.5f, -1.f, 0.5f, 0.7f, -0.3f, 1.5f, 2.f};
  const auto with = [&](const std::vector<std::pair<int, float>>& changes) {
    std::vector<float> row = good;
    for (const auto& [at, value] : changes) row[at] = value;
    return row;
  };
  const std::vector<std::vector<float>> bad = {
      std::vector<float>(12, kNan), with({{7, kNan}}), std::vector<float>(12, -kInf),
      with({{3, kInf}, {9, kInf}}), with({{0, kInf}}), with({{11, -kNan}})};
  for (const std::string& backend : model.Backends()) {
    INFO(backend);
    CaseEngine engine(model, backend);
    const std::vector<float> alone = engine.Rows(ByLogits(1, good));
    for (size_t which = 0; which < bad.size(); ++which) {
      for (int64_t at = 0; at < 5; ++at) {
        CaseInput input = ByLogits(5, good);
        std::copy(bad[which].begin(), bad[which].end(), input.logits.begin() + at * 12);
        const absl::Status status = engine.Call(input).status();
        INFO("bad row " << which << " at " << at << ": " << status.ToString());
        CHECK(status.code() == absl::StatusCode::kInvalidArgument);
        CHECK(std::string(status.message()).find("row " + std::to_string(at)) != std::string::npos);
        CHECK(engine.Rows(ByLogits(1, good)) == alone);
      }
    }
    // -Inf alone means "never": the best of the rest, distinct and in range.
    const std::vector<float> masked = engine.Rows(ByLogits(1, with({{2, -kInf}, {5, -kInf}, {11, -kInf}})));
    CHECK(engine.info().ids == std::vector<int32_t>{10, 4, 8, 7});
    CHECK(masked != alone);
  }
}

TEST_CASE("B44: expert -1 is no expert, for every scheme and backend, whatever its weight") {
  for (const CaseScheme& scheme : CaseSchemes()) {
    const CaseModel model(SpecOf(scheme, 8, 2, 128, 128), scheme);
    for (const std::string& backend : model.Backends()) {
      INFO(scheme.name << " on " << backend);
      CaseEngine engine(model, backend);
      CaseInput input{.rows = 4, .x = CaseHidden(4, 128)};
      input.ids = {-1, -1, 3, -1, -1, 0, 2, 5};
      input.weights = {0.7f, kNan, 0.6f, kNan, kInf, 0.9f, 0.25f, -1.5f};
      const std::vector<float> y = engine.Rows(input);
      const auto row = [&](int64_t at) { return std::vector<float>(y.begin() + at * 128, y.begin() + (at + 1) * 128); };
      CHECK(row(0) == std::vector<float>(128, 0.0f));
      for (int64_t at : {1, 2}) {
        CaseInput single = input.Part(at, 1);
        single.ids = {at == 1 ? 3 : 0};
        single.weights = {at == 1 ? 0.6f : 0.9f};
        CHECK(row(at) == engine.Rows(single));
      }
      CHECK(row(3) == engine.Rows(input.Part(3, 1)));
      CHECK(Judge(row(3), ExactRows(model.layer(), input.Part(3, 1)), 128, scheme.bound).passed);
      // Nothing but "no expert".
      input.ids.assign(8, -1);
      CHECK(engine.Rows(input) == std::vector<float>(4 * 128, 0.0f));
      for (int32_t bad : {-2, 8, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
        input.ids[5] = bad;
        const absl::Status status = engine.Call(input).status();
        CHECK(status.code() == absl::StatusCode::kInvalidArgument);
        CHECK(std::string(status.message()).find("row 2, slot 1 is " + std::to_string(bad)) != std::string::npos);
      }
    }
  }
}

TEST_CASE("B46: an expert named twice in a row counts once a slot, for every scheme and backend") {
  for (const CaseScheme& scheme : CaseSchemes()) {
    const CaseModel model(SpecOf(scheme, 8, 2, 128, 128), scheme);
    for (const std::string& backend : model.Backends()) {
      INFO(scheme.name << " on " << backend);
      CaseEngine engine(model, backend);
      CaseInput input{.rows = 5, .x = CaseHidden(5, 128), .ids = {2, 2, 2, 4, 2, 2, 4, 2, 2, 2}};
      for (int row = 0; row < 5; ++row) input.weights.insert(input.weights.end(), {0.3f, 0.7f});
      const std::vector<float> y = engine.Rows(input);
      for (int64_t row : {0, 2, 4}) {
        CaseInput once = input.Part(row, 1);
        once.ids = {2};
        once.weights = {1.0f};
        CHECK(Judge(std::span(y).subspan(row * 128, 128), engine.Rows(once), 128, 0.005).passed);
      }
      for (int64_t row : {1, 3}) {
        CHECK(Judge(std::span(y).subspan(row * 128, 128), ExactRows(model.layer(), input.Part(row, 1)), 128, scheme.bound)
                  .passed);
      }
    }
  }
}

TEST_CASE("B46: a correction bias of -Inf ranks experts last, and the ids stay distinct") {
  for (int best : {2, 0, 7}) {
    std::vector<float> bias(8, -kInf);
    bias[best] = 0.0f;
    std::vector<int32_t> want = {best};
    for (int id = 0; want.size() < 3; ++id) {
      if (id != best) want.push_back(id);
    }
    CheckRouting(CaseModel(GroupedSpec(8, 3, 1, 1), {}, WithBias(bias)), std::vector<float>(8, 0.0f), want,
                 {1.0f / 3, 1.0f / 3, 1.0f / 3});
  }
}

TEST_CASE("B46: a correction bias of NaN or +Inf is refused at load by name") {
  for (float bad : {kNan, kInf}) {
    const CaseModel model(GroupedSpec(8, 3, 1, 1), {}, WithBias({0, 0, 0, bad, 0, 0, 0, 0}));
    EngineOptions options;
    options.device = ThisDevice();
    Engine engine(options, LinkedBackends());
    REQUIRE(engine.Plan("m", model.path()).ok());
    const absl::Status status = engine.Load("m", {});
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK(std::string(status.message()).find("e_score_correction_bias: element 3") != std::string::npos);
  }
}

TEST_CASE("B47: of equal scores the lower id wins, on every backend, alone and in company") {
  const CaseModel wide(SpecOf({}, 384, 8, 64, 32));
  CheckRouting(wide, std::vector<float>(384, 0.0f), {0, 1, 2, 3, 4, 5, 6, 7});
  std::vector<float> logits(384, -1.0f);
  logits[5] = logits[200] = 1.0f;
  for (int above = 0; above < 7; ++above) logits[300 + above] = 9.0f - static_cast<float>(above);
  CheckRouting(wide, logits, {300, 301, 302, 303, 304, 305, 306, 5});

  const CaseModel groups(GroupedSpec(16, 8, 4, 2), {}, WithBias(std::vector<float>(16, 0.0f)));
  CheckRouting(groups, std::vector<float>(16, 0.0f), {0, 1, 2, 3, 4, 5, 6, 7}, std::vector<float>(8, 0.125f));
}

TEST_CASE("B48: groups that are masked never win, and groups rank by the sum of their two best, on every backend") {
  const CaseModel two_kept(GroupedSpec(8, 2, 4, 2), {}, WithBias({-.9f, -.9f, -1.7f, -1.9f, -.95f, -.95f, -2.f, -2.6f}));
  CheckRouting(two_kept, {0.f, .4f, .8f, 1.2f, -.4f, -.8f, -1.2f, 1.6f}, {1, 0}, {.54491f, .45509f});
  std::vector<float> bias;
  for (float v : {.9f, 0.f, .6f, .5f, .7f, .1f, .2f, .1f}) bias.push_back(v - .5f);
  const CaseModel one_kept(GroupedSpec(8, 2, 4, 1), {}, WithBias(bias));
  CheckRouting(one_kept, std::vector<float>(8, 0.0f), {2, 3}, {.5f, .5f});
}

}  // namespace moed::testing
