// Whole models of the checkpoint builder: config.json, routers, shared experts.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/number_formats.h"
#include "nlohmann/json.hpp"
#include "tests/support/checkpoint_builder.h"

namespace moed::testing {
namespace {

using Json = nlohmann::ordered_json;

bool IsQuantized(const ExpertSpec& spec) {
  return spec.format == ExpertFormat::kGptq || spec.format == ExpertFormat::kPacked;
}

// deepseek_v3 has a dense layer before its MoE layers.
int FirstMoeLayer(const ModelSpec& spec) { return spec.family == ModelFamily::kDeepseekV3 ? 1 : 0; }

std::string LayerPrefix(int layer) { return absl::StrCat("model.layers.", layer, "."); }

bool HasSharedExpert(const ModelSpec& spec) {
  return spec.family == ModelFamily::kDeepseekV3 && spec.num_shared_experts > 0;
}

ExpertNames NamesOf(const ModelSpec& spec) {
  if (spec.family == ModelFamily::kGptOss) return ExpertNames::kGptOssFused;
  return spec.family == ModelFamily::kMixtral && !spec.mlp_names ? ExpertNames::kW123 : ExpertNames::kMlp;
}

// Modules of the file that are Linear but not quantized.
std::vector<std::string> UnquantizedModules(const ModelSpec& spec) {
  std::vector<std::string> modules;
  for (int i = 0; i < spec.num_layers; ++i) {
    const std::string prefix = LayerPrefix(FirstMoeLayer(spec) + i);
    if (!HasSharedExpert(spec) || IsQuantized(spec.shared)) continue;
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      modules.push_back(absl::StrCat(prefix, "mlp.shared_experts.", name));
    }
  }
  if (FirstMoeLayer(spec) == 0) return modules;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"})
    modules.push_back(absl::StrCat(LayerPrefix(0), "mlp.", name));
  return modules;
}

std::string QuantizationText(const ModelSpec& spec) {
  if (!spec.quantization.empty()) return spec.quantization;
  if (spec.experts.format == ExpertFormat::kGptq) {
    Json config = Json::parse(GptqConfigText(spec.experts));
    if (!HasSharedExpert(spec) || IsQuantized(spec.shared)) config["dynamic"].erase("-:.*shared_expert");
    return config.dump();
  }
  if (spec.experts.format != ExpertFormat::kPacked) return {};
  std::vector<std::string> ignore = UnquantizedModules(spec);
  const char* router = spec.family == ModelFamily::kMixtral && !spec.mlp_names ? "block_sparse_moe.gate" : "mlp.gate";
  for (int i = 0; i < spec.num_layers; ++i) ignore.push_back(absl::StrCat(LayerPrefix(FirstMoeLayer(spec) + i), router));
  return PackedConfigText(spec.experts, ignore);
}

void AddFamilyKeys(const ModelSpec& spec, Json* config) {
  Json& c = *config;
  switch (spec.family) {
    case ModelFamily::kMixtral:
      c["architectures"] = {"MixtralForCausalLM"};
      c["model_type"] = "mixtral";
      c["intermediate_size"] = spec.intermediate;
      c["num_local_experts"] = spec.num_experts;
      break;
    case ModelFamily::kQwen3Moe:
      c["architectures"] = {"Qwen3MoeForCausalLM"};
      c["model_type"] = "qwen3_moe";
      c["intermediate_size"] = 4 * spec.intermediate;
      c["moe_intermediate_size"] = spec.intermediate;
      c["num_experts"] = spec.num_experts;
      c["decoder_sparse_step"] = 1;
      c["mlp_only_layers"] = Json::array();
      c["norm_topk_prob"] = spec.norm_topk_prob;
      break;
    case ModelFamily::kDeepseekV3:
      c["architectures"] = {"DeepseekV3ForCausalLM"};
      c["model_type"] = "deepseek_v3";
      c["intermediate_size"] = 2 * spec.intermediate;
      c["moe_intermediate_size"] = spec.intermediate;
      c["n_routed_experts"] = spec.num_experts;
      c["n_shared_experts"] = spec.num_shared_experts > 0 ? Json(spec.num_shared_experts) : Json();
      c["first_k_dense_replace"] = 1;
      c["moe_layer_freq"] = 1;
      c["n_group"] = spec.n_group;
      c["topk_group"] = spec.topk_group;
      c["norm_topk_prob"] = spec.norm_topk_prob;
      c["routed_scaling_factor"] = spec.routed_scaling;
      c["scoring_func"] = "sigmoid";
      c["topk_method"] = "noaux_tc";
      break;
    case ModelFamily::kGptOss:
      c["architectures"] = {"GptOssForCausalLM"};
      c["model_type"] = "gpt_oss";
      c["intermediate_size"] = spec.intermediate;
      c["num_local_experts"] = spec.num_experts;
      c["swiglu_limit"] = spec.swiglu_limit;
      break;
  }
}

std::vector<float> RouterValues(StDtype dtype, size_t count, uint32_t stream, double factor) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(factor * R(stream, i));
    values[i] = dtype == StDtype::kBf16  ? Bf16ToFloat(FloatToBf16(value))
                : dtype == StDtype::kF16 ? F16ToFloat(FloatToF16(value))
                                         : value;
  }
  return values;
}

void AddRouter(const ModelSpec& spec, const std::string& prefix, CheckpointBuilder* builder, LayerReference* reference) {
  const int64_t experts = spec.num_experts;
  const uint32_t stream = 100u + static_cast<uint32_t>(reference->layer);
  const char* name = spec.family == ModelFamily::kGptOss ? "mlp.router"
                     : NamesOf(spec) == ExpertNames::kW123 ? "block_sparse_moe.gate"
                                                           : "mlp.gate";
  reference->router = RouterValues(spec.router_dtype, static_cast<size_t>(experts * spec.hidden), stream, 0.5);
  builder->AddFloats(absl::StrCat(prefix, name, ".weight"), spec.router_dtype, {experts, spec.hidden}, reference->router);
  if (spec.family == ModelFamily::kGptOss) {
    reference->router_bias = RouterValues(spec.router_dtype, static_cast<size_t>(experts), stream + 100, 1.0);
    builder->AddFloats(absl::StrCat(prefix, name, ".bias"), spec.router_dtype, {experts}, reference->router_bias);
  }
  if (spec.family == ModelFamily::kDeepseekV3) {
    reference->correction_bias = RouterValues(StDtype::kF32, static_cast<size_t>(experts), stream + 200, 0.2);
    builder->AddFloats(absl::StrCat(prefix, name, ".e_score_correction_bias"), StDtype::kF32, {experts},
                       reference->correction_bias);
  }
}

// A gated block gate_proj, up_proj, down_proj below `prefix`, as shared experts and dense layers have.
ExpertReference AddGatedBlock(CheckpointBuilder* builder, const std::string& prefix, int64_t hidden, int64_t width,
                              const ExpertSpec& spec, uint32_t stream) {
  const WeightFn weights = RcWeights(hidden, width);
  const auto add = [&](const char* name, int64_t rows, int64_t cols, int projection) {
    return AddProjection(builder, absl::StrCat(prefix, name), rows, cols, spec,
                         [&](int64_t i) { return weights(static_cast<int>(stream), projection, i); });
  };
  ExpertReference block;
  block.gate = add("gate_proj", width, hidden, kGate);
  block.up = add("up_proj", width, hidden, kUp);
  block.down = add("down_proj", hidden, width, kDown);
  return block;
}

LayerReference AddLayer(const ModelSpec& spec, int layer, CheckpointBuilder* builder) {
  LayerReference reference;
  reference.layer = layer;
  reference.hidden = spec.hidden;
  reference.intermediate = spec.intermediate;
  const std::string prefix = LayerPrefix(layer);
  AddRouter(spec, prefix, builder, &reference);

  const WeightFn weights = spec.weights ? spec.weights : RcWeights(spec.hidden, spec.intermediate);
  const int first = (layer - FirstMoeLayer(spec)) * spec.num_experts;
  WeightFn biases;
  if (spec.biases) {
    biases = [first](int expert, int projection, int64_t i) {
      return static_cast<float>(
          R(500u + static_cast<uint32_t>(3 * (first + expert) + projection), static_cast<uint64_t>(i)));
    };
  }
  const size_t index = static_cast<size_t>(layer - FirstMoeLayer(spec));
  const ExpertSpec& experts = spec.layer_experts.empty() ? spec.experts : spec.layer_experts.at(index);
  reference.experts = AddExperts(
      builder, prefix, NamesOf(spec), spec.num_experts, spec.hidden, spec.intermediate, experts,
      [&](int expert, int projection, int64_t i) { return weights(first + expert, projection, i); }, biases);
  if (!spec.keep_reference) reference.experts.clear();

  if (HasSharedExpert(spec)) {
    reference.has_shared = true;
    reference.shared_intermediate = spec.intermediate * spec.num_shared_experts;
    reference.shared = AddGatedBlock(builder, absl::StrCat(prefix, "mlp.shared_experts."), spec.hidden,
                                     reference.shared_intermediate, spec.shared, 100000u + static_cast<uint32_t>(layer));
  }
  return reference;
}

}  // namespace

std::string GptqConfigText(const ExpertSpec& spec) {
  const Json config = {{"bits", spec.bits},
                       {"checkpoint_format", spec.gptq_v2 ? "gptq_v2" : "gptq"},
                       {"desc_act", spec.group_index == GroupIndex::kShuffled},
                       {"dynamic",
                        {{"-:.*self_attn", Json::object()},
                         {"-:.*shared_expert", Json::object()},
                         {"-:.*layers\\.\\d+\\.mlp\\.(gate|up|down)_proj", Json::object()}}},
                       {"group_size", spec.group},
                       {"lm_head", false},
                       {"pack_dtype", "int32"},
                       {"quant_method", "gptq"},
                       {"sym", true}};
  return config.dump();
}

std::string PackedConfigText(const ExpertSpec& spec, const std::vector<std::string>& ignore) {
  Json weights = {{"dynamic", false},      {"group_size", spec.group > 0 ? Json(spec.group) : Json()},
                  {"num_bits", spec.bits}, {"observer", "minmax"},
                  {"symmetric", true},     {"strategy", spec.group > 0 ? "group" : "channel"},
                  {"type", "int"}};
  Json group = {{"format", "pack-quantized"},
                {"input_activations", nullptr},
                {"output_activations", nullptr},
                {"targets", Json::array({"Linear"})},
                {"weights", weights}};
  Json config;
  config["config_groups"]["group_0"] = group;
  config["format"] = "pack-quantized";
  config["ignore"] = ignore;
  config["ignore"].push_back("lm_head");
  config["kv_cache_scheme"] = nullptr;
  config["quant_method"] = "compressed-tensors";
  config["quantization_status"] = "compressed";
  return config.dump();
}

std::string ConfigText(const ModelSpec& spec) {
  Json config;
  AddFamilyKeys(spec, &config);
  config["dtype"] = "bfloat16";
  config["hidden_act"] = "silu";
  config["hidden_size"] = spec.hidden;
  config["num_experts_per_tok"] = spec.top_k;
  config["num_hidden_layers"] = FirstMoeLayer(spec) + spec.num_layers;
  config["vocab_size"] = 256;
  const std::string quantization = QuantizationText(spec);
  if (!quantization.empty()) config["quantization_config"] = Json::parse(quantization);
  return config.dump(2);
}

std::vector<LayerReference> AddModel(const ModelSpec& spec, CheckpointBuilder* builder) {
  builder->SetConfig(ConfigText(spec));
  if (FirstMoeLayer(spec) > 0) {
    AddGatedBlock(builder, absl::StrCat(LayerPrefix(0), "mlp."), spec.hidden, 2 * spec.intermediate, ExpertSpec{}, 200000u);
  }
  std::vector<LayerReference> layers;
  for (int i = 0; i < spec.num_layers; ++i) layers.push_back(AddLayer(spec, FirstMoeLayer(spec) + i, builder));
  return layers;
}

}  // namespace moed::testing
