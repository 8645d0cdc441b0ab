#include "engine/model_family.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using nlohmann::json;
using Layers = FamilyEntry::Layers;
using Router = FamilyEntry::Router;
using Shared = FamilyEntry::Shared;

constexpr char kTextConfig[] = "text_config";

// ---- Names --------------------------------------------------------------------------------------------------------

constexpr FamilyNames kMlp = {};
constexpr FamilyNames kMlpGated = {.shared = "mlp.shared_expert."};
// The older block, in which gate and experts have a name of their own.
constexpr FamilyNames kBlockSparse = {.experts = "block_sparse_moe.experts.",
                                      .w123 = true,
                                      .router = "block_sparse_moe.gate",
                                      .correction_bias = "block_sparse_moe.gate.e_score_correction_bias",
                                      .shared = "block_sparse_moe.shared_experts."};
constexpr FamilyNames kMinimax = {.experts = "block_sparse_moe.experts.",
                                  .w123 = true,
                                  .router = "block_sparse_moe.gate",
                                  .correction_bias = "block_sparse_moe.e_score_correction_bias"};
constexpr FamilyNames kVision = {.layers = "model.language_model.layers.", .fused = true, .layout = FusedLayout::kColumns};
constexpr FamilyNames kVisionGated = {
    .layers = "model.language_model.layers.", .fused = true, .layout = FusedLayout::kRows, .shared = "mlp.shared_expert."};
constexpr FamilyNames kGptOss = {.fused = true, .layout = FusedLayout::kInterleavedColumns, .router = "mlp.router"};
constexpr FamilyNames kLlama4 = {.layers = "language_model.model.layers.",
                                 .experts = "feed_forward.experts.",
                                 .fused = true,
                                 .layout = FusedLayout::kColumns,
                                 .router = "feed_forward.router",
                                 .shared = "feed_forward.shared_expert."};
constexpr FamilyNames kGranite = {.experts = "block_sparse_moe.",
                                  .fused = true,
                                  .layout = FusedLayout::kLinear,
                                  .router = "block_sparse_moe.router.layer"};
constexpr FamilyNames kDbrx = {.layers = "transformer.blocks.",
                               .experts = "ffn.experts.mlp.",
                               .fused = true,
                               .layout = FusedLayout::kStacked,
                               .router = "ffn.router.layer"};

// ---- Families -----------------------------------------------------------------------------------------------------

constexpr char kOwnWidth[] = "moe_intermediate_size";
constexpr char kWidth[] = "intermediate_size";
constexpr char kLocal[] = "num_local_experts";
constexpr char kPlainCount[] = "num_experts";
constexpr char kRouted[] = "n_routed_experts";
constexpr char kPieces[] = "n_shared_experts";

// clang-format off: two or three lines a family are read more easily than twelve.
constexpr FamilyEntry kFamilies[] = {
    {Family::kMixtral, "mixtral", {}, {"MixtralForCausalLM"},
     kWidth, kLocal, Layers::kAll, Router::kSoftmaxNormalized, Shared::kNone, "", kBlockSparse, {}},
    {Family::kPhimoe, "phimoe", {}, {"PhiMoEForCausalLM", "PhimoeForCausalLM"},
     kWidth, kLocal, Layers::kAll, Router::kSparseMixer, Shared::kNone, "", kBlockSparse, {}},
    {Family::kOlmoe, "olmoe", {}, {"OlmoeForCausalLM"},
     kWidth, kPlainCount, Layers::kAll, Router::kSoftmax, Shared::kNone, "", kMlp, {.normalize = 0}},
    {Family::kQwen2Moe, "qwen2_moe", {}, {"Qwen2MoeForCausalLM"},
     kOwnWidth, kPlainCount, Layers::kSparseStep, Router::kSoftmax, Shared::kWidth, "", kMlpGated, {.normalize = 0}},
    {Family::kQwen3Moe, "qwen3_moe", {}, {"Qwen3MoeForCausalLM"},
     kOwnWidth, kPlainCount, Layers::kSparseStep, Router::kSoftmax, Shared::kNone, "", kMlp, {.normalize = 0}},
    {Family::kQwen3Next, "qwen3_next", {}, {"Qwen3NextForCausalLM"},
     kOwnWidth, kPlainCount, Layers::kSparseStep, Router::kSoftmax, Shared::kWidth, "", kMlpGated, {}},
    {Family::kQwen3VlMoe, "qwen3_vl_moe", {"qwen3_vl_moe_text"}, {"Qwen3VLMoeForConditionalGeneration"},
     kOwnWidth, kPlainCount, Layers::kSparseStep, Router::kSoftmaxNormalized, Shared::kNone, "", kVision, {}},
    {Family::kQwen35Moe, "qwen3_5_moe", {"qwen3_5_moe_text"},
     {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"},
     kOwnWidth, kPlainCount, Layers::kSparseStep, Router::kSoftmaxNormalized, Shared::kWidth, "", kVisionGated, {}},
    {Family::kDeepseekV2, "deepseek_v2", {}, {"DeepseekV2ForCausalLM"},
     kOwnWidth, kRouted, Layers::kFrequency, Router::kGreedyGroups, Shared::kPieces, kPieces, kMlp, {.normalize = 0}},
    {Family::kDeepseekV3, "deepseek_v3", {"kimi_k2"}, {"DeepseekV3ForCausalLM"},
     kOwnWidth, kRouted, Layers::kFrequency, Router::kNoAux, Shared::kPieces, kPieces, kMlp,
     {.dense_layers = 3, .shared_pieces = 1, .groups = 8, .groups_kept = 4, .normalize = 1, .scaling = 2.5}},
    {Family::kGlm4Moe, "glm4_moe", {}, {"Glm4MoeForCausalLM"},
     kOwnWidth, kRouted, Layers::kFrequency, Router::kNoAux, Shared::kPieces, kPieces, kMlp,
     {.dense_layers = 1, .shared_pieces = 1, .groups = 1, .groups_kept = 1, .normalize = 1, .scaling = 1.0}},
    {Family::kGlmMoeDsa, "glm_moe_dsa", {}, {"GlmMoeDsaForCausalLM"},
     kOwnWidth, kRouted, Layers::kFrequency, Router::kNoAux, Shared::kPieces, kPieces, kMlp,
     {.groups = 1, .groups_kept = 1, .normalize = 1}},
    {Family::kKimiLinear, "kimi_linear", {}, {"KimiLinearForCausalLM"},
     kOwnWidth, kPlainCount, Layers::kFrequency, Router::kNoAuxKimi, Shared::kPieces, "num_shared_experts", kBlockSparse,
     {.dense_layers = 0, .shared_pieces = 0, .groups = 1, .groups_kept = 1, .normalize = 1, .scaling = 1.0}},
    {Family::kMimoV2, "mimo_v2", {"mimo_v2_flash"}, {"MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"},
     kOwnWidth, kRouted, Layers::kFrequency, Router::kNoAux, Shared::kPieces, kPieces, kMlp,
     {.dense_layers = 0, .shared_pieces = 0, .groups = 1, .groups_kept = 1, .scaling = 1.0}},
    {Family::kMinimaxM2, "minimax_m2", {}, {"MiniMaxM2ForCausalLM"},
     kWidth, kLocal, Layers::kAll, Router::kMinimax, Shared::kRefused, "shared_intermediate_size", kMinimax, {}},
    {Family::kGptOss, "gpt_oss", {}, {"GptOssForCausalLM"},
     kWidth, kLocal, Layers::kAll, Router::kSoftmaxOfChosen, Shared::kNone, "", kGptOss, {}},
    {Family::kLlama4, "llama4", {"llama4_text"}, {"Llama4ForConditionalGeneration", "Llama4ForCausalLM"},
     kWidth, kLocal, Layers::kInterleave, Router::kLlama4, Shared::kRouted, "", kLlama4, {}},
    {Family::kGraniteMoe, "granitemoe", {}, {"GraniteMoeForCausalLM"},
     kWidth, kLocal, Layers::kAll, Router::kSoftmaxOfChosen, Shared::kNone, "", kGranite, {}},
    {Family::kDbrx, "dbrx", {}, {"DbrxForCausalLM"},
     "ffn_hidden_size", "moe_num_experts", Layers::kAll, Router::kDbrx, Shared::kNone, "", kDbrx, {}},
};
// clang-format on

// Families that are known and not served.
struct RefusedFamily {
  const char* model_type;
  const char* architecture;
  const char* reason;
};
constexpr RefusedFamily kRefused[] = {
    {"jetmoe", "JetMoeForCausalLM", "its attention is a mixture of experts, too, and its tensor names are not verified"},
    {"deepseek_v4", "DeepseekV4ForCausalLM", "the details of its router are not verified"},
    {"kimi_k3", "KimiK3ForConditionalGeneration",
     "its experts work in a width of their own with an activation that is not served"},
    {"granitemoeshared", "GraniteMoeSharedForCausalLM", "the tensor names of its shared expert are not verified"},
    {"granitemoehybrid", "GraniteMoeHybridForCausalLM", "the tensor names of its shared expert are not verified"},
};

// ---- Recognition --------------------------------------------------------------------------------------------------

std::string ServedNames() {
  std::string names;
  for (const FamilyEntry& entry : kFamilies) absl::StrAppend(&names, names.empty() ? "" : ", ", entry.model_type);
  return names;
}

bool IsOneOf(const std::string& text, const std::array<const char*, 2>& names) {
  for (const char* name : names) {
    if (name != nullptr && text == name) return true;
  }
  return false;
}

// One object of the file: the root or its text_config.
struct Level {
  ConfigReader reader;
  std::string model_type;
  std::string architecture;
  const FamilyEntry* by_type = nullptr;
  const FamilyEntry* by_architecture = nullptr;
};

Level ReadLevel(const json& object, const std::string& where) {
  Level level = {ConfigReader(object, where), "", ""};
  level.model_type = level.reader.StringOr("model_type", "");
  const std::vector<std::string> architectures = level.reader.StringsOrEmpty("architectures");
  if (!architectures.empty()) level.architecture = architectures.front();
  for (const FamilyEntry& entry : kFamilies) {
    if (level.model_type == entry.model_type || IsOneOf(level.model_type, entry.other_types)) level.by_type = &entry;
    if (!level.architecture.empty() && IsOneOf(level.architecture, entry.architectures)) level.by_architecture = &entry;
  }
  for (const RefusedFamily& refused : kRefused) {
    const bool type = level.model_type == refused.model_type;
    if (!type && level.architecture != refused.architecture) continue;
    level.reader.Fail(type ? "model_type" : "architectures",
                      absl::StrCat("a family that is served (", refused.model_type, " is not: ", refused.reason, ")"));
  }
  if (level.by_type != nullptr && level.by_architecture != nullptr && level.by_type != level.by_architecture) {
    level.reader.Fail("architectures", absl::StrCat("an architecture of the model_type ", level.by_type->model_type));
  }
  return level;
}

// The family that a level names: by model_type, or where that name is not known by the architecture.
const FamilyEntry* Named(const Level& level) { return level.by_type != nullptr ? level.by_type : level.by_architecture; }

}  // namespace

const char* FamilyName(Family family) {
  for (const FamilyEntry& entry : kFamilies) {
    if (entry.family == family) return entry.model_type;
  }
  return "?";
}

absl::StatusOr<FamilyMatch> FindFamily(const json& root) {
  FamilyMatch match;
  match.text = &root;
  Level top = ReadLevel(root, WhereOf(match));
  if (!top.reader.status().ok()) return top.reader.status();
  match.entry = Named(top);
  match.model_type = top.model_type;
  const json* text = top.reader.Find(kTextConfig);
  if (text == nullptr) {
    if (match.entry != nullptr) return match;
    top.reader.Fail(top.reader.Has("model_type") ? "model_type" : "architectures",
                    absl::StrCat("a model of ", ServedNames()));
    return top.reader.status();
  }
  if (!text->is_object()) {
    top.reader.Fail(kTextConfig, "an object");
    return top.reader.status();
  }
  // A wrapper's own name counts only where its text model does not say what it is.
  match.text = text;
  match.wrapped = true;
  Level inner = ReadLevel(*text, WhereOf(match));
  const FamilyEntry* const named = Named(inner);
  if (named == nullptr && (match.entry == nullptr || !inner.model_type.empty())) {
    inner.reader.Fail("model_type", absl::StrCat("a model of ", ServedNames()));
  } else if (named != nullptr && match.entry != nullptr && named != match.entry) {
    inner.reader.Fail("model_type", absl::StrCat("the text model of the model_type ", match.entry->model_type));
  }
  if (!inner.reader.status().ok()) return inner.reader.status();
  if (named != nullptr) match.entry = named;
  if (!inner.model_type.empty()) match.model_type = inner.model_type;
  return match;
}

std::string WhereOf(const FamilyMatch& match) { return match.wrapped ? "config.json: text_config." : "config.json: "; }

}  // namespace moed
