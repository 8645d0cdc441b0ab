// Every family's config.json and what it is read as; wrappers; families and keys that are refused.
#include <catch2/catch.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Score = RouterRule::Score;
using Normalize = RouterRule::Normalize;

// A config with the keys that all families but dbrx share: H = 64, four layers.
json Base(const std::string& type, const json& keys) {
  json config = {{"model_type", type}, {"hidden_size", 64}, {"num_hidden_layers", 4}, {"hidden_act", "silu"}};
  config.update(keys);
  return config;
}

json Phimoe() {
  return Base("phimoe", {{"intermediate_size", 96},
                         {"num_local_experts", 16},
                         {"num_experts_per_tok", 2},
                         {"router_jitter_noise", 0.01},
                         {"input_jitter_noise", 0.01}});
}
json Olmoe() {
  return Base("olmoe",
              {{"intermediate_size", 96}, {"num_experts", 8}, {"num_experts_per_tok", 2}, {"norm_topk_prob", false}});
}
json Qwen2() {
  return Base("qwen2_moe", {{"intermediate_size", 512},
                            {"moe_intermediate_size", 96},
                            {"shared_expert_intermediate_size", 160},
                            {"num_experts", 8},
                            {"num_experts_per_tok", 4},
                            {"decoder_sparse_step", 1},
                            {"norm_topk_prob", false}});
}
json QwenNext() {
  json config = Qwen2();
  config["model_type"] = "qwen3_next";
  config["norm_topk_prob"] = true;
  return config;
}
json Wrapped(const std::string& type, json text) { return {{"model_type", type}, {"text_config", std::move(text)}}; }
json Qwen35() {
  json text = Qwen2();
  text["model_type"] = "qwen3_5_moe_text";
  text.erase("norm_topk_prob");
  json config = Wrapped("qwen3_5_moe", text);
  config["architectures"] = {"Qwen3_5MoeForConditionalGeneration"};
  return config;
}
json QwenVl() {
  json text = Qwen3();
  text["model_type"] = "qwen3_vl_moe_text";
  text.erase("architectures");
  return Wrapped("qwen3_vl_moe", text);
}
json DeepseekV2(const std::string& method) {
  return Base("deepseek_v2", {{"moe_intermediate_size", 96},
                              {"n_routed_experts", 16},
                              {"num_experts_per_tok", 6},
                              {"n_shared_experts", 2},
                              {"first_k_dense_replace", 1},
                              {"moe_layer_freq", 1},
                              {"topk_method", method},
                              {"n_group", 8},
                              {"topk_group", 3},
                              {"norm_topk_prob", false},
                              {"scoring_func", "softmax"},
                              {"routed_scaling_factor", 16.0}});
}
json Glm(const std::string& type) {
  return Base(type, {{"moe_intermediate_size", 96},
                     {"n_routed_experts", 8},
                     {"num_experts_per_tok", 4},
                     {"n_shared_experts", 1},
                     {"first_k_dense_replace", 1},
                     {"n_group", 1},
                     {"topk_group", 1},
                     {"norm_topk_prob", true},
                     {"routed_scaling_factor", 1.5}});
}
json KimiLinear() {
  return Base("kimi_linear", {{"moe_intermediate_size", 96},
                              {"num_experts", 8},
                              {"num_experts_per_token", 4},
                              {"num_shared_experts", 1},
                              {"first_k_dense_replace", 1},
                              {"moe_layer_freq", 1},
                              {"moe_renormalize", true},
                              {"moe_router_activation_func", "sigmoid"},
                              {"num_expert_group", 1},
                              {"topk_group", 1},
                              {"routed_scaling_factor", 2.446},
                              {"use_grouped_topk", true}});
}
json Mimo() {
  return Base("mimo_v2_flash", {{"moe_intermediate_size", 96},
                                {"n_routed_experts", 8},
                                {"num_experts_per_tok", 4},
                                {"n_shared_experts", nullptr},
                                {"moe_layer_freq", {0, 1, 1, 1}},
                                {"n_group", 1},
                                {"topk_group", 1},
                                {"norm_topk_prob", true},
                                {"routed_scaling_factor", nullptr},
                                {"scoring_func", "sigmoid"},
                                {"topk_method", "noaux_tc"}});
}
json Minimax() {
  return Base("minimax_m2", {{"intermediate_size", 96},
                             {"num_local_experts", 8},
                             {"num_experts_per_tok", 4},
                             {"shared_intermediate_size", 0},
                             {"scoring_func", "sigmoid"},
                             {"use_routing_bias", true}});
}
json Llama4() {
  json text = Base("llama4_text", {{"intermediate_size", 96},
                                   {"intermediate_size_mlp", 192},
                                   {"num_local_experts", 8},
                                   {"num_experts_per_tok", 1},
                                   {"interleave_moe_layer_step", 2}});
  return Wrapped("llama4", text);
}
json Granite() {
  return Base("granitemoe", {{"intermediate_size", 96}, {"num_local_experts", 8}, {"num_experts_per_tok", 2}});
}
json Dbrx() {
  return json::parse(R"({"model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 64, "n_layers": 4,
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05}})");
}

std::vector<std::pair<Family, json>> AllFamilies() {
  return {{Family::kMixtral, Mixtral()},
          {Family::kPhimoe, Phimoe()},
          {Family::kOlmoe, Olmoe()},
          {Family::kQwen2Moe, Qwen2()},
          {Family::kQwen3Moe, Qwen3()},
          {Family::kQwen3Next, QwenNext()},
          {Family::kQwen3VlMoe, QwenVl()},
          {Family::kQwen35Moe, Qwen35()},
          {Family::kDeepseekV2, DeepseekV2("greedy")},
          {Family::kDeepseekV3, Deepseek()},
          {Family::kGlm4Moe, Glm("glm4_moe")},
          {Family::kGlmMoeDsa, Glm("glm_moe_dsa")},
          {Family::kKimiLinear, KimiLinear()},
          {Family::kMimoV2, Mimo()},
          {Family::kMinimaxM2, Minimax()},
          {Family::kGptOss, GptOss()},
          {Family::kLlama4, Llama4()},
          {Family::kGraniteMoe, Granite()},
          {Family::kDbrx, Dbrx()}};
}

// The object that holds the model's sizes.
json& TextOf(json& config) { return config.contains("text_config") ? config["text_config"] : config; }

void CheckRefused(json config, const std::string& key, const json& value, const std::string& part) {
  TextOf(config)[key] = value;
  const std::string message = Refusal(config.dump());
  INFO(message);
  CHECK(message.find(key + ": wanted ") != std::string::npos);
  CHECK(message.find(part) != std::string::npos);
}

void CheckMissing(json config, const std::string& key) {
  TextOf(config).erase(key);
  const std::string message = Refusal(config.dump());
  INFO(message);
  CHECK(message.find(key + ": wanted ") != std::string::npos);
}

TEST_CASE("Every family is recognised by its model_type") {
  for (const auto& [family, text] : AllFamilies()) {
    INFO(text.dump());
    CHECK(Good(text).family == family);
    CHECK(std::string(FamilyName(family)) != "?");
  }
}

TEST_CASE("In every family each size key must be there, and top-k may not exceed the number of experts") {
  for (const auto& [family, text] : AllFamilies()) {
    if (family == Family::kDbrx) continue;
    CheckMissing(text, "hidden_size");
    CheckMissing(text, "num_hidden_layers");
    json config = text;
    const bool own_width = TextOf(config).contains("moe_intermediate_size");
    CheckMissing(text, own_width ? "moe_intermediate_size" : "intermediate_size");
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
      if (TextOf(config).contains(key)) CheckMissing(text, key);
    }
    const char* top_k = family == Family::kKimiLinear ? "num_experts_per_token" : "num_experts_per_tok";
    CheckMissing(text, top_k);
    CheckRefused(text, top_k, 17, "number of experts");
  }
}

TEST_CASE("phimoe makes two masked picks and takes the noise from the config") {
  const ModelConfig config = Good(Phimoe());
  CHECK(config.router.score == Score::kSparseMixer);
  CHECK(config.router.mixer_noise == 0.01f);
  CHECK(config.router.normalize == Normalize::kNone);
  CHECK(config.intermediate == 96);
  CHECK(config.moe_layers.size() == 4);
  json other = Phimoe();
  other["router_jitter_noise"] = 0.25;
  CHECK(Good(other).router.mixer_noise == 0.25f);
  CheckRefused(Phimoe(), "num_experts_per_tok", 3, "two picks");
}

TEST_CASE("olmoe is softmax that normalises only when it says so") {
  CHECK(Good(Olmoe()).router.normalize == Normalize::kNone);
  CHECK(Good(Olmoe()).router.score == Score::kSoftmax);
  CHECK(Good(Olmoe()).intermediate == 96);
  json config = Olmoe();
  config["norm_topk_prob"] = true;
  CHECK(Good(config).router.normalize == Normalize::kSum);
  config.erase("norm_topk_prob");
  CHECK(Good(config).router.normalize == Normalize::kNone);
}

TEST_CASE("qwen2_moe and qwen3_next have a gated shared expert of a width of its own") {
  for (const json& text : {Qwen2(), QwenNext()}) {
    const ModelConfig config = Good(text);
    CHECK(config.shared_intermediate == 160);
    CHECK(config.shared_gate);
    CHECK(config.intermediate == 96);
    CHECK(std::string(config.names.shared) == "mlp.shared_expert.");
    CheckMissing(text, "shared_expert_intermediate_size");
    CheckRefused(text, "shared_expert_intermediate_size", 0, "got 0");
  }
  CHECK(Good(Qwen2()).router.normalize == Normalize::kNone);
  CHECK(Good(QwenNext()).router.normalize == Normalize::kSum);
  CheckMissing(QwenNext(), "norm_topk_prob");
}

TEST_CASE("qwen3_5_moe is read from its text_config and always normalises") {
  const ModelConfig config = Good(Qwen35());
  CHECK(config.model_type == "qwen3_5_moe_text");
  CHECK(config.shared_gate);
  CHECK(config.router.normalize == Normalize::kSum);
  CHECK(config.names.fused);
  CHECK(config.names.layout == FusedLayout::kRows);
  CHECK(std::string(config.names.layers) == "model.language_model.layers.");
  CheckRefused(Qwen35(), "norm_topk_prob", false, "always normalises");
}

TEST_CASE("qwen3_vl_moe stores its experts transposed and has no shared expert") {
  const ModelConfig config = Good(QwenVl());
  CHECK(config.names.layout == FusedLayout::kColumns);
  CHECK(config.shared_intermediate == 0);
  CHECK_FALSE(config.shared_gate);
  CHECK(config.router.normalize == Normalize::kSum);
  CHECK(config.intermediate == 128);
}

TEST_CASE("deepseek_v2 is softmax with scaling, with or without groups by their maximum") {
  const ModelConfig greedy = Good(DeepseekV2("greedy"));
  CHECK(greedy.router.score == Score::kSoftmax);
  CHECK(greedy.router.groups == 1);
  CHECK(greedy.router.scaling == 16.0f);
  CHECK(greedy.router.normalize == Normalize::kNone);
  CHECK_FALSE(greedy.router.correction_bias);
  CHECK(greedy.shared_intermediate == 192);
  CHECK(greedy.moe_layers == std::vector<int>{1, 2, 3});
  const ModelConfig limited = Good(DeepseekV2("group_limited_greedy"));
  CHECK(limited.router.groups == 8);
  CHECK(limited.router.groups_kept == 3);
  CHECK(limited.router.group_score == RouterRule::GroupScore::kMax);
  CheckRefused(DeepseekV2("greedy"), "topk_method", "noaux_tc", "group_limited_greedy");
  CheckRefused(DeepseekV2("greedy"), "norm_topk_prob", true, "false");
  CheckRefused(DeepseekV2("greedy"), "scoring_func", "sigmoid", "\"softmax\"");
  CheckRefused(DeepseekV2("group_limited_greedy"), "n_group", 3, "a divisor");
  for (const char* key : {"topk_method", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace"}) {
    CheckMissing(DeepseekV2("greedy"), key);
  }
  CheckMissing(DeepseekV2("group_limited_greedy"), "n_group");
}

TEST_CASE("glm4_moe and glm_moe_dsa route as deepseek_v3 does, with their own defaults") {
  for (const std::string type : {"glm4_moe", "glm_moe_dsa"}) {
    const ModelConfig config = Good(Glm(type));
    CHECK(config.router.score == Score::kSigmoid);
    CHECK(config.router.correction_bias);
    CHECK(config.router.groups == 1);
    CHECK(config.router.scaling == 1.5f);
    CHECK(config.router.norm_epsilon == 1e-20f);
    CHECK(config.shared_intermediate == 96);
    CHECK_FALSE(config.shared_gate);
    CHECK(config.moe_layers == std::vector<int>{1, 2, 3});
  }
  json glm = Glm("glm4_moe");
  for (const char* key : {"first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}) {
    glm.erase(key);
  }
  CHECK(Good(glm).router.scaling == 1.0f);
  CHECK(Good(glm).moe_layers == std::vector<int>{1, 2, 3});
  for (const char* key : {"first_k_dense_replace", "routed_scaling_factor", "n_shared_experts"})
    CheckMissing(Glm("glm_moe_dsa"), key);
}

TEST_CASE("kimi_linear has the rule of deepseek_v3 under names of its own") {
  const ModelConfig config = Good(KimiLinear());
  CHECK(config.top_k == 4);
  CHECK(config.num_experts == 8);
  CHECK(config.router.score == Score::kSigmoid);
  CHECK(config.router.correction_bias);
  CHECK(config.router.normalize == Normalize::kSum);
  CHECK(config.router.scaling == 2.446f);
  CHECK(config.shared_intermediate == 96);
  CHECK(std::string(config.names.router) == "block_sparse_moe.gate");
  CHECK(std::string(config.names.shared) == "block_sparse_moe.shared_experts.");
  json other = KimiLinear();
  other["moe_renormalize"] = false;
  CHECK(Good(other).router.normalize == Normalize::kNone);
  other["num_expert_group"] = 4;
  other["topk_group"] = 2;
  CHECK(Good(other).router.groups == 4);
  CHECK(Good(other).router.groups_kept == 2);
  CheckRefused(KimiLinear(), "moe_router_activation_func", "softmax", "\"sigmoid\"");
  CheckRefused(KimiLinear(), "routed_expert_hidden_size", 32, "not served");
  CheckRefused(KimiLinear(), "hidden_act", "situ", "\"silu\"");
}

TEST_CASE("mimo_v2 takes its MoE layers from a list and has neither shared expert nor scaling") {
  const ModelConfig config = Good(Mimo());
  CHECK(config.moe_layers == std::vector<int>{1, 2, 3});
  CHECK(config.router.scaling == 1.0f);
  CHECK(config.router.score == Score::kSigmoid);
  CHECK(config.router.correction_bias);
  CHECK(config.router.normalize == Normalize::kSum);
  CHECK(config.shared_intermediate == 0);
  json plain = Mimo();
  plain["model_type"] = "mimo_v2";
  CHECK(Good(plain).family == Family::kMimoV2);
  CheckMissing(Mimo(), "norm_topk_prob");
  CheckRefused(Mimo(), "scoring_func", "softmax", "\"sigmoid\"");
}

TEST_CASE("minimax_m2 keeps its correction bias in the block, not in the gate") {
  const ModelConfig config = Good(Minimax());
  CHECK(config.router.score == Score::kSigmoid);
  CHECK(config.router.normalize == Normalize::kSum);
  CHECK(config.router.correction_bias);
  CHECK(std::string(config.names.correction_bias) == "block_sparse_moe.e_score_correction_bias");
  json other = Minimax();
  other["use_routing_bias"] = false;
  CHECK_FALSE(Good(other).router.correction_bias);
  CheckMissing(Minimax(), "use_routing_bias");
  CheckRefused(Minimax(), "shared_intermediate_size", 96, "not known");
}

TEST_CASE("llama4 weighs the expert's input by a sigmoid, in every second layer, beside a shared expert") {
  const ModelConfig config = Good(Llama4());
  CHECK(config.router.score == Score::kSigmoid);
  CHECK(config.router.weight_on_input);
  CHECK(config.router.normalize == Normalize::kNone);
  CHECK(config.top_k == 1);
  CHECK(config.moe_layers == std::vector<int>{1, 3});
  CHECK(config.shared_intermediate == 96);
  CHECK_FALSE(config.shared_gate);
  CHECK(config.names.layout == FusedLayout::kColumns);
  json listed = Llama4();
  listed["text_config"]["moe_layers"] = {1, 3};
  CHECK(Good(listed).moe_layers == std::vector<int>{1, 3});
  CheckRefused(Llama4(), "moe_layers", {0, 1}, "interleave_moe_layer_step (2)");
}

TEST_CASE("granitemoe is softmax over the chosen, with linear layers that hold all experts") {
  const ModelConfig config = Good(Granite());
  CHECK(config.router.score == Score::kSoftmaxOfChosen);
  CHECK_FALSE(config.router_bias);
  CHECK(config.names.layout == FusedLayout::kLinear);
  CHECK(config.shared_intermediate == 0);
}

TEST_CASE("dbrx keeps its sizes in ffn_config and divides by a p-norm") {
  const ModelConfig config = Good(Dbrx());
  CHECK(config.hidden == 64);
  CHECK(config.intermediate == 96);
  CHECK(config.num_experts == 16);
  CHECK(config.top_k == 4);
  CHECK(config.num_layers == 4);
  CHECK(config.router.normalize == Normalize::kPNorm);
  CHECK(config.router.norm_p == 1.0f);
  json other = Dbrx();
  other["ffn_config"]["moe_normalize_expert_weights"] = nullptr;
  CHECK(Good(other).router.normalize == Normalize::kNone);
  other["ffn_config"]["moe_normalize_expert_weights"] = 2;
  CHECK(Good(other).router.norm_p == 2.0f);
  other["ffn_config"]["ffn_act_fn"] = {{"name", "silu"}};
  CHECK(Good(other).activation == Activation{});
  other["ffn_config"]["ffn_act_fn"] = {{"name", "gelu"}};
  CHECK(Refusal(other.dump()).find("ffn_config.ffn_act_fn") != std::string::npos);
  for (const char* key : {"ffn_hidden_size", "moe_num_experts", "moe_top_k"}) {
    json missing = Dbrx();
    missing["ffn_config"].erase(key);
    CHECK(Refusal(missing.dump()).find(std::string("config.json: ffn_config.") + key) == 0);
  }
  for (const json& bad : {json(), json(3), json::array()}) {
    json wrong = Dbrx();
    wrong["ffn_config"] = bad;
    CHECK(Refusal(wrong.dump()).find("ffn_config: wanted an object") != std::string::npos);
  }
}

TEST_CASE("A wrapper is read as the text model that it wraps, whatever its own name") {
  json text = Deepseek();
  text["model_type"] = "kimi_k2";
  json config = Wrapped("kimi_k25", text);
  config["architectures"] = {"KimiK25ForConditionalGeneration"};
  CHECK(Good(config).family == Family::kDeepseekV3);
  CHECK(Good(config).model_type == "kimi_k2");
  // A text model without a name of its own is the wrapper's.
  json bare = QwenVl();
  bare["text_config"].erase("model_type");
  CHECK(Good(bare).family == Family::kQwen3VlMoe);
  // A text model alone, without its wrapper.
  CHECK(Good(Llama4()["text_config"]).family == Family::kLlama4);
}

TEST_CASE("Wrappers that contradict themselves, or wrap what is not served, are refused") {
  json config = QwenVl();
  config["text_config"] = 3;
  CHECK(Refusal(config.dump()).find("text_config: wanted an object") != std::string::npos);
  config = QwenVl();
  config["text_config"]["model_type"] = "qwen3_5_moe_text";
  CHECK(Refusal(config.dump()).find("the text model of the model_type qwen3_vl_moe") != std::string::npos);
  config["text_config"]["model_type"] = "llama";
  CHECK(Refusal(config.dump()).find("text_config.model_type: wanted a model of ") != std::string::npos);
  config = Wrapped("some_wrapper", json::object());
  CHECK(Refusal(config.dump()).find("text_config.model_type") != std::string::npos);
  config = QwenVl();
  config["text_config"].erase("hidden_size");
  CHECK(Refusal(config.dump()).find("config.json: text_config.hidden_size") == 0);
}

TEST_CASE("Families with facts that are not verified are refused by name, alone and wrapped") {
  for (const std::string name : {"jetmoe", "deepseek_v4", "kimi_k3", "granitemoeshared", "granitemoehybrid"}) {
    json config = Deepseek();
    config.erase("architectures");
    config["model_type"] = name;
    const std::string alone = Refusal(config.dump());
    INFO(alone);
    CHECK(alone.find("model_type: wanted a family that is served (" + name + " is not: ") != std::string::npos);
    CHECK(Refusal(Wrapped("wrapper", config).dump()).find("text_config.model_type") != std::string::npos);
    CHECK(Refusal(Wrapped(name, Deepseek()).dump()).find(name + " is not") != std::string::npos);
  }
}

TEST_CASE("The quantization of a wrapped model may be declared at the top or in the text_config") {
  json config = QwenVl();
  config["text_config"]["quantization_config"] = Gptq();
  CHECK(Good(config).quant->Method() == "gptq");
  config = QwenVl();
  config["quantization_config"] = Packed(json::array());
  CHECK(Good(config).quant->Method() == "compressed-tensors");
  config["text_config"]["quantization_config"] = Gptq();
  CHECK(Good(config).quant->Method() == "compressed-tensors");
}

}  // namespace
}  // namespace moed
