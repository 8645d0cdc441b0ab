// The rule that turns router logits into experts and weights, as properties: score, what the choice is made by, groups,
// normalisation, scaling. Each model family is a value of it. //engine:routing executes it on the host, accelerators on theirs.
#ifndef MOED_KERNELS_ROUTER_H_
#define MOED_KERNELS_ROUTER_H_

#include <cstdint>

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

}  // namespace moed

#endif  // MOED_KERNELS_ROUTER_H_
