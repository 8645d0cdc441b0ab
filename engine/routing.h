// Routing: from router logits to the experts of each token and their weights.
//
// A rule is a set of properties (score, what the choice is made by, groups, normalisation, scaling); each model family is
// a value of it. All arithmetic is float32; ties go to the lower expert id; the correction bias decides the choice only,
// never the weight. Pure functions, safe from any thread.
// Source of the rules: the reference implementations of each family as summarised in docs/routing.md.
#ifndef MOED_ENGINE_ROUTING_H_
#define MOED_ENGINE_ROUTING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace moed {

struct RouterRule {
  // What a chosen expert's weight is made of.
  enum class Score : uint8_t {
    kSoftmax,          // softmax over all experts (mixtral, qwen, olmoe, deepseek_v2, dbrx)
    kSoftmaxOfChosen,  // softmax over the k chosen logits (gpt_oss, granitemoe)
    kSigmoid,          // sigmoid of the logit (deepseek_v3, kimi_k2, glm4_moe, minimax_m2, llama4)
    kSqrtSoftplus,     // sqrt(log(1 + exp(logit))) (deepseek_v4)
    kSparseMixer,      // phimoe: two sequential picks, each a softmax over the entries near the maximum
  };
  enum class GroupScore : uint8_t { kMax, kTopTwoSum };
  enum class Normalize : uint8_t { kNone, kSum, kPNorm };

  Score score = Score::kSoftmax;
  int groups = 1;       // experts are split into this many equal groups
  int groups_kept = 1;  // only experts of the best groups can be chosen
  GroupScore group_score = GroupScore::kMax;
  Normalize normalize = Normalize::kNone;
  float norm_p = 1.0f;          // kPNorm only
  float norm_epsilon = 0.0f;    // added to the sum before dividing
  float scaling = 1.0f;         // multiplies every weight after normalisation
  float mixer_noise = 0.01f;    // kSparseMixer: an entry takes part while its relative gap to the maximum is <= 2 * noise
  bool correction_bias = false; // the choice is made by score + bias
  bool weight_on_input = false; // the weight multiplies the expert's input (llama4)
};

// Routes `logits` [M, E] row-major: writes ids and weights [M, k] row-major, chosen experts in descending order of choice
// score (kSparseMixer: in the order of the picks). `bias` is [E] when the rule has one (finite or -Inf), else empty.
// 1 <= k <= E. A logit of -Inf means that the expert is never picked; its choice score is -Inf for its group, too.
// Without bias and groups the logits themselves order the experts, so that scores which round alike are no tie.
//
// INVALID_ARGUMENT, naming the row and the numbers, and nothing written: NaN or +Inf in a row, or fewer finite logits than
// k within the groups that are kept; sizes that do not fit; E not divisible by the groups; NaN or +Inf in the bias;
// kSparseMixer with groups or bias.
absl::Status Route(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                   std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights);

// The same for logits that the server's own gate computed: a row whose logits are not all finite gets weight NaN and the
// lowest k ids, so that its output is NaN and the other rows are served.
absl::Status RouteOwnGate(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                          std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights);

}  // namespace moed

#endif  // MOED_ENGINE_ROUTING_H_
