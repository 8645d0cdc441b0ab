// config.json of four families in depth, what is refused in it, and the files beside it; all families: model_family_test.cc.
#include <catch2/catch.hpp>

#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

void CheckRefused(const json& base, const std::string& key, const json& value, const std::string& part) {
  json config = base;
  config[key] = value;
  INFO(key << " = " << value.dump());
  const std::string message = Refusal(config.dump());
  INFO(message);
  CHECK(message.find(key) != std::string::npos);
  CHECK(message.find(part) != std::string::npos);
}

TEST_CASE("A mixtral config gives softmax over all experts, always normalised, in every layer") {
  const ModelConfig config = Good(Mixtral());
  CHECK(config.family == Family::kMixtral);
  CHECK(config.model_type == "mixtral");
  CHECK(config.hidden == 256);
  CHECK(config.intermediate == 448);
  CHECK(config.num_experts == 8);
  CHECK(config.top_k == 2);
  CHECK(config.moe_layers == std::vector<int>{0, 1});
  CHECK(config.router.score == RouterRule::Score::kSoftmax);
  CHECK(config.router.normalize == RouterRule::Normalize::kSum);
  CHECK(config.router.scaling == 1.0f);
  CHECK_FALSE(config.router.correction_bias);
  CHECK(config.activation == Activation{});
  CHECK(config.shared_intermediate == 0);
  CHECK_FALSE(config.expert_biases);
  CHECK(config.quant->Method() == "none");
}

TEST_CASE("A qwen3_moe config normalises only when it says so") {
  CHECK(Good(Qwen3()).router.normalize == RouterRule::Normalize::kSum);
  CHECK(Good(Qwen3()).intermediate == 128);
  json config = Qwen3();
  config["norm_topk_prob"] = false;
  CHECK(Good(config).router.normalize == RouterRule::Normalize::kNone);
  config.erase("norm_topk_prob");
  CHECK(Good(config).router.normalize == RouterRule::Normalize::kNone);
}

TEST_CASE("A deepseek_v3 config gives sigmoid, correction bias, groups by their two best, scaling and a shared expert") {
  const ModelConfig config = Good(Deepseek());
  CHECK(config.router.score == RouterRule::Score::kSigmoid);
  CHECK(config.router.correction_bias);
  CHECK(config.router.groups == 4);
  CHECK(config.router.groups_kept == 2);
  CHECK(config.router.group_score == RouterRule::GroupScore::kTopTwoSum);
  CHECK(config.router.normalize == RouterRule::Normalize::kSum);
  CHECK(config.router.norm_epsilon == 1e-20f);
  CHECK(config.router.scaling == 2.5f);
  CHECK(config.shared_intermediate == 128);
  CHECK(config.moe_layers == std::vector<int>{1, 2});
  CHECK(config.num_layers == 3);
}

TEST_CASE("Absent deepseek_v3 keys have the defaults of the class; null means none") {
  json config = Deepseek();
  for (const char* key : {"n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace",
                          "n_shared_experts"}) {
    config.erase(key);
  }
  config["num_hidden_layers"] = 5;
  const ModelConfig absent = Good(config);
  CHECK(absent.router.groups == 8);
  CHECK(absent.router.groups_kept == 4);
  CHECK(absent.router.normalize == RouterRule::Normalize::kSum);
  CHECK(absent.router.scaling == 2.5f);
  CHECK(absent.moe_layers == std::vector<int>{3, 4});
  CHECK(absent.shared_intermediate == 128);
  config["n_group"] = config["topk_group"] = config["n_shared_experts"] = nullptr;
  const ModelConfig null = Good(config);
  CHECK(null.router.groups == 1);
  CHECK(null.router.groups_kept == 1);
  CHECK(null.shared_intermediate == 0);
}

TEST_CASE("A gpt_oss config gives its clamped activation, biases, and softmax over the chosen") {
  const ModelConfig config = Good(GptOss());
  CHECK(config.activation.kind == Activation::Kind::kSwigluOai);
  CHECK(config.activation.alpha == 1.702f);
  CHECK(config.activation.clamped);
  CHECK(config.activation.limit == 7.0f);
  CHECK(config.router.score == RouterRule::Score::kSoftmaxOfChosen);
  CHECK(config.router_bias);
  CHECK(config.expert_biases);
  json other = GptOss();
  other["swiglu_limit"] = 5.5;
  CHECK(Good(other).activation.limit == 5.5f);
}

TEST_CASE("B25: a limit is honoured for plain SwiGLU, too") {
  json config = Mixtral();
  config["swiglu_limit"] = 7.0;
  const Activation activation = Good(config).activation;
  CHECK(activation.kind == Activation::Kind::kSilu);
  CHECK(activation.clamped);
  CHECK(activation.limit == 7.0f);
  CheckRefused(Mixtral(), "swiglu_limit", 0, "got 0");
  CheckRefused(Mixtral(), "swiglu_limit", -7, "got -7");
  CheckRefused(Mixtral(), "swiglu_limit", "7", "a number");
}

TEST_CASE("The number of experts may be written under any of its names, which must agree") {
  for (const json& base : {Mixtral(), Qwen3(), Deepseek(), GptOss()}) {
    for (const char* name : {"num_local_experts", "num_experts", "n_routed_experts"}) {
      json config = base;
      for (const char* other : {"num_local_experts", "num_experts", "n_routed_experts"}) config.erase(other);
      CHECK(Refusal(config.dump()).find("experts: wanted an integer") != std::string::npos);
      config[name] = 32;
      CHECK(Good(config).num_experts == 32);
      for (const char* other : {"num_local_experts", "num_experts", "n_routed_experts"}) {
        if (std::string(other) == name) continue;
        config[other] = 32;
        CHECK(Good(config).num_experts == 32);
        config[other] = 31;
        CHECK(Refusal(config.dump()).find("the same as") != std::string::npos);
        config.erase(other);
      }
    }
  }
  CheckRefused(Mixtral(), "num_experts", 9, "the same as num_local_experts (8), got 9");
  json config = GptOss();
  config["experts_per_token"] = 2;
  CHECK(Good(config).top_k == 2);
  CheckRefused(GptOss(), "experts_per_token", 4, "the same as num_experts_per_tok (2)");
}

TEST_CASE("Which layers are MoE follows the rule of the family; layers past the last are ignored") {
  json qwen = Qwen3();
  qwen["decoder_sparse_step"] = 2;
  CHECK(Good(qwen).moe_layers == std::vector<int>{1, 3});
  qwen["mlp_only_layers"] = {1, 77};
  CHECK(Good(qwen).moe_layers == std::vector<int>{3});
  qwen["mlp_only_layers"] = {1, 3};
  CHECK(Refusal(qwen.dump()).find("at least one MoE layer") != std::string::npos);
  json deepseek = Deepseek();
  deepseek["num_hidden_layers"] = 7;
  deepseek["moe_layer_freq"] = 2;
  CHECK(Good(deepseek).moe_layers == std::vector<int>{2, 4, 6});
  deepseek["first_k_dense_replace"] = 0;
  CHECK(Good(deepseek).moe_layers == std::vector<int>{0, 2, 4, 6});
  deepseek["moe_layer_freq"] = {0, 1, 1, 0, 0, 1, 0, 1, 1};
  CHECK(Good(deepseek).moe_layers == std::vector<int>{1, 2, 5});
  deepseek["moe_layer_freq"] = {0, 1, 1};
  CHECK(Refusal(deepseek.dump()).find("at least 7 entries") != std::string::npos);
  deepseek["moe_layer_freq"] = {0, 1, 2, 0, 0, 0, 0};
  CHECK(Refusal(deepseek.dump()).find("moe_layer_freq") != std::string::npos);
  CheckRefused(Deepseek(), "moe_layer_freq", 0, "1..");
  CheckRefused(Qwen3(), "decoder_sparse_step", 0, "1..");
  CheckRefused(Qwen3(), "mlp_only_layers", 3, "a list");
}

TEST_CASE("The family follows model_type, and the architecture where that name is not known") {
  json config = Deepseek();
  config["model_type"] = "kimi_k2";
  CHECK(Good(config).family == Family::kDeepseekV3);
  CHECK(Good(config).model_type == "kimi_k2");
  config = Mixtral();
  config.erase("architectures");
  CHECK(Good(config).family == Family::kMixtral);
  CheckRefused(Mixtral(), "architectures", {"Qwen3MoeForCausalLM"}, "architecture of the model_type mixtral");
  config = Mixtral();
  config["architectures"] = {"LlamaForCausalLM"};
  config["model_type"] = "llama";
  const std::string refusal = Refusal(config.dump());
  CHECK(refusal.find("model_type: wanted a model of mixtral, phimoe, ") != std::string::npos);
  CHECK(refusal.find("dbrx, got \"llama\"") != std::string::npos);
  config.erase("model_type");
  config.erase("architectures");
  CHECK(Refusal(config.dump()).find("got nothing") != std::string::npos);
}

TEST_CASE("A wrong key is refused with its name, what was wanted and what was got") {
  CheckRefused(Mixtral(), "hidden_size", "256", "wanted an integer in 1..1048576, got \"256\"");
  CheckRefused(Mixtral(), "hidden_size", 0, "got 0");
  CheckRefused(Mixtral(), "hidden_size", -1, "got -1");
  CheckRefused(Mixtral(), "hidden_size", 1048577, "got 1048577");
  CheckRefused(Mixtral(), "hidden_size", 256.0, "got 256.0");
  CheckRefused(Mixtral(), "hidden_size", nullptr, "got null");
  CheckRefused(Mixtral(), "hidden_size", uint64_t{1} << 63, "got 9223372036854775808");
  CheckRefused(Mixtral(), "intermediate_size", json::array({448}), "got [448]");
  CheckRefused(Mixtral(), "num_hidden_layers", true, "got true");
  CheckRefused(Mixtral(), "num_local_experts", 65536, "1..65535");
  CheckRefused(Mixtral(), "num_experts_per_tok", 9, "at most the number of experts, 8");
  CheckRefused(Mixtral(), "model_type", 5, "a string");
  CheckRefused(Mixtral(), "architectures", "MixtralForCausalLM", "a list of strings");
  CheckRefused(Mixtral(), "hidden_act", "relu", "got \"relu\"");
  CheckRefused(Mixtral(), "hidden_activation", "gelu", "the same as hidden_act");
  CheckRefused(GptOss(), "hidden_act", "gelu", "\"silu\"");
  CheckRefused(Qwen3(), "norm_topk_prob", 1, "true or false");
  CheckRefused(Deepseek(), "scoring_func", "softmax", "wanted \"sigmoid\"");
  CheckRefused(Deepseek(), "topk_method", "greedy", "wanted \"noaux_tc\"");
  CheckRefused(Deepseek(), "n_group", 3, "a divisor of the number of experts, 16");
  CheckRefused(Deepseek(), "topk_group", 5, "at most n_group, 4");
  CheckRefused(Deepseek(), "num_experts_per_tok", 9, "topk_group: wanted groups with at least num_experts_per_tok, 9");
  CheckRefused(Deepseek(), "routed_scaling_factor", 0, "a number");
  CheckRefused(Deepseek(), "n_shared_experts", 65535, "n_shared_experts");
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_experts_per_tok"}) {
    json config = Mixtral();
    config.erase(key);
    CHECK(Refusal(config.dump()).find(std::string("config.json: ") + key) == 0);
  }
  json config = Qwen3();
  config.erase("moe_intermediate_size");
  CHECK(Refusal(config.dump()).find("moe_intermediate_size") != std::string::npos);
}

TEST_CASE("The agreeing router keys of deepseek_v3 and the served activations are accepted") {
  json config = Deepseek();
  config["scoring_func"] = "sigmoid";
  config["topk_method"] = "noaux_tc";
  CHECK(Good(config).router.correction_bias);
  config = Mixtral();
  config["hidden_act"] = "gelu";
  CHECK(Good(config).activation.kind == Activation::Kind::kGelu);
  config["hidden_act"] = "gelu_pytorch_tanh";
  CHECK(Good(config).activation.kind == Activation::Kind::kGeluTanh);
  config.erase("hidden_act");
  CHECK(Good(config).activation.kind == Activation::Kind::kSilu);
}

TEST_CASE("Texts that are no proper JSON object are refused") {
  for (const char* text : {"", "{", "[1]", "null", "{\"a\": 1,}", "{\"a\": 1e999}", "{\"a\": \"\xff\"}"}) {
    INFO(text);
    CHECK(Refusal(text).find("config.json: ") == 0);
  }
  CHECK(Refusal("{\"hidden_size\": 1, \"hidden_size\": 2}").find("\"hidden_size\" appears twice") != std::string::npos);
  const std::string deep = std::string(100000, '[');
  CHECK(Refusal("{\"x\": " + deep).find("nested deeper") != std::string::npos);
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += "{\"x\":";
  CHECK(Refusal(nested).find("nested deeper") != std::string::npos);
  const std::string large = "{\"x\": \"" + std::string((16 << 20) + 1, 'a') + "\"}";
  CHECK(Refusal(large).find("allowed are 16777216") != std::string::npos);
}

// A directory that is removed at the end of the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string path = (std::filesystem::temp_directory_path() / "moed_config_XXXXXX").string();
    REQUIRE(mkdtemp(path.data()) != nullptr);
    path_ = path;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  void Write(const std::string& name, const std::string& text) const { std::ofstream(path_ + "/" + name) << text; }

 private:
  std::string path_;
};

TEST_CASE("A directory without config.json is NOT_FOUND") {
  const TemporaryDirectory directory;
  CHECK(ReadModelConfig(directory.path()).status().code() == absl::StatusCode::kNotFound);
}

TEST_CASE("Side files are read when config.json declares nothing, and only then") {
  const TemporaryDirectory directory;
  directory.Write("config.json", Qwen3().dump());
  CHECK(ReadModelConfig(directory.path())->quant->Method() == "none");
  json side = Gptq();
  side.erase("quant_method");  // the older tools' files have none
  side["dynamic"] = {{"-:.*experts\\.3\\.", json::object()}};
  directory.Write("quantize_config.json", side.dump());
  const auto config = ReadModelConfig(directory.path());
  REQUIRE(config.ok());
  CHECK(config->quant->Method() == "gptq");
  CHECK(Declared(*config, kExpert).container == Container::kPlain);
  CHECK(Declared(*config, "model.layers.0.mlp.experts.4.gate_proj").container == Container::kGptq);
  directory.Write("config.json", WithQuant(Qwen3(), Packed({})).dump());
  CHECK(ReadModelConfig(directory.path())->quant->Method() == "compressed-tensors");
}

TEST_CASE("Side files that cannot be read, or are of tools that are not served, are refused and not ignored") {
  for (const auto& [file, text, part] : std::vector<std::array<std::string, 3>>{
           {"hf_quant_config.json", R"({"quant_method": "exl2"})", "hf_quant_config.json: quant_method: \"exl2\""},
           {"quantize_config.json", R"({"quant_method": "exl2"})", "\"exl2\" is not supported"},
           {"quant_config.json", R"({"quant_method": 3})", "quant_config.json: quant_method"},
           {"quantization_config.json", R"({"bits": 4})", "quantization_config.json: quant_method: nothing"},
           {"quantize_config.json", "{", "quantize_config.json: not valid JSON"}}) {
    const TemporaryDirectory directory;
    directory.Write("config.json", Qwen3().dump());
    directory.Write(file, text);
    const auto config = ReadModelConfig(directory.path());
    REQUIRE(config.status().code() == absl::StatusCode::kInvalidArgument);
    INFO(std::string(config.status().message()));
    CHECK(std::string(config.status().message()).find(part) != std::string::npos);
  }
}

}  // namespace
}  // namespace moed
