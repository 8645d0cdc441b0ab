#include "engine/model_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint.h"
#include "engine/json_text.h"
#include "engine/quant_config.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr int64_t kMaxWidth = 1 << 20;  // of H and I; the widest published layers have 18432
constexpr int64_t kMaxExperts = 65535;  // ids travel through 16-bit tables
constexpr int64_t kMaxLayers = 10000;
constexpr char kWhere[] = "config.json: ";

struct FamilyEntry {
  Family family;
  const char* model_type;
  const char* architecture;
};
constexpr std::array<FamilyEntry, 4> kFamilies = {{
    {Family::kMixtral, "mixtral", "MixtralForCausalLM"},
    {Family::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
    {Family::kDeepseekV3, "deepseek_v3", "DeepseekV3ForCausalLM"},
    {Family::kGptOss, "gpt_oss", "GptOssForCausalLM"},
}};

std::string FamilyNames() {
  std::string names;
  for (const FamilyEntry& entry : kFamilies) absl::StrAppend(&names, names.empty() ? "" : ", ", entry.model_type);
  return names;
}

// The family by model_type, or where that name is not known (kimi_k2 is built from deepseek_v3) by the architecture.
void ReadFamily(ConfigReader* reader, ModelConfig* config) {
  config->model_type = reader->StringOr("model_type", "");
  const std::vector<std::string> architectures = reader->StringsOrEmpty("architectures");
  std::optional<Family> by_type;
  std::optional<Family> by_architecture;
  for (const FamilyEntry& entry : kFamilies) {
    if (config->model_type == entry.model_type) by_type = entry.family;
    if (!architectures.empty() && architectures.front() == entry.architecture) by_architecture = entry.family;
  }
  if (!by_type && !by_architecture) {
    reader->Fail(reader->Has("model_type") ? "model_type" : "architectures", absl::StrCat("a model of ", FamilyNames()));
  } else if (by_type && by_architecture && *by_type != *by_architecture) {
    reader->Fail("architectures", absl::StrCat("an architecture of the model_type ", FamilyName(*by_type)));
  } else {
    config->family = by_type ? *by_type : *by_architecture;
  }
}

// One number that files write under several names. All that are present must agree; the first name is the one to ask for.
int64_t Aliased(ConfigReader* reader, const std::vector<std::string>& keys, int64_t low, int64_t high) {
  std::string found;
  int64_t value = low;
  for (const std::string& key : keys) {
    if (!reader->Has(key)) continue;
    const int64_t own = reader->Int(key, low, high);
    if (!found.empty() && own != value) reader->Fail(key, absl::StrCat("the same as ", found, " (", value, ")"));
    if (found.empty()) value = own;
    found = key;
  }
  return found.empty() ? reader->Int(keys.front(), low, high) : value;
}

void ReadSizes(ConfigReader* reader, ModelConfig* config) {
  const bool own_key = config->family == Family::kQwen3Moe || config->family == Family::kDeepseekV3;
  config->num_layers = static_cast<int>(reader->Int("num_hidden_layers", 1, kMaxLayers));
  config->hidden = reader->Int("hidden_size", 1, kMaxWidth);
  config->intermediate = reader->Int(own_key ? "moe_intermediate_size" : "intermediate_size", 1, kMaxWidth);
  const std::vector<std::string> expert_keys =
      config->family == Family::kDeepseekV3
          ? std::vector<std::string>{"n_routed_experts", "num_local_experts", "num_experts"}
          : std::vector<std::string>{config->family == Family::kQwen3Moe ? "num_experts" : "num_local_experts",
                                     config->family == Family::kQwen3Moe ? "num_local_experts" : "num_experts",
                                     "n_routed_experts"};
  config->num_experts = static_cast<int>(Aliased(reader, expert_keys, 1, kMaxExperts));
  const std::vector<std::string> top_k_keys = {"num_experts_per_tok", "experts_per_token", "num_experts_per_token"};
  config->top_k = static_cast<int>(Aliased(reader, top_k_keys, 1, kMaxExperts));
  if (reader->status().ok() && config->top_k > config->num_experts) {
    const auto key = std::find_if(top_k_keys.begin(), top_k_keys.end(), [&](const auto& k) { return reader->Has(k); });
    reader->Fail(*key, absl::StrCat("at most the number of experts, ", config->num_experts));
  }
}

// moe_layer_freq: every that-many-th layer, or a list with a 0 or 1 for each layer.
std::vector<bool> ReadLayerFrequency(ConfigReader* reader, int num_layers) {
  std::vector<bool> is_moe(num_layers, true);
  const json* frequency = reader->Find("moe_layer_freq");
  const bool list = frequency != nullptr && frequency->is_array();
  if (list) {
    const std::vector<int64_t> flags = reader->IntsOrEmpty("moe_layer_freq", 0, 1);
    if (static_cast<int64_t>(flags.size()) < num_layers) {
      reader->Fail("moe_layer_freq", absl::StrCat("a number or a list of at least ", num_layers, " entries of 0 or 1"));
      return is_moe;
    }
    for (int layer = 0; layer < num_layers; ++layer) is_moe[layer] = flags[layer] == 1;
  } else {
    const int64_t step = reader->IntOr("moe_layer_freq", 1, 1, kMaxLayers);
    for (int layer = 0; layer < num_layers; ++layer) is_moe[layer] = layer % step == 0;
  }
  // A list says it all; otherwise the class's default is DeepSeek-V3's own three dense layers.
  const int64_t dense = reader->IntOr("first_k_dense_replace", list ? 0 : 3, 0, kMaxLayers);
  for (int layer = 0; layer < std::min<int64_t>(dense, num_layers); ++layer) is_moe[layer] = false;
  return is_moe;
}

// Every decoder_sparse_step-th layer, except those of mlp_only_layers.
std::vector<bool> ReadSparseStep(ConfigReader* reader, int num_layers) {
  std::vector<bool> is_moe(num_layers, true);
  const int64_t step = reader->IntOr("decoder_sparse_step", 1, 1, kMaxLayers);
  for (int layer = 0; layer < num_layers; ++layer) is_moe[layer] = (layer + 1) % step == 0;
  for (const int64_t layer : reader->IntsOrEmpty("mlp_only_layers", 0, kMaxLayers)) {
    if (layer < num_layers) is_moe[layer] = false;
  }
  return is_moe;
}

void ReadMoeLayers(ConfigReader* reader, ModelConfig* config) {
  std::vector<bool> is_moe(config->num_layers, true);
  if (config->family == Family::kQwen3Moe) is_moe = ReadSparseStep(reader, config->num_layers);
  if (config->family == Family::kDeepseekV3) is_moe = ReadLayerFrequency(reader, config->num_layers);
  for (int layer = 0; layer < config->num_layers; ++layer) {
    if (is_moe[layer]) config->moe_layers.push_back(layer);
  }
  if (config->moe_layers.empty()) reader->Fail("num_hidden_layers", "at least one MoE layer (the others' keys leave none)");
}

void ReadActivation(ConfigReader* reader, ModelConfig* config) {
  const std::string name = reader->StringOr("hidden_act", reader->StringOr("hidden_activation", "silu"));
  if (reader->StringOr("hidden_activation", name) != name) {
    reader->Fail("hidden_activation", absl::StrCat("the same as hidden_act (\"", name, "\")"));
  }
  const std::string key = reader->Has("hidden_act") ? "hidden_act" : "hidden_activation";
  Activation& activation = config->activation;
  double default_limit = 0.0;
  if (config->family == Family::kGptOss) {
    // The file says "silu"; what the model computes is its own variant, with a constant that is in no config.
    if (name != "silu" && name != "swish") reader->Fail(key, "\"silu\"");
    activation.kind = Activation::Kind::kSwigluOai;
    activation.alpha = 1.702f;
    default_limit = 7.0;
  } else if (name == "silu" || name == "swish") {
    activation.kind = Activation::Kind::kSilu;
  } else if (name == "gelu") {
    activation.kind = Activation::Kind::kGelu;
  } else if (name == "gelu_pytorch_tanh") {
    activation.kind = Activation::Kind::kGeluTanh;
  } else {
    reader->Fail(key, "\"silu\", \"gelu\" or \"gelu_pytorch_tanh\"");
  }
  const double limit = reader->NumberOr("swiglu_limit", default_limit, 1e-6, 1e6);
  activation.clamped = limit > 0.0;
  activation.limit = static_cast<float>(limit);
}

// A group key: absent means the default of the class, null means no groups.
int GroupKey(ConfigReader* reader, const std::string& key, int fallback) {
  return static_cast<int>(reader->IntOr(key, reader->IsNull(key) ? 1 : fallback, 1, kMaxExperts));
}

void ReadDeepseekRouter(ConfigReader* reader, ModelConfig* config) {
  RouterRule& rule = config->router;
  if (reader->StringOr("scoring_func", "sigmoid") != "sigmoid") reader->Fail("scoring_func", "\"sigmoid\"");
  if (reader->StringOr("topk_method", "noaux_tc") != "noaux_tc") reader->Fail("topk_method", "\"noaux_tc\"");
  rule.score = RouterRule::Score::kSigmoid;
  rule.correction_bias = true;
  rule.group_score = RouterRule::GroupScore::kTopTwoSum;
  rule.groups = GroupKey(reader, "n_group", 8);
  rule.groups_kept = GroupKey(reader, "topk_group", reader->IsNull("n_group") ? 1 : 4);
  rule.normalize = reader->BoolOr("norm_topk_prob", true) ? RouterRule::Normalize::kSum : RouterRule::Normalize::kNone;
  rule.norm_epsilon = 1e-20f;
  rule.scaling = static_cast<float>(reader->NumberOr("routed_scaling_factor", 2.5, 1e-6, 1e6));
  if (config->num_experts % rule.groups != 0) {
    reader->Fail("n_group", absl::StrCat("a divisor of the number of experts, ", config->num_experts, " (default 8)"));
  } else if (rule.groups_kept > rule.groups) {
    reader->Fail("topk_group", absl::StrCat("at most n_group, ", rule.groups, " (default 4)"));
  } else if (config->top_k > rule.groups_kept * (config->num_experts / rule.groups)) {
    reader->Fail("topk_group", absl::StrCat("groups with at least num_experts_per_tok, ", config->top_k, ", experts"));
  }
}

void ReadRouter(ConfigReader* reader, ModelConfig* config) {
  RouterRule& rule = config->router;
  switch (config->family) {
    case Family::kMixtral:
      rule.score = RouterRule::Score::kSoftmax;
      rule.normalize = RouterRule::Normalize::kSum;
      break;
    case Family::kQwen3Moe:
      rule.score = RouterRule::Score::kSoftmax;
      rule.normalize = reader->BoolOr("norm_topk_prob", false) ? RouterRule::Normalize::kSum : RouterRule::Normalize::kNone;
      break;
    case Family::kDeepseekV3:
      ReadDeepseekRouter(reader, config);
      break;
    case Family::kGptOss:
      rule.score = RouterRule::Score::kSoftmaxOfChosen;
      config->router_bias = true;
      break;
  }
}

// n_shared_experts is the number of routed-sized pieces of the one shared expert; null means none.
void ReadSharedExpert(ConfigReader* reader, ModelConfig* config) {
  if (config->family != Family::kDeepseekV3) return;
  const int64_t pieces = reader->IntOr("n_shared_experts", reader->IsNull("n_shared_experts") ? 0 : 1, 0, kMaxExperts);
  config->shared_intermediate = pieces * config->intermediate;
  if (config->shared_intermediate > kMaxWidth) {
    reader->Fail("n_shared_experts", absl::StrCat("at most ", kMaxWidth, " / moe_intermediate_size"));
  }
}

// Everything but the quantization.
absl::StatusOr<ModelConfig> ReadModel(const json& root) {
  ModelConfig config;
  ConfigReader reader(root, kWhere);
  // The family and the sizes decide what the rest means, so that their errors end the reading.
  ReadFamily(&reader, &config);
  if (!reader.status().ok()) return reader.status();
  ReadSizes(&reader, &config);
  if (!reader.status().ok()) return reader.status();
  ReadMoeLayers(&reader, &config);
  ReadActivation(&reader, &config);
  ReadRouter(&reader, &config);
  ReadSharedExpert(&reader, &config);
  config.expert_biases = config.family == Family::kGptOss;
  if (!reader.status().ok()) return reader.status();
  return config;
}

bool HasQuantization(const json& root) {
  return root.contains("quantization_config") && !root["quantization_config"].is_null();
}

absl::StatusOr<QuantConfigPtr> QuantizationOf(const JsonDocument& document, Family family) {
  if (!HasQuantization(document.root)) return PlainQuantConfig();
  QuantSource source;
  source.document = &document;
  source.path = {"quantization_config"};
  source.where = absl::StrCat(kWhere, "quantization_config.");
  source.mixtral_names = family == Family::kMixtral;
  return ParseQuantConfig(source);
}

// A description beside config.json. Without one the model is unquantized.
absl::StatusOr<QuantConfigPtr> QuantizationBeside(const std::string& directory, Family family) {
  struct SideFile {
    const char* name;
    const char* default_method;  // of the tool that writes this file
  };
  constexpr std::array<SideFile, 4> files = {{{"hf_quant_config.json", "modelopt"},
                                              {"quantize_config.json", "gptq"},
                                              {"quant_config.json", "awq"},
                                              {"quantization_config.json", ""}}};
  for (const SideFile& file : files) {
    const auto text = ReadTextFile(absl::StrCat(directory, "/", file.name), kMaxConfigBytes);
    if (absl::IsNotFound(text.status())) continue;
    if (!text.ok()) return text.status();
    const auto document = ParseJson(*text, file.name);
    if (!document.ok()) return document.status();
    QuantSource source;
    source.document = &*document;
    source.where = absl::StrCat(file.name, ": ");
    source.default_method = file.default_method;
    source.mixtral_names = family == Family::kMixtral;
    return ParseQuantConfig(source);
  }
  return PlainQuantConfig();
}

}  // namespace

const char* FamilyName(Family family) {
  for (const FamilyEntry& entry : kFamilies) {
    if (entry.family == family) return entry.model_type;
  }
  return "?";
}

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text) {
  const auto document = ParseJson(text, "config.json");
  if (!document.ok()) return document.status();
  auto config = ReadModel(document->root);
  if (!config.ok()) return config.status();
  auto quant = QuantizationOf(*document, config->family);
  if (!quant.ok()) return quant.status();
  config->quant = *std::move(quant);
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& directory) {
  const auto text = ReadTextFile(directory + "/config.json", kMaxConfigBytes);
  if (!text.ok()) return text.status();
  const auto document = ParseJson(*text, "config.json");
  if (!document.ok()) return document.status();
  auto config = ReadModel(document->root);
  if (!config.ok()) return config.status();
  auto quant = HasQuantization(document->root) ? QuantizationOf(*document, config->family)
                                               : QuantizationBeside(directory, config->family);
  if (!quant.ok()) return quant.status();
  config->quant = *std::move(quant);
  return config;
}

}  // namespace moed
