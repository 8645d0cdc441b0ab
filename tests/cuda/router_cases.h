// Calls of the router that host teams and devices are both held to: rules, rows, and what may differ from engine/routing.
#ifndef MOED_TESTS_CUDA_ROUTER_CASES_H_
#define MOED_TESTS_CUDA_ROUTER_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/router.h"

namespace moed::testing {

struct RouterCase {
  RouterRule rule;
  int experts = 1;
  int top_k = 1;

  std::string Name() const {
    return absl::StrCat("score ", rule.score, ", E=", experts, ", k=", top_k, ", groups ", rule.groups_kept, "/", rule.groups,
                        " by ", rule.group_score, ", normalize ", rule.normalize, rule.correction_bias ? ", bias" : "");
  }
};

struct GroupLayout {
  int experts, groups, kept;
};

// Appends `rule` with the numbers of chosen experts that take different ways: one, a few, all that can be reached.
inline void AddTopKs(const RouterRule& rule, int experts, std::vector<RouterCase>* cases) {
  const int reachable = rule.groups_kept * (experts / rule.groups);
  int last = 0;
  for (const int top_k : {1, std::min(8, reachable), reachable}) {
    if (top_k != last) cases->push_back({rule, experts, top_k});
    last = top_k;
  }
}

// Every score, normalisation, group score, with and without bias and groups, over all layouts.
inline std::vector<RouterCase> RouterCases() {
  using Rule = RouterRule;
  std::vector<RouterCase> cases;
  const std::vector<GroupLayout> layouts = {{1, 1, 1},   {2, 1, 1},   {2, 2, 1},   {8, 1, 1},   {8, 4, 2},     {60, 1, 1},
                                            {60, 5, 2},  {128, 1, 1}, {128, 8, 4}, {256, 1, 1}, {256, 8, 4},   {256, 64, 9},
                                            {896, 1, 1}, {896, 2, 2}, {896, 28, 3}, {5000, 1, 1}, {5000, 2500, 1700}};
  for (const auto& [experts, groups, kept] : layouts) {
    Rule rule;
    rule.groups = groups;
    rule.groups_kept = kept;
    rule.norm_p = 2.0f;
    rule.norm_epsilon = 1e-20f;
    rule.scaling = 2.5f;
    for (const auto score :
         {Rule::Score::kSoftmax, Rule::Score::kSoftmaxOfChosen, Rule::Score::kSigmoid, Rule::Score::kSqrtSoftplus}) {
      for (const auto normalize : {Rule::Normalize::kNone, Rule::Normalize::kSum, Rule::Normalize::kPNorm}) {
        for (const bool bias : {false, true}) {
          rule.score = score;
          rule.normalize = normalize;
          rule.correction_bias = bias;
          rule.group_score = (cases.size() % 2) ? Rule::GroupScore::kTopTwoSum : Rule::GroupScore::kMax;
          AddTopKs(rule, experts, &cases);
        }
      }
    }
    if (groups > 1) continue;
    rule.correction_bias = false;
    rule.score = Rule::Score::kSparseMixer;
    for (const float noise : {0.01f, 0.4f, 0.8f}) {
      rule.mixer_noise = noise;
      rule.normalize = noise == 0.4f ? Rule::Normalize::kSum : Rule::Normalize::kNone;
      for (const int top_k : {1, 2, 8}) {
        if (top_k <= experts) cases.push_back({rule, experts, top_k});
      }
    }
  }
  return cases;
}

// Rows [rows, E] that any rule takes: random ones, among them rows of ties, of scores that saturate, and with zeros of both signs;
// where k leaves room, rows in which a third of the experts is masked.
inline std::vector<float> RandomLogits(const RouterCase& c, int rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(static_cast<size_t>(rows) * c.experts);
  for (int t = 0; t < rows; ++t) {
    const std::span<float> row(logits.data() + static_cast<size_t>(t) * c.experts, c.experts);
    for (float& x : row) x = normal(random);
    const int kind = (t + seed) % 6;
    if (kind == 1) std::transform(row.begin(), row.end(), row.begin(), [](float x) { return std::round(x); });  // ties, -0
    if (kind == 2) std::transform(row.begin(), row.end(), row.begin(), [](float x) { return 25.0f + x; });
    const bool room = c.rule.groups == 1 && c.top_k <= c.experts / 2;
    for (int e = 0; kind == 3 && room && e < c.experts; e += 3) row[e] = -std::numeric_limits<float>::infinity();
  }
  return logits;
}

// Empty when the rule has none. Some experts rank last.
inline std::vector<float> RandomBias(const RouterCase& c, uint32_t seed) {
  std::mt19937 random(seed ^ 0x5EED);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  std::vector<float> bias(c.rule.correction_bias ? c.experts : 0);
  for (float& b : bias) b = normal(random);
  for (size_t e = 5; e < bias.size(); e += 11) bias[e] = -std::numeric_limits<float>::infinity();
  return bias;
}

// How far a weight may be from the host's, relative: for exp and pow, and since the host adds up to E terms one after the other,
// where each addition can round the same way.
inline double WeightTolerance(const RouterCase& c) { return 1e-5 + 0x1p-24 * c.experts; }

// What the choice is made by, in double, and how large the numbers are that it was added from.
struct Choice {
  std::vector<double> value, size;
};

inline Choice ChoiceOf(const RouterCase& c, std::span<const float> logits, std::span<const float> bias) {
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  Choice choice;
  for (int e = 0; e < c.experts; ++e) {
    const double x = logits[e];
    double score = x;
    if (c.rule.score == RouterRule::Score::kSoftmax) score = std::exp(x) / sum;
    if (c.rule.score == RouterRule::Score::kSigmoid) score = 1.0 / (1.0 + std::exp(-x));
    if (c.rule.score == RouterRule::Score::kSqrtSoftplus) score = std::sqrt(std::log1p(std::exp(x)));
    const double added = bias.empty() ? 0.0 : bias[e];
    choice.value.push_back(score + added);
    choice.size.push_back(std::fabs(score) + std::fabs(added));
  }
  return choice;
}

// Whether the last group that is kept and the first that is not are as good as equal.
inline bool GroupsAreClose(const RouterCase& c, const Choice& choice) {
  if (c.rule.groups_kept == c.rule.groups) return false;
  const int members = c.experts / c.rule.groups;
  std::vector<double> scores;
  for (int g = 0; g < c.rule.groups; ++g) {
    std::vector<double> group(choice.value.begin() + g * members, choice.value.begin() + (g + 1) * members);
    std::sort(group.rbegin(), group.rend());
    const bool two = c.rule.group_score == RouterRule::GroupScore::kTopTwoSum && members > 1;
    scores.push_back(group[0] + (two ? group[1] : 0.0));
  }
  std::sort(scores.rbegin(), scores.rend());
  const double kept = scores[c.rule.groups_kept - 1], dropped = scores[c.rule.groups_kept];
  return kept == dropped || kept - dropped <= 1e-5 * std::max({std::fabs(kept), std::fabs(dropped), 0.1});
}

// Whether float32 may take expert `a` for `b` and the other way round. Never where the logits themselves order the experts.
inline bool MayBeSwapped(const RouterCase& c, const Choice& choice, int a, int b) {
  if (c.rule.groups == 1 && !c.rule.correction_bias) return false;
  if (choice.value[a] == choice.value[b]) return false;  // a tie in truth, and so for all
  if (GroupsAreClose(c, choice)) return true;
  if (std::isinf(choice.value[a]) || std::isinf(choice.value[b])) return false;
  return std::fabs(choice.value[a] - choice.value[b]) <= 1e-5 * std::max(choice.size[a], choice.size[b]);
}

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_ROUTER_CASES_H_
