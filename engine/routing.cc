#include "engine/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Shape {
  int experts = 0;
  int top_k = 0;
  int64_t rows = 0;
};

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

absl::Status CheckRule(const RouterRule& rule, int experts, int top_k) {
  if (experts < 1) return Invalid(absl::StrCat("router: wanted at least 1 expert, got ", experts));
  if (top_k < 1 || top_k > experts) {
    return Invalid(absl::StrCat("router: wanted top_k in 1..", experts, ", got ", top_k));
  }
  if (rule.groups < 1 || experts % rule.groups != 0) {
    return Invalid(absl::StrCat("router: ", experts, " experts cannot be split into ", rule.groups, " equal groups"));
  }
  if (rule.groups_kept < 1 || rule.groups_kept > rule.groups) {
    return Invalid(absl::StrCat("router: wanted groups_kept in 1..", rule.groups, ", got ", rule.groups_kept));
  }
  const int64_t reachable = static_cast<int64_t>(rule.groups_kept) * (experts / rule.groups);
  if (top_k > reachable) {
    return Invalid(absl::StrCat("router: top_k ", top_k, " is more than the ", reachable, " experts of ", rule.groups_kept,
                                " groups of ", experts / rule.groups));
  }
  if (rule.normalize == RouterRule::Normalize::kPNorm && !(rule.norm_p > 0.0f && std::isfinite(rule.norm_p))) {
    return Invalid(absl::StrCat("router: wanted a positive finite p of the p-norm, got ", rule.norm_p));
  }
  if (rule.score == RouterRule::Score::kSparseMixer && (rule.groups != 1 || rule.correction_bias)) {
    return Invalid("router: sequential masked picks (sparsemixer) take neither groups nor a correction bias");
  }
  return absl::OkStatus();
}

absl::Status CheckBias(const RouterRule& rule, int experts, std::span<const float> bias) {
  const size_t wanted = rule.correction_bias ? static_cast<size_t>(experts) : 0;
  if (bias.size() != wanted) {
    return Invalid(absl::StrCat("router: wanted ", wanted, " correction biases, got ", bias.size()));
  }
  for (size_t e = 0; e < bias.size(); ++e) {
    // -Inf is an ordinary way to rank an expert last; the others would make scores that cannot be ordered.
    if (std::isnan(bias[e]) || bias[e] == -kNegativeInfinity) {
      return Invalid(absl::StrCat("router: correction bias of expert ", e, " is ", bias[e], ", wanted finite or -Inf"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const Shape& shape, size_t logits, size_t ids, size_t weights) {
  if (logits != static_cast<size_t>(shape.rows) * shape.experts) {
    return Invalid(absl::StrCat("router: ", logits, " logits are not a whole number of rows of ", shape.experts));
  }
  const size_t slots = static_cast<size_t>(shape.rows) * shape.top_k;
  if (ids != slots || weights != slots) {
    return Invalid(absl::StrCat("router: wanted ", shape.rows, " x ", shape.top_k, " ids and weights, got ", ids, " and ",
                                weights));
  }
  return absl::OkStatus();
}

float Sigmoid(float x) {
  // The exponent is never positive, so nothing overflows.
  const float e = std::exp(-std::fabs(x));
  return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

float SqrtSoftplus(float x) { return std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)))); }

// out[i] = exp(in[i] - max) / sum; -Inf gives 0. At least one input is finite.
void Softmax(std::span<const float> in, std::span<float> out) {
  const float top = *std::max_element(in.begin(), in.end());
  float sum = 0.0f;
  for (size_t i = 0; i < in.size(); ++i) sum += out[i] = std::exp(in[i] - top);
  for (float& value : out) value /= sum;
}

// Routes one row at a time; owns the scratch memory of all rows of a call.
class RowRouter {
 public:
  RowRouter(const RouterRule& rule, const Shape& shape, std::span<const float> bias)
      : rule_(rule), shape_(shape), bias_(bias), scores_(shape.experts), choice_(shape.experts) {
    if (rule.groups > 1) group_score_.resize(rule.groups);
    order_.reserve(shape.experts);
  }

  // Chooses for a row without NaN and +Inf. Returns how many experts could be chosen; when this is less than k, nothing
  // is written.
  int Run(std::span<const float> logits, std::span<int32_t> ids, std::span<float> weights) {
    if (rule_.score == RouterRule::Score::kSparseMixer) return RunSparseMixer(logits, ids, weights);
    Score(logits);
    ListCandidates(logits);
    if (static_cast<int>(order_.size()) < shape_.top_k) return static_cast<int>(order_.size());
    const auto better = [this](int32_t a, int32_t b) { return choice_[a] != choice_[b] ? choice_[a] > choice_[b] : a < b; };
    std::partial_sort(order_.begin(), order_.begin() + shape_.top_k, order_.end(), better);
    std::copy_n(order_.begin(), shape_.top_k, ids.begin());
    Weigh(logits, ids, weights);
    return static_cast<int>(order_.size());
  }

 private:
  // Fills scores_ (what weights are made of) and choice_ (what the order is made by).
  void Score(std::span<const float> logits) {
    switch (rule_.score) {
      case RouterRule::Score::kSoftmax:
        if (*std::max_element(logits.begin(), logits.end()) == kNegativeInfinity) {
          std::fill(scores_.begin(), scores_.end(), 0.0f);
        } else {
          Softmax(logits, scores_);
        }
        break;
      case RouterRule::Score::kSigmoid:
        std::transform(logits.begin(), logits.end(), scores_.begin(), Sigmoid);
        break;
      case RouterRule::Score::kSqrtSoftplus:
        std::transform(logits.begin(), logits.end(), scores_.begin(), SqrtSoftplus);
        break;
      case RouterRule::Score::kSoftmaxOfChosen:
      case RouterRule::Score::kSparseMixer:
        std::copy(logits.begin(), logits.end(), scores_.begin());
        break;
    }
    // Every score rises with its logit. Where nothing is added to it, the logit itself orders the experts, so that
    // rounding (sigmoid(20) == sigmoid(30) == 1 in float32) cannot invent a tie.
    if (!rule_.correction_bias && rule_.groups == 1) {
      std::copy(logits.begin(), logits.end(), choice_.begin());
      return;
    }
    for (int e = 0; e < shape_.experts; ++e) {
      choice_[e] = logits[e] == kNegativeInfinity ? kNegativeInfinity : scores_[e] + (bias_.empty() ? 0.0f : bias_[e]);
    }
  }

  // Fills order_ with the experts that may be chosen, ascending: finite logit, in a kept group.
  void ListCandidates(std::span<const float> logits) {
    order_.clear();
    if (rule_.groups == 1) {
      for (int e = 0; e < shape_.experts; ++e) {
        if (logits[e] != kNegativeInfinity) order_.push_back(e);
      }
      return;
    }
    const int size = shape_.experts / rule_.groups;
    for (int g = 0; g < rule_.groups; ++g) group_score_[g] = GroupScore(std::span(choice_).subspan(g * size, size));
    group_order_.resize(rule_.groups);
    std::iota(group_order_.begin(), group_order_.end(), 0);
    const auto better = [this](int a, int b) {
      return group_score_[a] != group_score_[b] ? group_score_[a] > group_score_[b] : a < b;
    };
    std::partial_sort(group_order_.begin(), group_order_.begin() + rule_.groups_kept, group_order_.end(), better);
    for (int i = 0; i < rule_.groups_kept; ++i) {
      for (int e = group_order_[i] * size; e < (group_order_[i] + 1) * size; ++e) {
        if (logits[e] != kNegativeInfinity) order_.push_back(e);
      }
    }
  }

  float GroupScore(std::span<const float> choice) const {
    float best = kNegativeInfinity;
    float second = kNegativeInfinity;
    for (const float value : choice) {
      if (value > best) {
        second = best;
        best = value;
      } else if (value > second) {
        second = value;
      }
    }
    if (rule_.group_score == RouterRule::GroupScore::kMax || choice.size() == 1) return best;
    const float sum = best + second;
    return std::isnan(sum) ? kNegativeInfinity : sum;  // +Inf - Inf after an overflow: must stay comparable
  }

  // The weights of the chosen experts, normalised and scaled.
  void Weigh(std::span<const float> logits, std::span<const int32_t> ids, std::span<float> weights) const {
    if (rule_.score == RouterRule::Score::kSoftmaxOfChosen) {
      for (size_t j = 0; j < ids.size(); ++j) weights[j] = logits[ids[j]];
      Softmax(weights, weights);
    } else {
      for (size_t j = 0; j < ids.size(); ++j) weights[j] = scores_[ids[j]];
    }
    NormalizeAndScale(weights);
  }

  void NormalizeAndScale(std::span<float> weights) const {
    float norm = 0.0f;
    switch (rule_.normalize) {
      case RouterRule::Normalize::kNone:
        norm = 1.0f;
        break;
      case RouterRule::Normalize::kSum:
        for (const float w : weights) norm += w;
        norm += rule_.norm_epsilon;
        break;
      case RouterRule::Normalize::kPNorm:
        for (const float w : weights) norm += std::pow(std::fabs(w), rule_.norm_p);
        norm = std::pow(norm, 1.0f / rule_.norm_p) + rule_.norm_epsilon;
        break;
    }
    // All scores can underflow to 0; finite logits must not make NaN, so such weights stay 0.
    if (norm == 0.0f) norm = 1.0f;
    for (float& w : weights) w = w / norm * rule_.scaling;
  }

  // Sequential picks: each takes the highest remaining logit; its weight is its share in a softmax over the remaining
  // entries whose relative gap to it is at most twice the noise.
  int RunSparseMixer(std::span<const float> logits, std::span<int32_t> ids, std::span<float> weights) {
    const int finite = shape_.experts - static_cast<int>(std::count(logits.begin(), logits.end(), kNegativeInfinity));
    if (finite < shape_.top_k) return finite;
    std::copy(logits.begin(), logits.end(), choice_.begin());
    const float limit = 2.0f * rule_.mixer_noise;
    for (int j = 0; j < shape_.top_k; ++j) {
      const int pick = static_cast<int>(std::max_element(choice_.begin(), choice_.end()) - choice_.begin());
      const float top = choice_[pick];
      float sum = 0.0f;
      for (const float value : choice_) {
        if (value == kNegativeInfinity) continue;
        // The gap is relative to the larger of |value| and top. Written so that 0 / 0, two zero logits, takes part.
        const bool far = (top - value) / std::max(std::fabs(value), top) > limit;
        if (!far) sum += std::exp(value - top);
      }
      ids[j] = pick;
      weights[j] = 1.0f / sum;
      choice_[pick] = kNegativeInfinity;
    }
    NormalizeAndScale(weights);
    return finite;
  }

  const RouterRule& rule_;
  const Shape shape_;
  const std::span<const float> bias_;
  std::vector<float> scores_;       // [E]
  std::vector<float> choice_;       // [E]
  std::vector<int32_t> order_;      // candidates
  std::vector<float> group_score_;  // [groups]
  std::vector<int> group_order_;    // [groups]
};

// A row that a caller sent: NaN and +Inf are refused. Tells whether the row has -Inf in it.
absl::Status CheckSentRow(int64_t row, std::span<const float> logits, bool* has_masked) {
  *has_masked = false;
  for (size_t e = 0; e < logits.size(); ++e) {
    if (std::isfinite(logits[e])) continue;
    if (logits[e] != kNegativeInfinity) {
      return Invalid(absl::StrCat("router logits: row ", row, ", expert ", e, " is ", logits[e], ", wanted finite or -Inf"));
    }
    *has_masked = true;
  }
  return absl::OkStatus();
}

absl::Status CheckCall(const RouterRule& rule, const Shape& shape, std::span<const float> logits,
                       std::span<const float> bias, size_t ids, size_t weights) {
  if (auto status = CheckRule(rule, shape.experts, shape.top_k); !status.ok()) return status;
  if (auto status = CheckBias(rule, shape.experts, bias); !status.ok()) return status;
  return CheckSizes(shape, logits.size(), ids, weights);
}

Shape MakeShape(int experts, int top_k, size_t logits) {
  return {experts, top_k, experts > 0 ? static_cast<int64_t>(logits / experts) : 0};
}

}  // namespace

absl::Status Route(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                   std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights) {
  const Shape shape = MakeShape(experts, top_k, logits.size());
  if (auto status = CheckCall(rule, shape, logits, bias, ids.size(), weights.size()); !status.ok()) return status;
  RowRouter router(rule, shape, bias);
  // All rows are checked before the first is written. Only a row with -Inf can lack experts, and which groups it keeps is
  // known only after routing it: such rows are routed twice.
  std::vector<int32_t> trial_ids(top_k);
  std::vector<float> trial_weights(top_k);
  for (int64_t t = 0; t < shape.rows; ++t) {
    const auto row = logits.subspan(t * experts, experts);
    bool has_masked = false;
    if (auto status = CheckSentRow(t, row, &has_masked); !status.ok()) return status;
    if (!has_masked) continue;
    const int found = router.Run(row, trial_ids, trial_weights);
    if (found < top_k) {
      return Invalid(absl::StrCat("router logits: row ", t, " has ", found, " finite logits",
                                  rule.groups > 1 ? " in the groups that it keeps" : "", ", wanted at least ", top_k));
    }
  }
  for (int64_t t = 0; t < shape.rows; ++t) {
    router.Run(logits.subspan(t * experts, experts), ids.subspan(t * top_k, top_k), weights.subspan(t * top_k, top_k));
  }
  return absl::OkStatus();
}

absl::Status RouteOwnGate(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                          std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights) {
  const Shape shape = MakeShape(experts, top_k, logits.size());
  if (auto status = CheckCall(rule, shape, logits, bias, ids.size(), weights.size()); !status.ok()) return status;
  RowRouter router(rule, shape, bias);
  for (int64_t t = 0; t < shape.rows; ++t) {
    const auto row = logits.subspan(t * experts, experts);
    const auto row_ids = ids.subspan(t * top_k, top_k);
    const auto row_weights = weights.subspan(t * top_k, top_k);
    if (std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) {
      router.Run(row, row_ids, row_weights);
    } else {
      std::iota(row_ids.begin(), row_ids.end(), 0);
      std::fill(row_weights.begin(), row_weights.end(), std::numeric_limits<float>::quiet_NaN());
    }
  }
  return absl::OkStatus();
}

}  // namespace moed
