// Routing of one row in double, by full sorts and the formulas as written: shares no code with the engine.
#ifndef MOED_TESTS_ENGINE_ROUTING_REFERENCE_H_
#define MOED_TESTS_ENGINE_ROUTING_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "engine/routing.h"

namespace moed::testing {

struct ReferenceRow {
  std::vector<int> ids;
  std::vector<double> weights;
  double margin = std::numeric_limits<double>::infinity();  // smallest gap at any cut; small ones may flip in float32
};

inline void NoteMargin(const std::vector<double>& sorted, size_t kept, ReferenceRow* row) {
  if (kept < sorted.size()) row->margin = std::min(row->margin, sorted[kept - 1] - sorted[kept]);
  for (size_t i = 1; i < kept; ++i) row->margin = std::min(row->margin, sorted[i - 1] - sorted[i]);
}

inline double ReferenceScore(RouterRule::Score score, const std::vector<double>& logits, int e) {
  switch (score) {
    case RouterRule::Score::kSoftmax: {
      double sum = 0.0;
      for (const double l : logits) sum += std::exp(l - logits[e]);
      return 1.0 / sum;
    }
    case RouterRule::Score::kSigmoid: return 1.0 / (1.0 + std::exp(-logits[e]));
    case RouterRule::Score::kSqrtSoftplus: return std::sqrt(std::log(1.0 + std::exp(logits[e])));
    default: return logits[e];
  }
}

inline void ReferenceSparseMixer(const RouterRule& rule, const std::vector<double>& logits, int top_k, ReferenceRow* row) {
  std::vector<bool> taken(logits.size(), false);
  for (int j = 0; j < top_k; ++j) {
    int best = -1;
    for (int e = 0; e < static_cast<int>(logits.size()); ++e) {
      if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    }
    double sum = 0.0;
    for (int e = 0; e < static_cast<int>(logits.size()); ++e) {
      const double gap = (logits[best] - logits[e]) / std::max(std::fabs(logits[e]), logits[best]);
      const double distance = std::fabs(gap - 2.0 * static_cast<double>(rule.mixer_noise));
      row->margin = std::min(row->margin, distance);
      if (!taken[e] && gap <= 2.0 * static_cast<double>(rule.mixer_noise)) sum += std::exp(logits[e] - logits[best]);
    }
    row->ids.push_back(best);
    row->weights.push_back(1.0 / sum);
    taken[best] = true;
  }
}

inline void ReferenceNormalize(const RouterRule& rule, std::vector<double>* weights) {
  double norm = 1.0;
  if (rule.normalize != RouterRule::Normalize::kNone) {
    const double p = rule.normalize == RouterRule::Normalize::kSum ? 1.0 : static_cast<double>(rule.norm_p);
    double sum = 0.0;
    for (const double w : *weights) sum += std::pow(w, p);
    norm = std::pow(sum, 1.0 / p) + static_cast<double>(rule.norm_epsilon);
  }
  for (double& w : *weights) w = w / norm * static_cast<double>(rule.scaling);
}

inline ReferenceRow Reference(const RouterRule& rule, const std::vector<double>& logits, const std::vector<double>& bias,
                              int top_k) {
  ReferenceRow row;
  const int experts = static_cast<int>(logits.size());
  if (rule.score == RouterRule::Score::kSparseMixer) {
    ReferenceSparseMixer(rule, logits, top_k, &row);
    ReferenceNormalize(rule, &row.weights);
    return row;
  }
  std::vector<double> choice(experts);
  for (int e = 0; e < experts; ++e) choice[e] = ReferenceScore(rule.score, logits, e) + (bias.empty() ? 0.0 : bias[e]);
  const int size = experts / rule.groups;
  std::vector<std::pair<double, int>> groups;
  for (int g = 0; g < rule.groups; ++g) {
    std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    const bool two = rule.group_score == RouterRule::GroupScore::kTopTwoSum && size > 1;
    groups.emplace_back(-(members[0] + (two ? members[1] : 0.0)), g);
  }
  std::sort(groups.begin(), groups.end());
  if (rule.groups_kept < rule.groups) {
    row.margin = std::min(row.margin, groups[rule.groups_kept].first - groups[rule.groups_kept - 1].first);
  }
  std::vector<std::pair<double, int>> candidates;
  for (int i = 0; i < rule.groups_kept; ++i) {
    for (int e = groups[i].second * size; e < (groups[i].second + 1) * size; ++e) candidates.emplace_back(-choice[e], e);
  }
  std::sort(candidates.begin(), candidates.end());
  std::vector<double> sorted;
  for (const auto& [negative, e] : candidates) sorted.push_back(-negative);
  NoteMargin(sorted, top_k, &row);
  for (int j = 0; j < top_k; ++j) row.ids.push_back(candidates[j].second);
  double chosen_sum = 0.0;
  for (const int e : row.ids) chosen_sum += std::exp(logits[e] - logits[row.ids[0]]);
  for (const int e : row.ids) {
    const bool of_chosen = rule.score == RouterRule::Score::kSoftmaxOfChosen;
    row.weights.push_back(of_chosen ? std::exp(logits[e] - logits[row.ids[0]]) / chosen_sum
                                    : ReferenceScore(rule.score, logits, e));
  }
  ReferenceNormalize(rule, &row.weights);
  return row;
}

}  // namespace moed::testing

#endif  // MOED_TESTS_ENGINE_ROUTING_REFERENCE_H_
