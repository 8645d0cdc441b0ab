#include "engine/model_config.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/json_text.h"
#include "engine/model_family.h"
#include "engine/quant_config.h"
#include "engine/text_file.h"

namespace moed {
namespace {

using nlohmann::json;
using Layers = FamilyEntry::Layers;
using Shared = FamilyEntry::Shared;

constexpr char kWhere[] = "config.json: ";

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

// `first`, then the others.
std::vector<std::string> WithFirst(const std::string& first, const std::vector<std::string>& others) {
  std::vector<std::string> keys = {first};
  for (const std::string& key : others) {
    if (key != first) keys.push_back(key);
  }
  return keys;
}

// I, E and k. `reader` stands where the family keeps them: at the text model, or for dbrx at its ffn_config.
void ReadExpertSizes(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  const bool dbrx = entry.family == Family::kDbrx;
  config->intermediate = reader->Int(entry.width_key, 1, kMaxWidth);
  const std::vector<std::string> expert_keys =
      dbrx ? std::vector<std::string>{entry.experts_key}
           : WithFirst(entry.experts_key, {"num_local_experts", "num_experts", "n_routed_experts"});
  config->num_experts = static_cast<int>(Aliased(reader, expert_keys, 1, kMaxExperts));
  const char* const top_k_key = dbrx                                    ? "moe_top_k"
                                : entry.family == Family::kKimiLinear ? "num_experts_per_token"
                                                                      : "num_experts_per_tok";
  const std::vector<std::string> top_k_keys =
      dbrx ? std::vector<std::string>{top_k_key}
           : WithFirst(top_k_key, {"num_experts_per_tok", "experts_per_token", "num_experts_per_token"});
  config->top_k = static_cast<int>(Aliased(reader, top_k_keys, 1, kMaxExperts));
  if (reader->status().ok() && config->top_k > config->num_experts) {
    const auto key = std::find_if(top_k_keys.begin(), top_k_keys.end(), [&](const auto& k) { return reader->Has(k); });
    reader->Fail(*key, absl::StrCat("at most the number of experts, ", config->num_experts));
  }
}

void ReadModelSizes(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  const bool dbrx = entry.family == Family::kDbrx;
  config->num_layers = static_cast<int>(reader->Int(dbrx ? "n_layers" : "num_hidden_layers", 1, kMaxLayers));
  config->hidden = reader->Int(dbrx ? "d_model" : "hidden_size", 1, kMaxWidth);
  const std::string own_width = "routed_expert_hidden_size";
  if (reader->Has(own_width) && reader->Int(own_width, 1, kMaxWidth) != config->hidden) {
    reader->Fail(own_width,
                 absl::StrCat("hidden_size, ", config->hidden, ": experts of a width of their own are not served"));
  }
}

// moe_layer_freq: every that-many-th layer, or a list with a 0 or 1 for each layer.
std::vector<bool> ReadLayerFrequency(const FamilyDefaults& defaults, ConfigReader* reader, int num_layers) {
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
  // A list says it all.
  const char key[] = "first_k_dense_replace";
  const int64_t dense = list || defaults.dense_layers >= 0
                            ? reader->IntOr(key, list ? 0 : defaults.dense_layers, 0, kMaxLayers)
                            : reader->Int(key, 0, kMaxLayers);
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

// Every interleave_moe_layer_step-th. Saved configs list the same layers as moe_layers, too.
std::vector<bool> ReadInterleave(ConfigReader* reader, int num_layers) {
  std::vector<bool> is_moe(num_layers, true);
  const int64_t step = reader->IntOr("interleave_moe_layer_step", 1, 1, kMaxLayers);
  for (int layer = 0; layer < num_layers; ++layer) is_moe[layer] = (layer + 1) % step == 0;
  if (!reader->Has("moe_layers")) return is_moe;
  std::vector<bool> listed(num_layers, false);
  for (const int64_t layer : reader->IntsOrEmpty("moe_layers", 0, kMaxLayers)) {
    if (layer < num_layers) listed[layer] = true;
  }
  if (listed != is_moe) {
    reader->Fail("moe_layers", absl::StrCat("every layer that interleave_moe_layer_step (", step, ") names, and no other"));
  }
  return is_moe;
}

void ReadMoeLayers(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  std::vector<bool> is_moe(config->num_layers, true);
  if (entry.layers == Layers::kSparseStep) is_moe = ReadSparseStep(reader, config->num_layers);
  if (entry.layers == Layers::kFrequency) is_moe = ReadLayerFrequency(entry.defaults, reader, config->num_layers);
  if (entry.layers == Layers::kInterleave) is_moe = ReadInterleave(reader, config->num_layers);
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

void ReadSharedExpert(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config) {
  const std::string key = entry.shared_key;
  switch (entry.shared) {
    case Shared::kNone:
      return;
    case Shared::kWidth:
      config->shared_intermediate = reader->Int("shared_expert_intermediate_size", 1, kMaxWidth);
      config->shared_gate = true;
      return;
    case Shared::kPieces: {
      // The number of routed-sized pieces of the one shared expert; null means none.
      const int64_t fallback = reader->IsNull(key) ? 0 : entry.defaults.shared_pieces;
      const int64_t pieces = fallback < 0 ? reader->Int(key, 0, kMaxExperts) : reader->IntOr(key, fallback, 0, kMaxExperts);
      config->shared_intermediate = pieces * config->intermediate;
      if (config->shared_intermediate > kMaxWidth)
        reader->Fail(key, absl::StrCat("at most ", kMaxWidth, " / ", entry.width_key));
      return;
    }
    case Shared::kRouted:
      config->shared_intermediate = config->intermediate;
      return;
    case Shared::kRefused:
      if (reader->IntOr(key, 0, 0, kMaxWidth) != 0)
        reader->Fail(key, "0: the tensor names of a shared expert are not known");
      return;
  }
}

// What dbrx keeps in an object of its own.
absl::Status ReadDbrxExperts(const FamilyEntry& entry, ConfigReader* model, ModelConfig* config) {
  const json* ffn = model->Find("ffn_config");
  if (ffn == nullptr || !ffn->is_object()) {
    model->Fail("ffn_config", "an object");
    return model->status();
  }
  ConfigReader reader(*ffn, model->where() + "ffn_config.");
  ReadExpertSizes(entry, &reader, config);
  if (!reader.status().ok()) return reader.status();
  ReadRouter(entry, &reader, config);
  if (const json* activation = reader.Find("ffn_act_fn"); activation != nullptr) {
    const bool named = activation->is_object() && activation->contains("name") && (*activation)["name"].is_string();
    if (!named || (*activation)["name"] != "silu") reader.Fail("ffn_act_fn", "{\"name\": \"silu\"}");
  }
  return reader.status();
}

// Everything but the quantization.
absl::StatusOr<ModelConfig> ReadModel(const json& root) {
  const absl::StatusOr<FamilyMatch> match = FindFamily(root);
  if (!match.ok()) return match.status();
  const FamilyEntry& entry = *match->entry;
  ModelConfig config;
  config.family = entry.family;
  config.names = entry.names;
  config.model_type = match->model_type;
  ConfigReader reader(*match->text, WhereOf(*match));
  // The sizes decide what the rest means, so that their errors end the reading.
  ReadModelSizes(entry, &reader, &config);
  if (!reader.status().ok()) return reader.status();
  if (entry.family == Family::kDbrx) {
    absl::Status status = ReadDbrxExperts(entry, &reader, &config);
    if (!status.ok()) return status;
  } else {
    ReadExpertSizes(entry, &reader, &config);
    if (!reader.status().ok()) return reader.status();
    ReadActivation(&reader, &config);
    ReadRouter(entry, &reader, &config);
    ReadSharedExpert(entry, &reader, &config);
  }
  ReadMoeLayers(entry, &reader, &config);
  config.expert_biases = entry.family == Family::kGptOss;
  if (!reader.status().ok()) return reader.status();
  return config;
}

// Where config.json describes the quantization: at the top or, in a multimodal model, beside the text model's sizes. Empty
// when it does not.
std::vector<std::string> QuantizationPath(const json& root) {
  const auto holds = [](const json& object) {
    const auto found = object.is_object() ? object.find("quantization_config") : object.end();
    return found != object.end() && !found->is_null();
  };
  if (holds(root)) return {"quantization_config"};
  const auto text = root.find("text_config");
  if (text != root.end() && holds(*text)) return {"text_config", "quantization_config"};
  return {};
}

bool HasQuantization(const json& root) { return !QuantizationPath(root).empty(); }

// Whether modules of the block have the two spellings of mixtral.
bool MixtralNames(const ModelConfig& config) { return config.names.w123; }

absl::StatusOr<QuantConfigPtr> QuantizationOf(const JsonDocument& document, const ModelConfig& config) {
  if (!HasQuantization(document.root)) return PlainQuantConfig();
  QuantSource source;
  source.document = &document;
  source.path = QuantizationPath(document.root);
  source.where = kWhere;
  for (const std::string& key : source.path) absl::StrAppend(&source.where, key, ".");
  source.mixtral_names = MixtralNames(config);
  return ParseQuantConfig(source);
}

// A description beside config.json. Without one the model is unquantized.
absl::StatusOr<QuantConfigPtr> QuantizationBeside(const std::string& directory, const ModelConfig& config) {
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
    source.mixtral_names = MixtralNames(config);
    return ParseQuantConfig(source);
  }
  return PlainQuantConfig();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text) {
  const auto document = ParseJson(text, "config.json");
  if (!document.ok()) return document.status();
  auto config = ReadModel(document->root);
  if (!config.ok()) return config.status();
  auto quant = QuantizationOf(*document, *config);
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
  auto quant = HasQuantization(document->root) ? QuantizationOf(*document, *config)
                                               : QuantizationBeside(directory, *config);
  if (!quant.ok()) return quant.status();
  config->quant = *std::move(quant);
  return config;
}

}  // namespace moed
