// One row of the router, worked on by a team: the rule of engine/routing.h in the form that a block of threads executes.
//
// A team is all members that run RouteRow with the same arguments: a block on the device, any number of threads on the host (where
// the tests run it). It has
//   int Rank(), Size();         of this member, 0 <= Rank() < Size()
//   void Sync();                a barrier: what members wrote before it, all see after it
//   uint32_t Max(uint32_t), uint64_t Max(uint64_t), float Sum(float);   over all members, the same value for each
// All members take the same branches around these. Element i of an array belongs to member i % Size(); where a member touches
// elements of others, a Sync lies between.
//
// Experts are ordered by keys, unsigned numbers that rise with the float. Which expert is chosen depends on keys and ids alone, so
// that the size of the team shows in the last bits of sums only.
#ifndef MOED_KERNELS_CUDA_ROUTER_RULES_H_
#define MOED_KERNELS_CUDA_ROUTER_RULES_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/host_device.h"
#include "kernels/router.h"

// Teams of the device exist in device code only, so nvcc must not compile these functions for its host as well.
#ifdef __CUDACC__
#define MOED_TEAM __device__
#else
#define MOED_TEAM
#endif

namespace moed::cuda {

// One row and its memory. Pointers may be to any memory that the whole team reaches.
struct RouterRow {
  RouterRule rule;
  int32_t experts = 0;  // E, divisible by rule.groups
  int32_t top_k = 0;    // 1 <= k <= E
  bool own_gate = false;
  const float* logits = nullptr;           // [E]
  const float* correction_bias = nullptr;  // [E], or null when the rule has none
  uint32_t* keys = nullptr;                // [E], scratch
  uint32_t* order = nullptr;               // [E], scratch; after kRouted its first k elements are the chosen ids
  float* weights = nullptr;                // [k], written when kRouted
};

enum class RowOutcome : uint8_t {
  kRouted,
  kNotFinite,  // own_gate, and a logit is not finite
  kRefused,    // NaN or +Inf, or fewer finite logits than k in the groups that are kept
};

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
inline constexpr uint32_t kNoKey = 0;            // below the key of -Inf: cannot be chosen
inline constexpr uint32_t kBadKey = 0xFFFFFFFF;  // above the key of every finite number

// a < b implies OrderKey(a) < OrderKey(b); both zeros are alike. Not for NaN.
MOED_HD inline uint32_t OrderKey(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value == 0.0f ? 0.0f : value);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

MOED_HD inline float KeyValue(uint32_t key) { return std::bit_cast<float>((key & 0x80000000u) ? key ^ 0x80000000u : ~key); }

// Orders by key, then by id, the lower first: the larger ranked value is the better expert. No two are equal.
MOED_HD inline uint64_t Ranked(uint32_t key, uint32_t id) { return static_cast<uint64_t>(key) << 32 | (0xFFFFFFFFu - id); }
MOED_HD inline uint32_t RankedId(uint64_t ranked) { return 0xFFFFFFFFu - static_cast<uint32_t>(ranked); }

MOED_HD inline float Sigmoid(float x) {
  // The exponent is never positive, so nothing overflows; NaN takes the second branch and stays NaN.
  const float e = std::exp(-std::fabs(x));
  return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

MOED_HD inline float SqrtSoftplus(float x) {
  return std::sqrt((x < 0.0f ? 0.0f : x) + std::log1p(std::exp(-std::fabs(x))));
}

// From a logit to the score that the weight is made of.
struct Scorer {
  RouterRule::Score score;
  float top = 0.0f;  // kSoftmax: the largest logit, and the sum of exp(logit - top)
  float sum = 1.0f;

  MOED_HD float operator()(float logit) const {
    switch (score) {
      case RouterRule::Score::kSoftmax: return std::exp(logit - top) / sum;
      case RouterRule::Score::kSigmoid: return Sigmoid(logit);
      case RouterRule::Score::kSqrtSoftplus: return SqrtSoftplus(logit);
      case RouterRule::Score::kSoftmaxOfChosen:
      case RouterRule::Score::kSparseMixer: break;
    }
    return logit;
  }
};

// Copies the logits' bits to `keys`; returns the largest key, kBadKey when the row cannot be routed for a logit's sake.
template <class Team>
MOED_TEAM uint32_t LoadLogits(Team& team, const RouterRow& row) {
  uint32_t top = kNoKey;
  for (int e = team.Rank(); e < row.experts; e += team.Size()) {
    const float x = row.logits[e];
    row.keys[e] = std::bit_cast<uint32_t>(x);
    const bool bad = !(x < -kMinusInfinity) || (row.own_gate && x == kMinusInfinity);
    const uint32_t key = bad ? kBadKey : OrderKey(x);
    top = key > top ? key : top;
  }
  return team.Max(top);
}

template <class Team>
MOED_TEAM Scorer MakeScorer(Team& team, const RouterRow& row, float top) {
  Scorer scorer{row.rule.score, top};
  if (scorer.score != RouterRule::Score::kSoftmax) return scorer;
  float sum = 0.0f;
  for (int e = team.Rank(); e < row.experts; e += team.Size()) sum += std::exp(std::bit_cast<float>(row.keys[e]) - top);
  scorer.sum = team.Sum(sum);
  return scorer;
}

// Turns `keys` from the logits' bits into what the choice is made by, kNoKey where the logit is -Inf.
template <class Team>
MOED_TEAM void KeyExperts(Team& team, const RouterRow& row, const Scorer& scorer) {
  // Where nothing is added to the score, the logit itself orders the experts, so that rounding cannot invent a tie.
  const bool by_logit = !row.rule.correction_bias && row.rule.groups == 1;
  for (int e = team.Rank(); e < row.experts; e += team.Size()) {
    const float x = std::bit_cast<float>(row.keys[e]);
    if (x == kMinusInfinity) {
      row.keys[e] = kNoKey;
    } else if (by_logit) {
      row.keys[e] = OrderKey(x);
    } else {
      row.keys[e] = OrderKey(scorer(x) + (row.correction_bias ? row.correction_bias[e] : 0.0f));
    }
  }
}

// The key of a group from those of its experts.
MOED_HD inline uint32_t GroupKey(RouterRule::GroupScore score, const uint32_t* keys, int size) {
  const uint32_t lowest = OrderKey(kMinusInfinity);  // that of masked experts, too
  uint32_t best = lowest;
  uint32_t second = lowest;
  for (int i = 0; i < size; ++i) {
    const uint32_t key = keys[i];
    const uint32_t loser = key < best ? key : best;
    best = key > best ? key : best;
    second = loser > second ? loser : second;
  }
  if (score == RouterRule::GroupScore::kMax || size == 1) return best;
  const float sum = KeyValue(best) + KeyValue(second);
  return std::isnan(sum) ? lowest : OrderKey(sum);  // +Inf - Inf after an overflow
}

// Sets the keys of the experts outside the best groups to kNoKey. Uses `order`.
template <class Team>
MOED_TEAM void DropGroups(Team& team, const RouterRow& row) {
  const int groups = row.rule.groups;
  const int size = row.experts / groups;
  team.Sync();
  for (int g = team.Rank(); g < groups; g += team.Size()) row.order[g] = GroupKey(row.rule.group_score, row.keys + g * size, size);
  team.Sync();
  for (int g = team.Rank(); g < groups; g += team.Size()) {
    const uint64_t mine = Ranked(row.order[g], g);
    int better = 0;
    for (int other = 0; other < groups; ++other) better += Ranked(row.order[other], other) > mine;
    if (better < row.rule.groups_kept) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) row.keys[e] = kNoKey;
  }
  team.Sync();
}

// The best expert of this member, 0 when it has none left.
template <class Team>
MOED_TEAM uint64_t BestOfMember(Team& team, const RouterRow& row) {
  uint64_t best = 0;
  for (int e = team.Rank(); e < row.experts; e += team.Size()) {
    const uint32_t key = row.keys[e];
    const uint64_t ranked = key == kNoKey ? 0 : Ranked(key, e);
    best = ranked > best ? ranked : best;
  }
  return best;
}

// Few of many: k times the best of what is left. False when fewer than k can be chosen.
template <class Team>
MOED_TEAM bool PickExperts(Team& team, const RouterRow& row) {
  uint64_t best = BestOfMember(team, row);
  for (int j = 0; j < row.top_k; ++j) {
    const uint64_t winner = team.Max(best);
    if (winner == 0) return false;
    const uint32_t id = RankedId(winner);
    if (team.Rank() == 0) row.order[j] = id;
    if (best == winner) {  // ids differ, so this is the one member that the expert belongs to
      row.keys[id] = kNoKey;
      best = BestOfMember(team, row);
    }
  }
  team.Sync();
  return true;
}

MOED_HD inline void PutBetterFirst(const RouterRow& row, int first, int second) {
  if (second >= row.experts) return;
  const uint32_t key_a = row.keys[first], key_b = row.keys[second];
  const uint32_t id_a = row.order[first], id_b = row.order[second];
  if (Ranked(key_a, id_a) > Ranked(key_b, id_b)) return;
  row.keys[first] = key_b, row.order[first] = id_b;
  row.keys[second] = key_a, row.order[second] = id_a;
}

// Many: sorts keys and ids, the best first. False when fewer than k can be chosen.
// A bitonic network in which every comparator puts the better one at the lower index: what would lie behind the last expert is
// worse than all and never moves, so any E will do.
template <class Team>
MOED_TEAM bool SortExperts(Team& team, const RouterRow& row) {
  for (int e = team.Rank(); e < row.experts; e += team.Size()) row.order[e] = e;
  team.Sync();
  for (int run = 1; run < row.experts; run *= 2) {  // sorted runs of this length are merged in pairs
    // `i` counts the comparators; the first of them compare a run with its neighbour read backwards.
    for (int i = team.Rank(); i < row.experts; i += team.Size()) {
      const int at = i & (run - 1);
      const int base = (i - at) * 2;
      if (base + at >= row.experts) break;
      PutBetterFirst(row, base + at, base + 2 * run - 1 - at);
    }
    team.Sync();
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int i = team.Rank(); i < row.experts; i += team.Size()) {
        const int at = i & (gap - 1);
        const int first = (i - at) * 2 + at;
        if (first >= row.experts) break;
        PutBetterFirst(row, first, first + gap);
      }
      team.Sync();
    }
  }
  return row.keys[row.top_k - 1] != kNoKey;
}

// The chosen experts' scores, as float bits in `keys`.
template <class Team>
MOED_TEAM void ScoreChosen(Team& team, const RouterRow& row, const Scorer& scorer) {
  if (scorer.score != RouterRule::Score::kSoftmaxOfChosen) {
    for (int j = team.Rank(); j < row.top_k; j += team.Size()) {
      row.keys[j] = std::bit_cast<uint32_t>(scorer(row.logits[row.order[j]]));
    }
    return;
  }
  uint32_t top_key = kNoKey;
  for (int j = team.Rank(); j < row.top_k; j += team.Size()) {
    const uint32_t key = OrderKey(row.logits[row.order[j]]);
    top_key = key > top_key ? key : top_key;
  }
  const float top = KeyValue(team.Max(top_key));
  float sum = 0.0f;
  for (int j = team.Rank(); j < row.top_k; j += team.Size()) sum += std::exp(row.logits[row.order[j]] - top);
  sum = team.Sum(sum);
  for (int j = team.Rank(); j < row.top_k; j += team.Size()) {
    row.keys[j] = std::bit_cast<uint32_t>(std::exp(row.logits[row.order[j]] - top) / sum);
  }
}

// The same for kSparseMixer, after SortExperts: pick j's weight is its share in a softmax over what is left then and lies near it.
template <class Team>
MOED_TEAM void ScorePicks(Team& team, const RouterRow& row) {
  const float limit = 2.0f * row.rule.mixer_noise;
  for (int j = 0; j < row.top_k; ++j) {
    const float top = KeyValue(row.keys[j]);
    float sum = 0.0f;
    for (int i = j + team.Rank(); i < row.experts; i += team.Size()) {
      if (row.keys[i] == kNoKey) break;  // so are all behind it
      const float value = KeyValue(row.keys[i]);
      const float size = std::fabs(value) < top ? top : std::fabs(value);
      // Written so that 0 / 0, two zero logits, takes part.
      const bool far = (top - value) / size > limit;
      if (!far) sum += std::exp(value - top);
    }
    sum = team.Sum(sum);
    if (j % team.Size() == team.Rank()) row.weights[j] = 1.0f / sum;
  }
  team.Sync();  // the keys are free now
  for (int j = team.Rank(); j < row.top_k; j += team.Size()) row.keys[j] = std::bit_cast<uint32_t>(row.weights[j]);
}

// Writes the weights: the scores in `keys`, normalised and scaled.
template <class Team>
MOED_TEAM void NormalizeAndScale(Team& team, const RouterRow& row) {
  float norm = 1.0f;
  if (row.rule.normalize != RouterRule::Normalize::kNone) {
    const bool powers = row.rule.normalize == RouterRule::Normalize::kPNorm;
    float sum = 0.0f;
    for (int j = team.Rank(); j < row.top_k; j += team.Size()) {
      const float score = std::bit_cast<float>(row.keys[j]);
      sum += powers ? std::pow(std::fabs(score), row.rule.norm_p) : score;
    }
    sum = team.Sum(sum);
    norm = (powers ? std::pow(sum, 1.0f / row.rule.norm_p) : sum) + row.rule.norm_epsilon;
  }
  // All scores can underflow to 0; finite logits must not make NaN, so such weights stay 0.
  if (norm == 0.0f) norm = 1.0f;
  for (int j = team.Rank(); j < row.top_k; j += team.Size()) {
    row.weights[j] = std::bit_cast<float>(row.keys[j]) / norm * row.rule.scaling;
  }
}

// Routes one row. After kRouted each weight is written by the member that it belongs to, and the ids are there for all members. The
// caller syncs before the memory is used again.
template <class Team>
MOED_TEAM RowOutcome RouteRow(Team& team, const RouterRow& row) {
  const uint32_t top_key = LoadLogits(team, row);
  if (top_key == kBadKey) return row.own_gate ? RowOutcome::kNotFinite : RowOutcome::kRefused;
  if (top_key == OrderKey(kMinusInfinity)) return RowOutcome::kRefused;
  const Scorer scorer = MakeScorer(team, row, KeyValue(top_key));
  KeyExperts(team, row, scorer);
  if (row.rule.groups > 1) DropGroups(team, row);
  // A pick costs about as much as two passes of a sort. Both give the same order.
  const bool mixer = row.rule.score == RouterRule::Score::kSparseMixer;
  const bool sort = mixer || row.top_k > 16 + row.experts / 64;
  if (!(sort ? SortExperts(team, row) : PickExperts(team, row))) return RowOutcome::kRefused;
  if (sort && !mixer) team.Sync();  // the last look at the keys is done
  if (mixer) {
    ScorePicks(team, row);
  } else {
    ScoreChosen(team, row, scorer);
  }
  NormalizeAndScale(team, row);
  return RowOutcome::kRouted;
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_ROUTER_RULES_H_
