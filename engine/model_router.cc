// The routing rule of a config, by family. The rules themselves are in docs/routing.md.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/model_family.h"

namespace moed {
namespace {

using Normalize = RouterRule::Normalize;
using Score = RouterRule::Score;

// A string that must be `value` where it is given.
void Only(ConfigReader* reader, const std::string& key, const std::string& value) {
  if (reader->StringOr(key, value) != value) reader->Fail(key, absl::StrCat("\"", value, "\""));
}

// A switch: absent means `fallback`, and is an error where that is -1.
bool Switch(ConfigReader* reader, const std::string& key, int fallback) {
  if (fallback < 0 && !reader->Has(key)) reader->Fail(key, "true or false");
  return reader->BoolOr(key, fallback == 1);
}

// The factor of the routed sum: null means that there is none.
float Scaling(ConfigReader* reader, double fallback) {
  const char key[] = "routed_scaling_factor";
  if (reader->IsNull(key)) return 1.0f;
  if (fallback < 0 && !reader->Has(key)) reader->Fail(key, "a number");
  return static_cast<float>(reader->NumberOr(key, fallback < 0 ? 1.0 : fallback, 1e-6, 1e6));
}

struct GroupKeys {
  const char* groups;
  const char* kept;
};
constexpr GroupKeys kDeepseekKeys = {"n_group", "topk_group"};
constexpr GroupKeys kKimiKeys = {"num_expert_group", "topk_group"};

// One group key: absent means the default of the class, null means no groups.
int GroupCountOf(ConfigReader* reader, const std::string& key, int fallback) {
  if (reader->IsNull(key)) return 1;
  if (fallback < 0) return static_cast<int>(reader->Int(key, 1, kMaxExperts));
  return static_cast<int>(reader->IntOr(key, fallback, 1, kMaxExperts));
}

void ReadGroups(const FamilyDefaults& defaults, const GroupKeys& keys, ConfigReader* reader, ModelConfig* config) {
  RouterRule& rule = config->router;
  rule.groups = GroupCountOf(reader, keys.groups, defaults.groups);
  rule.groups_kept = GroupCountOf(reader, keys.kept, reader->IsNull(keys.groups) ? 1 : defaults.groups_kept);
  if (!reader->status().ok()) return;
  if (config->num_experts % rule.groups != 0) {
    reader->Fail(keys.groups,
                 absl::StrCat("a divisor of the number of experts, ", config->num_experts, " (it is ", rule.groups, ")"));
  } else if (rule.groups_kept > rule.groups) {
    reader->Fail(keys.kept, absl::StrCat("at most ", keys.groups, ", ", rule.groups, " (it is ", rule.groups_kept, ")"));
  } else if (config->top_k > rule.groups_kept * (config->num_experts / rule.groups)) {
    reader->Fail(keys.kept, absl::StrCat("groups with at least num_experts_per_tok, ", config->top_k, ", experts"));
  }
}

// deepseek_v3 and what is built like it: sigmoid scores, chosen with a correction bias, groups by their two best.
void ReadNoAux(const FamilyEntry& entry, const GroupKeys& keys, const std::string& normalize_key, ConfigReader* reader,
               ModelConfig* config) {
  RouterRule& rule = config->router;
  rule.score = Score::kSigmoid;
  rule.correction_bias = true;
  rule.group_score = RouterRule::GroupScore::kTopTwoSum;
  rule.normalize = Switch(reader, normalize_key, entry.defaults.normalize) ? Normalize::kSum : Normalize::kNone;
  rule.norm_epsilon = 1e-20f;
  rule.scaling = Scaling(reader, entry.defaults.scaling);
  Only(reader, "topk_method", "noaux_tc");
  ReadGroups(entry.defaults, keys, reader, config);
}

void ReadDeepseekV2(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  RouterRule& rule = config->router;
  Only(reader, "scoring_func", "softmax");
  const std::string method = reader->StringOr("topk_method", "");
  if (method == "group_limited_greedy") {
    ReadGroups(entry.defaults, kDeepseekKeys, reader, config);
  } else if (method != "greedy") {
    reader->Fail("topk_method", "\"greedy\" or \"group_limited_greedy\"");
  }
  // Whether normalised weights are scaled, too, differs between implementations; no published config normalises.
  if (Switch(reader, "norm_topk_prob", entry.defaults.normalize)) reader->Fail("norm_topk_prob", "false");
  rule.score = Score::kSoftmax;
  rule.group_score = RouterRule::GroupScore::kMax;
  rule.scaling = Scaling(reader, entry.defaults.scaling);
}

void ReadSparseMixer(ConfigReader* reader, ModelConfig* config) {
  config->router.score = Score::kSparseMixer;
  config->router.mixer_noise = static_cast<float>(reader->NumberOr("router_jitter_noise", 0.01, 0.0, 1.0));
  if (config->top_k != 2) reader->Fail("num_experts_per_tok", "2: the router makes two picks");
}

void ReadMinimax(ConfigReader* reader, ModelConfig* config) {
  Only(reader, "scoring_func", "sigmoid");
  config->router.score = Score::kSigmoid;
  config->router.normalize = Normalize::kSum;
  config->router.correction_bias = Switch(reader, "use_routing_bias", -1);
}

// The reader stands at ffn_config. The weights are divided by their p-norm; null means that they are not.
void ReadDbrx(ConfigReader* reader, ModelConfig* config) {
  const char key[] = "moe_normalize_expert_weights";
  config->router.score = Score::kSoftmax;
  config->router.normalize = reader->IsNull(key) ? Normalize::kNone : Normalize::kPNorm;
  config->router.norm_p = static_cast<float>(reader->NumberOr(key, 1.0, 1e-3, 1e3));
}

}  // namespace

void ReadRouter(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  RouterRule& rule = config->router;
  switch (entry.router) {
    case FamilyEntry::Router::kSoftmaxNormalized:
      rule.score = Score::kSoftmax;
      rule.normalize = Normalize::kSum;
      if (!reader->BoolOr("norm_topk_prob", true)) reader->Fail("norm_topk_prob", "true, as the family always normalises");
      break;
    case FamilyEntry::Router::kSoftmax:
      rule.score = Score::kSoftmax;
      rule.normalize = Switch(reader, "norm_topk_prob", entry.defaults.normalize) ? Normalize::kSum : Normalize::kNone;
      break;
    case FamilyEntry::Router::kSparseMixer: ReadSparseMixer(reader, config); break;
    case FamilyEntry::Router::kSoftmaxOfChosen:
      rule.score = Score::kSoftmaxOfChosen;
      config->router_bias = entry.family == Family::kGptOss;
      break;
    case FamilyEntry::Router::kGreedyGroups: ReadDeepseekV2(entry, reader, config); break;
    case FamilyEntry::Router::kNoAux:
      Only(reader, "scoring_func", "sigmoid");
      ReadNoAux(entry, kDeepseekKeys, "norm_topk_prob", reader, config);
      break;
    case FamilyEntry::Router::kNoAuxKimi:
      Only(reader, "moe_router_activation_func", "sigmoid");
      ReadNoAux(entry, kKimiKeys, "moe_renormalize", reader, config);
      break;
    case FamilyEntry::Router::kMinimax: ReadMinimax(reader, config); break;
    case FamilyEntry::Router::kLlama4:
      rule.score = Score::kSigmoid;
      rule.weight_on_input = true;
      break;
    case FamilyEntry::Router::kDbrx: ReadDbrx(reader, config); break;
  }
}

}  // namespace moed
