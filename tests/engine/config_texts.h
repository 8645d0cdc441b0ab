// Config texts of the four families and of the served quantization methods, for tests of their parser.
#ifndef MOED_TESTS_ENGINE_CONFIG_TEXTS_H_
#define MOED_TESTS_ENGINE_CONFIG_TEXTS_H_

#include <catch2/catch.hpp>

#include <string>

#include "engine/model_config.h"
#include "nlohmann/json.hpp"

namespace moed::testing {

using nlohmann::json;

inline json Mixtral() {
  return json::parse(R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 256,
    "intermediate_size": 448, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "hidden_act": "silu", "head_dim": null, "router_jitter_noise": 0.0})");
}

inline json Qwen3() {
  return json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 16,
    "num_experts_per_tok": 4, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []})");
}

inline json Deepseek() {
  return json::parse(R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3, "n_routed_experts": 16,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "hidden_act": "silu"})");
}

inline json GptOss() {
  return json::parse(R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 288,
    "intermediate_size": 288, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "hidden_act": "silu"})");
}

inline ModelConfig Good(const json& config) {
  const auto parsed = ParseModelConfig(config.dump());
  INFO(parsed.status().ToString());
  REQUIRE(parsed.ok());
  return *parsed;
}

// The refusal of `config`, checked to be one that names what is wrong.
inline std::string Refusal(const std::string& text) {
  const auto parsed = ParseModelConfig(text);
  REQUIRE(parsed.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(parsed.status().message());
}

// `config` with a quantization_config.
inline json WithQuant(json config, const json& quant) {
  config["quantization_config"] = quant;
  return config;
}

// The text of `config` with `quant` as its quantization_config, whose keys keep their order.
inline std::string QuantText(const std::string& quant, const json& config = Qwen3()) {
  std::string text = config.dump();
  text.pop_back();
  return text + ", \"quantization_config\": " + quant + "}";
}

inline ModelConfig GoodQuant(const std::string& quant, const json& config = Qwen3()) {
  const auto parsed = ParseModelConfig(QuantText(quant, config));
  INFO(quant << " " << parsed.status().ToString());
  REQUIRE(parsed.ok());
  return *parsed;
}

inline json Gptq() {
  return json::parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
    "checkpoint_format": "gptq", "lm_head": false, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]}})");
}

inline DeclaredScheme Declared(const ModelConfig& config, const std::string& module) {
  const auto declared = config.quant->For(module);
  INFO(declared.status().ToString());
  REQUIRE(declared.ok());
  return *declared;
}

inline std::string NotServed(const ModelConfig& config, const std::string& module) {
  const auto declared = config.quant->For(module);
  REQUIRE(declared.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(declared.status().message());
}

inline constexpr char kExpert[] = "model.layers.0.mlp.experts.3.gate_proj";

// What `quant` declares for kExpert.
inline DeclaredScheme ExpertOf(const std::string& quant) { return Declared(GoodQuant(quant), kExpert); }

// Why `quant` is not served for kExpert.
inline std::string NotServedOf(const std::string& quant) { return NotServed(GoodQuant(quant), kExpert); }

inline bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline json PackedWeights(int bits, int group) {
  json weights = {{"num_bits", bits}, {"type", "int"}, {"symmetric", true}, {"dynamic", false}};
  weights["strategy"] = group > 0 ? "group" : "channel";
  if (group > 0) weights["group_size"] = group;
  return weights;
}

inline json Packed(const json& ignore, const json& targets = {"Linear"}) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"ignore", ignore},
          {"transform_config", json::object()},
          {"sparsity_config", json::object()},
          {"config_groups",
           {{"group_0",
             {{"targets", targets},
              {"weights", PackedWeights(4, 64)},
              {"input_activations", nullptr},
              {"format", nullptr}}}}}};
}

}  // namespace moed::testing

#endif  // MOED_TESTS_ENGINE_CONFIG_TEXTS_H_
