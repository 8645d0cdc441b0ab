// What becomes of a score on its way to a weight, as the layer's output shows it: normalising, the model's scaling factor,
// and the shared expert, which neither touches; on every backend.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>

#include "tests/support/case_calls.h"

namespace moed::testing {
namespace {

constexpr int64_t kHidden = 64, kWidth = 32;
constexpr char kShared[] = "model.layers.1.mlp.shared_experts.";

double Silu(double z) { return z / (1.0 + std::exp(-z)); }

CaseInput ByLogits(const std::vector<float>& logits) {
  CaseInput input = UnitInput(1, kHidden);
  input.logits = logits;
  return input;
}

CaseInput ById(int32_t id, float weight) {
  CaseInput input = UnitInput(1, kHidden);
  input.ids = {id};
  input.weights = {weight};
  return input;
}

// The shared expert of a deepseek_v3 as PC(1, 1).
void MakeSharedProbe(CheckpointBuilder& builder) {
  const WeightFn probe = PcWeights(kHidden, kWidth, 1.0f, 1.0f);
  const std::pair<std::string, int> projections[] = {{"gate_proj", kGate}, {"up_proj", kUp}, {"down_proj", kDown}};
  for (const auto& [name, projection] : projections) {
    const bool down = projection == kDown;
    REQUIRE(builder.Remove(kShared + name + ".weight") == 1);
    AddProjection(&builder, kShared + name, down ? kHidden : kWidth, down ? kWidth : kHidden, ExpertSpec{},
                  [&, projection = projection](int64_t n) { return probe(0, projection, n); });
  }
}

}  // namespace

TEST_CASE(
    "B50: softmax runs over all experts before the pick, and normalising divides by the picked sum, on every backend") {
  for (bool normalise : {false, true}) {
    for (int top_k : {1, 2, 3, 4}) {
      ModelSpec spec = SpecOf({}, 4, top_k, kHidden, kWidth);
      const WeightFn probe = PcWeights(kHidden, kWidth, 1.0f, 1.0f);
      spec.weights = [=](int e, int p, int64_t n) { return probe(e, p, n) * (e == 1 && p == kDown ? 10.0f : 1.0f); };
      spec.norm_topk_prob = normalise;
      const CaseModel model(spec);
      for (const std::vector<float>& logits : {std::vector<float>{2, 1, 0, -1}, {-30, 5, 5.5f, -31}, {100, 99, 1, 0}}) {
        double all = 0.0, picked = 0.0, sum = 0.0;
        std::vector<std::pair<double, int>> order;
        for (int e = 0; e < 4; ++e) order.emplace_back(-static_cast<double>(logits[e]), e);
        std::sort(order.begin(), order.end());
        for (double logit : logits) all += std::exp(logit);
        for (int slot = 0; slot < top_k; ++slot) {
          const double weight = std::exp(-order[slot].first) / all;
          picked += weight;
          sum += weight * (order[slot].second == 1 ? 10.0 : 1.0) * Silu(1.0);
        }
        if (normalise) sum /= picked;
        for (const std::string& backend : model.Backends()) {
          INFO(backend << ", k = " << top_k << (normalise ? ", normalised" : ""));
          CaseEngine engine(model, backend);
          const std::vector<float> y = engine.Rows(ByLogits(logits));
          CHECK(y[0] == Approx(sum).epsilon(0.002));
          if (top_k == 2 && logits[0] == 2.0f) {
            CHECK(y[0] == Approx(normalise ? 2.5006 : 2.2025).epsilon(0.005));
            CHECK(engine.info().weights[0] == Approx(normalise ? 0.73106 : 0.64391).epsilon(1e-4));
            CHECK(engine.info().weights[1] == Approx(normalise ? 0.26894 : 0.23688).epsilon(1e-4));
          }
        }
      }
    }
  }
}

TEST_CASE("B51: the scaling factor belongs to the router's weights, once: not to given ones and not to the shared expert") {
  const std::vector<float> logits = {3.0f, 0.0f, 0.0f, 0.0f};
  for (double factor : {2.5, 1.0, 0.5, 16.0}) {
    for (int shared : {0, 1}) {
      ModelSpec spec{
          .family = ModelFamily::kDeepseekV3, .hidden = kHidden, .intermediate = kWidth, .num_experts = 4, .top_k = 1};
      spec.weights = PcWeights(kHidden, kWidth, 1.0f, 1.0f);
      spec.num_shared_experts = shared;
      spec.routed_scaling = factor;
      const CaseModel model(
          spec, {}, shared == 1 ? MakeSharedProbe : +[](CheckpointBuilder&) {});
      for (const std::string& backend : model.Backends()) {
        INFO(backend << ", factor " << factor << ", " << shared << " shared experts");
        CaseEngine engine(model, backend);
        const double extra = shared * Silu(1.0);
        const auto y = [&](const CaseInput& input, bool routed_only = false) { return engine.Rows(input, routed_only)[5]; };
        CHECK(y(ByLogits(logits)) == Approx(factor * Silu(1.0) + extra).epsilon(1e-3));
        CHECK(y(UnitInput(1, kHidden)) == Approx(factor * Silu(1.0) + extra).epsilon(1e-3));  // its own gate
        CHECK(y(ByLogits(logits), true) == Approx(factor * Silu(1.0)).epsilon(1e-3));
        CHECK(y(ById(0, 1.0f)) == Approx(Silu(1.0) + extra).epsilon(1e-3));
        CHECK(y(ById(3, -0.5f)) == Approx(-0.5 * Silu(1.0) + extra).epsilon(1e-3));
        CHECK(y(ById(-1, 1.0f)) == Approx(extra).epsilon(1e-3));
        CHECK(y(ById(0, 1.0f), true) == Approx(Silu(1.0)).epsilon(1e-3));
      }
    }
  }
}

}  // namespace moed::testing
