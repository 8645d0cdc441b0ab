// Routing against numbers worked out by hand and against an independent reference in double.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/routing.h"
#include "tests/engine/routing_reference.h"

namespace moed {
namespace {

using Score = RouterRule::Score;
using Normalize = RouterRule::Normalize;
using GroupScore = RouterRule::GroupScore;
using testing::Reference;
using testing::ReferenceRow;

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  absl::Status status;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed RunRoute(const RouterRule& rule, int experts, int top_k, const std::vector<float>& logits,
                const std::vector<float>& bias = {}, bool own_gate = false) {
  const size_t slots = logits.size() / experts * top_k;
  Routed result{absl::OkStatus(), std::vector<int32_t>(slots, -77), std::vector<float>(slots, -77.0f)};
  const auto function = own_gate ? RouteOwnGate : Route;
  result.status = function(rule, experts, top_k, logits, bias, result.ids, result.weights);
  return result;
}

RouterRule SoftmaxRule(Normalize normalize = Normalize::kNone) {
  RouterRule rule;
  rule.score = Score::kSoftmax;
  rule.normalize = normalize;
  return rule;
}

RouterRule DeepseekRule(int groups, int kept) {
  RouterRule rule;
  rule.score = Score::kSigmoid;
  rule.groups = groups;
  rule.groups_kept = kept;
  rule.group_score = GroupScore::kTopTwoSum;
  rule.normalize = Normalize::kSum;
  rule.norm_epsilon = 1e-20f;
  rule.correction_bias = true;
  return rule;
}

bool Contains(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

// Compares rows of random logits; returns how many were left out because a cut is closer than float32 can tell.
int CompareWithReference(const RouterRule& rule, int experts, int top_k, int rows, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(static_cast<size_t>(rows) * experts);
  for (float& l : logits) l = normal(random);
  std::vector<float> bias(rule.correction_bias ? experts : 0);
  for (float& b : bias) b = 0.3f * normal(random) / spread;
  const Routed got = RunRoute(rule, experts, top_k, logits, bias);
  INFO(got.status.ToString());
  REQUIRE(got.status.ok());
  int skipped = 0;
  for (int t = 0; t < rows; ++t) {
    const std::vector<double> row(logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
    const ReferenceRow want = Reference(rule, row, {bias.begin(), bias.end()}, top_k);
    if (want.margin < 2e-6) {
      ++skipped;
      continue;
    }
    for (int j = 0; j < top_k; ++j) {
      INFO("row " << t << " slot " << j << " E=" << experts << " k=" << top_k);
      REQUIRE(got.ids[t * top_k + j] == want.ids[j]);
      REQUIRE(got.weights[t * top_k + j] == Approx(want.weights[j]).epsilon(1e-5).margin(1e-12));
    }
  }
  return skipped;
}

TEST_CASE("Every rule agrees with an independent reference in double on random logits") {
  struct Layout {
    int experts, groups, kept, top_k;
  };
  const std::vector<Layout> layouts = {{4, 1, 1, 1},  {8, 1, 1, 2},   {16, 4, 2, 4},  {64, 1, 1, 6},
                                       {64, 8, 3, 8}, {256, 8, 4, 8}, {384, 1, 1, 8}, {12, 3, 1, 4}};
  int compared = 0;
  int skipped = 0;
  for (const Score score : {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSqrtSoftplus}) {
    for (const Normalize normalize : {Normalize::kNone, Normalize::kSum, Normalize::kPNorm}) {
      for (const GroupScore group_score : {GroupScore::kMax, GroupScore::kTopTwoSum}) {
        for (const bool with_bias : {false, true}) {
          for (const Layout& layout : layouts) {
            RouterRule rule;
            rule.score = score;
            rule.normalize = normalize;
            rule.norm_p = 2.0f;
            rule.norm_epsilon = 1e-20f;
            rule.scaling = 2.5f;
            rule.groups = layout.groups;
            rule.groups_kept = layout.kept;
            rule.group_score = group_score;
            rule.correction_bias = with_bias;
            skipped += CompareWithReference(rule, layout.experts, layout.top_k, 20, 2.0f, 17u + compared);
            compared += 20;
          }
        }
      }
    }
  }
  CHECK(skipped * 20 < compared);
}

TEST_CASE("Sequential masked picks agree with the reference in double") {
  RouterRule rule;
  rule.score = Score::kSparseMixer;
  int skipped = 0;
  for (const float noise : {0.01f, 0.1f, 0.5f}) {
    rule.mixer_noise = noise;
    for (const int top_k : {1, 2, 3}) skipped += CompareWithReference(rule, 16, top_k, 200, 1.5f, 5u + top_k);
  }
  CHECK(skipped < 90);
}

TEST_CASE("Sequential masked picks weigh by the entries near the maximum, the first pick masked out for the second") {
  RouterRule rule;
  rule.score = Score::kSparseMixer;
  rule.mixer_noise = 0.01f;
  // 3.96 lies within 2 % of 4, 3.8 does not; for the second pick 3.96 is the maximum and again 3.8 is too far.
  const Routed got = RunRoute(rule, 4, 2, {3.8f, 4.0f, 3.96f, 0.0f});
  REQUIRE(got.status.ok());
  CHECK(got.ids == std::vector<int32_t>{1, 2});
  CHECK(got.weights[0] == Approx(1.0 / (1.0 + std::exp(-0.04))));
  CHECK(got.weights[1] == Approx(1.0));
}

TEST_CASE("B42: a caller's NaN or +Inf is refused by row and nothing is written") {
  const std::vector<float> good = {0.1f, -2.f, 3.f, 0.f, 1.f, 2.5f, -1.f, 0.5f, 0.7f, -0.3f, 1.5f, 2.f};
  for (const Score score : {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSqrtSoftplus}) {
    RouterRule rule;
    rule.score = score;
    for (const float bad : {kNan, kInf, -kNan}) {
      for (const int row : {0, 1, 4}) {
        for (const int expert : {0, 7, 11}) {
          std::vector<float> logits;
          for (int t = 0; t < 5; ++t) logits.insert(logits.end(), good.begin(), good.end());
          logits[row * 12 + expert] = bad;
          const Routed got = RunRoute(rule, 12, 4, logits);
          CHECK(got.status.code() == absl::StatusCode::kInvalidArgument);
          CHECK(Contains(got.status, "row " + std::to_string(row) + ", expert " + std::to_string(expert)));
          CHECK(std::all_of(got.ids.begin(), got.ids.end(), [](int32_t id) { return id == -77; }));
        }
      }
    }
  }
}

TEST_CASE("B42: -Inf means never picked, and too few finite logits are refused by row") {
  std::vector<float> logits(24, 0.0f);
  for (int e = 0; e < 12; ++e) logits[12 + e] = -kInf;
  const Routed none = RunRoute(SoftmaxRule(), 12, 4, logits);
  CHECK(none.status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(Contains(none.status, "row 1 has 0 finite logits"));
  CHECK(none.ids[0] == -77);
  for (int finite = 1; finite < 12; ++finite) {
    for (int e = 0; e < 12; ++e) logits[12 + e] = e >= 12 - finite ? 0.5f : -kInf;
    const Routed got = RunRoute(SoftmaxRule(), 12, 4, logits);
    CHECK(got.status.ok() == (finite >= 4));
    if (finite < 4) {
      CHECK(Contains(got.status, "has " + std::to_string(finite) + " finite"));
    } else {
      for (int j = 0; j < 4; ++j) CHECK(got.ids[4 + j] == 12 - finite + j);
    }
  }
}

TEST_CASE("A masked expert is never picked, however large its correction bias is") {
  std::vector<float> logits(8, 0.0f);
  std::vector<float> bias(8, 0.0f);
  logits[3] = -kInf;
  bias[3] = 100.0f;
  const Routed got = RunRoute(DeepseekRule(1, 1), 8, 3, logits, bias);
  REQUIRE(got.status.ok());
  CHECK(got.ids == std::vector<int32_t>{0, 1, 2});
  // In groups: the masked expert does not lift its group either.
  const Routed grouped = RunRoute(DeepseekRule(4, 2), 8, 2, logits, bias);
  REQUIRE(grouped.status.ok());
  CHECK(grouped.ids == std::vector<int32_t>{0, 1});
}

TEST_CASE("Fewer finite logits than k in the kept groups are refused") {
  // Both groups score -Inf (one finite expert each), the lower is kept, and it has one expert for two slots.
  const Routed got = RunRoute(DeepseekRule(2, 1), 4, 2, {1.0f, -kInf, -kInf, 2.0f}, std::vector<float>(4, 0.0f));
  CHECK(got.status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(Contains(got.status, "row 0 has 1 finite logits in the groups that it keeps, wanted at least 2"));
}

TEST_CASE("B42: a good row gives the same bits alone and among others") {
  const std::vector<float> row = {0.3f, -2.f, 3.f, 0.f, 1.f, 2.5f, -1.f, 0.5f, 0.7f, -0.3f, 1.5f, 2.f};
  std::vector<float> many = row;
  for (int i = 0; i < 48; ++i) many.push_back(0.37f * static_cast<float>((i * 7) % 13));
  for (const Score score : {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSqrtSoftplus}) {
    RouterRule rule;
    rule.score = score;
    rule.normalize = Normalize::kSum;
    const Routed alone = RunRoute(rule, 12, 4, row);
    const Routed among = RunRoute(rule, 12, 4, many);
    REQUIRE(alone.status.ok());
    REQUIRE(among.status.ok());
    for (int j = 0; j < 4; ++j) {
      CHECK(alone.ids[j] == among.ids[j]);
      CHECK(alone.weights[j] == among.weights[j]);
    }
  }
}

TEST_CASE("The own gate turns a row that is not finite into NaN weights on the lowest ids and serves the rest") {
  std::vector<float> logits(36, 0.0f);
  logits[5] = 4.0f;
  logits[12 + 3] = kNan;
  logits[24 + 7] = -kInf;
  const Routed got = RunRoute(SoftmaxRule(Normalize::kSum), 12, 2, logits, {}, /*own_gate=*/true);
  REQUIRE(got.status.ok());
  CHECK(got.ids == std::vector<int32_t>{5, 0, 0, 1, 0, 1});
  CHECK(std::isfinite(got.weights[0]));
  for (int i = 2; i < 6; ++i) CHECK(std::isnan(got.weights[i]));
  const Routed alone = RunRoute(SoftmaxRule(Normalize::kSum), 12, 2, {logits.begin(), logits.begin() + 12});
  CHECK(alone.weights[0] == got.weights[0]);
}

TEST_CASE("B46: a correction bias of -Inf on all but one expert still gives distinct ids, that expert first") {
  for (int best = 0; best < 8; ++best) {
    std::vector<float> bias(8, -kInf);
    bias[best] = 0.0f;
    for (int top_k = 1; top_k <= 8; ++top_k) {
      const Routed got = RunRoute(DeepseekRule(1, 1), 8, top_k, std::vector<float>(8, 0.0f), bias);
      REQUIRE(got.status.ok());
      CHECK(got.ids[0] == best);
      CHECK(std::set<int32_t>(got.ids.begin(), got.ids.end()).size() == static_cast<size_t>(top_k));
      for (int j = 1; j < top_k; ++j) CHECK(got.ids[j] == (j - 1 < best ? j - 1 : j));
    }
  }
}

TEST_CASE("B47: of equal logits the lower ids win, for every score, M and repeat") {
  for (const Score score :
       {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSqrtSoftplus, Score::kSparseMixer}) {
    RouterRule rule;
    rule.score = score;
    for (const int rows : {1, 64}) {
      for (const float value : {0.0f, -3.0f, 5.5f}) {
        for (int repeat = 0; repeat < 20; ++repeat) {
          const Routed got = RunRoute(rule, 384, 8, std::vector<float>(384 * rows, value));
          REQUIRE(got.status.ok());
          for (int i = 0; i < 8 * rows; ++i) REQUIRE(got.ids[i] == i % 8);
        }
      }
    }
  }
}

TEST_CASE("B47: of two equal logits at the cut the lower id is taken") {
  for (const auto& [low, high] : std::vector<std::pair<int, int>>{{5, 200}, {0, 383}, {198, 199}, {7, 8}}) {
    std::vector<float> logits(384, -1.0f);
    int above = 0;
    for (int e = 300; above < 7; ++e) {
      if (e == low || e == high) continue;
      logits[e] = 5.0f + static_cast<float>(above++);
    }
    logits[low] = logits[high] = 2.0f;
    const Routed got = RunRoute(SoftmaxRule(), 384, 8, logits);
    REQUIRE(got.status.ok());
    CHECK(got.ids.back() == low);
    CHECK(std::count(got.ids.begin(), got.ids.end(), high) == 0);
  }
}

TEST_CASE("B47: of equal groups the lower ones are kept") {
  for (const GroupScore score : {GroupScore::kMax, GroupScore::kTopTwoSum}) {
    RouterRule rule = DeepseekRule(4, 2);
    rule.group_score = score;
    for (int top_k = 1; top_k <= 8; ++top_k) {
      const Routed got = RunRoute(rule, 16, top_k, std::vector<float>(16, 0.0f), std::vector<float>(16, 0.0f));
      REQUIRE(got.status.ok());
      for (int j = 0; j < top_k; ++j) CHECK(got.ids[j] == j);
    }
  }
}

TEST_CASE("Logits whose scores round to the same number are still told apart") {
  // sigmoid is 1 in float32 from about 17 on.
  RouterRule rule;
  rule.score = Score::kSigmoid;
  const Routed got = RunRoute(rule, 4, 1, {20.0f, 30.0f, 25.0f, 1.0f});
  REQUIRE(got.status.ok());
  CHECK(got.ids[0] == 1);
}

TEST_CASE("B48a: masked groups can never win, even against negative choice scores") {
  const Routed got = RunRoute(DeepseekRule(4, 2), 8, 2, {0.f, .4f, .8f, 1.2f, -.4f, -.8f, -1.2f, 1.6f},
                              {-.9f, -.9f, -1.7f, -1.9f, -.95f, -.95f, -2.f, -2.6f});
  REQUIRE(got.status.ok());
  CHECK(got.ids == std::vector<int32_t>{1, 0});
  CHECK(got.weights[0] == Approx(.54491).margin(5e-6));
  CHECK(got.weights[1] == Approx(.45509).margin(5e-6));
}

TEST_CASE("B48b: groups are ranked by the sum of their two best choice scores where the rule says so") {
  std::vector<float> bias;
  for (const float v : {.9f, 0.f, .6f, .5f, .7f, .1f, .2f, .1f}) bias.push_back(v - .5f);
  RouterRule rule = DeepseekRule(4, 1);
  const std::vector<float> logits(8, 0.0f);
  CHECK(RunRoute(rule, 8, 2, logits, bias).ids == std::vector<int32_t>{2, 3});
  rule.group_score = GroupScore::kMax;
  CHECK(RunRoute(rule, 8, 2, logits, bias).ids == std::vector<int32_t>{0, 1});
}

TEST_CASE("B50: softmax runs over all experts before the pick, and normalising divides by the chosen sum") {
  const std::vector<float> logits = {2.f, 1.f, 0.f, -1.f};
  const Routed off = RunRoute(SoftmaxRule(), 4, 2, logits);
  CHECK(off.weights[0] == Approx(.64391).margin(5e-6));
  CHECK(off.weights[1] == Approx(.23688).margin(5e-6));
  const Routed on = RunRoute(SoftmaxRule(Normalize::kSum), 4, 2, logits);
  CHECK(on.weights[0] == Approx(.73106).margin(5e-6));
  CHECK(on.weights[1] == Approx(.26894).margin(5e-6));
  // Softmax over the chosen logits equals softmax over all, normalised.
  RouterRule chosen;
  chosen.score = Score::kSoftmaxOfChosen;
  const Routed of_chosen = RunRoute(chosen, 4, 2, logits);
  CHECK(of_chosen.weights[0] == Approx(on.weights[0]));
  // A shift of all logits changes nothing, also where exp would overflow.
  const Routed shifted = RunRoute(SoftmaxRule(), 4, 2, {502.f, 501.f, 500.f, 499.f});
  CHECK(shifted.weights[0] == Approx(.64391).margin(5e-6));
}

TEST_CASE("B51: the scaling factor multiplies every weight once, after normalising") {
  for (const float factor : {2.5f, 1.0f, 0.25f, 16.0f}) {
    RouterRule rule = DeepseekRule(1, 1);
    rule.scaling = factor;
    const Routed one = RunRoute(rule, 4, 1, {0.3f, -1.f, 2.f, 0.f}, std::vector<float>(4, 0.0f));
    CHECK(one.ids == std::vector<int32_t>{2});
    CHECK(one.weights[0] == Approx(factor));
    const Routed three = RunRoute(rule, 4, 3, {0.3f, -1.f, 2.f, 0.f}, std::vector<float>(4, 0.0f));
    CHECK(three.weights[0] + three.weights[1] + three.weights[2] == Approx(factor));
    RouterRule plain = SoftmaxRule();
    plain.scaling = factor;
    const Routed unnormalised = RunRoute(plain, 4, 2, {2.f, 1.f, 0.f, -1.f});
    CHECK(unnormalised.weights[0] == Approx(.64391 * factor).epsilon(1e-5));
  }
}

TEST_CASE("The correction bias decides the choice only, never the weight") {
  RouterRule rule = DeepseekRule(1, 1);
  rule.normalize = Normalize::kNone;
  const Routed got = RunRoute(rule, 3, 2, {0.f, 1.f, 2.f}, {5.f, 3.f, 0.f});
  CHECK(got.ids == std::vector<int32_t>{0, 1});
  CHECK(got.weights[0] == Approx(0.5));
  CHECK(got.weights[1] == Approx(0.731059));
}

TEST_CASE("Finite logits never make a weight that is not finite") {
  const std::vector<float> extreme = {3e38f, -3e38f, 0.f, 1e30f, -1e30f, 200.f, -200.f, 88.f};
  for (const Score score :
       {Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSqrtSoftplus, Score::kSparseMixer}) {
    for (const Normalize normalize : {Normalize::kNone, Normalize::kSum}) {
      for (int top_k = 1; top_k <= 8; ++top_k) {
        RouterRule rule;
        rule.score = score;
        rule.normalize = normalize;
        const Routed got = RunRoute(rule, 8, top_k, extreme);
        REQUIRE(got.status.ok());
        for (const float w : got.weights) CHECK(std::isfinite(w));
      }
    }
  }
  // All sigmoids underflow to 0: the weights stay 0.
  RouterRule rule;
  rule.score = Score::kSigmoid;
  rule.normalize = Normalize::kSum;
  const Routed zero = RunRoute(rule, 4, 2, std::vector<float>(4, -300.0f));
  CHECK(zero.weights == std::vector<float>{0.0f, 0.0f});
}

TEST_CASE("k equal to E gives every expert once") {
  for (const int experts : {1, 7, 300}) {
    std::vector<float> logits(experts);
    for (int e = 0; e < experts; ++e) logits[e] = static_cast<float>((e * 37) % experts);
    const Routed got = RunRoute(SoftmaxRule(), experts, experts, logits);
    REQUIRE(got.status.ok());
    CHECK(std::set<int32_t>(got.ids.begin(), got.ids.end()).size() == static_cast<size_t>(experts));
    for (int j = 1; j < experts; ++j) CHECK(logits[got.ids[j - 1]] >= logits[got.ids[j]]);
  }
}

TEST_CASE("No rows are routed to nothing") {
  CHECK(RunRoute(SoftmaxRule(), 12, 4, {}).status.ok());
  CHECK(RunRoute(SoftmaxRule(), 12, 4, {}, {}, true).status.ok());
}

TEST_CASE("Sizes and rules that do not fit are refused with their numbers") {
  std::vector<int32_t> ids(4);
  std::vector<float> weights(4);
  const std::vector<float> logits(16, 0.0f);
  CHECK(Contains(Route(SoftmaxRule(), 8, 2, logits, {}, ids, std::span(weights).first(3)), "wanted 2 x 2"));
  CHECK(Contains(Route(SoftmaxRule(), 7, 2, logits, {}, ids, weights), "16 logits"));
  CHECK(Contains(Route(SoftmaxRule(), 8, 9, logits, {}, ids, weights), "top_k in 1..8, got 9"));
  CHECK(Contains(Route(SoftmaxRule(), 8, 0, logits, {}, ids, weights), "got 0"));
  CHECK_FALSE(Route(SoftmaxRule(), 0, 1, logits, {}, ids, weights).ok());
  CHECK(Contains(RunRoute(DeepseekRule(3, 1), 8, 2, logits, std::vector<float>(8)).status, "3 equal groups"));
  CHECK(Contains(RunRoute(DeepseekRule(4, 5), 8, 2, logits, std::vector<float>(8)).status, "groups_kept in 1..4"));
  CHECK(Contains(RunRoute(DeepseekRule(4, 1), 8, 3, logits, std::vector<float>(8)).status, "more than the 2 experts"));
  CHECK(Contains(RunRoute(DeepseekRule(1, 1), 8, 2, logits).status, "wanted 8 correction biases, got 0"));
  CHECK(Contains(RunRoute(SoftmaxRule(), 8, 2, logits, std::vector<float>(8)).status, "wanted 0 correction biases"));
  std::vector<float> bias(8, 0.0f);
  bias[6] = kNan;
  CHECK(Contains(RunRoute(DeepseekRule(1, 1), 8, 2, logits, bias).status, "bias of expert 6"));
}

}  // namespace
}  // namespace moed
