// The methods fp8, blockwise_int8 and mxfp4: what they declare per module, and what is refused.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

std::string Fp8(const std::string& more) { return R"({"quant_method": "fp8")" + more + "}"; }

TEST_CASE("fp8 declares blocks with dynamic groups, or one scale a tensor with dynamic or static activations") {
  DeclaredScheme declared =
      ExpertOf(Fp8(R"(, "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64])"));
  CHECK(declared.container == Container::kFp8);
  CHECK(declared.linear.weights.element == ElementType::kFp8E4m3);
  CHECK(declared.linear.weights.group == GroupShape{128, 64});
  ActivationScheme wanted{ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 64}};
  CHECK(declared.linear.input == wanted);
  wanted.rule = ScaleRule::kAbsMaxPow2Up;
  CHECK(ExpertOf(Fp8(R"(, "weight_block_size": [128, 64], "scale_fmt": "ue8m0")")).linear.input == wanted);
  declared = ExpertOf(Fp8(R"(, "fmt": "float8_e4m3fn")"));
  CHECK(declared.linear.weights.group == GroupShape{0, 0});
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}});
  declared = ExpertOf(Fp8(R"(, "weight_block_size": null, "activation_scheme": "static")"));
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kStatic, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}});
}

TEST_CASE("fp8 values that are not served are refused by key and value") {
  CHECK(Contains(NotServedOf(Fp8(R"(, "fmt": "e5m2")")), "fmt: \"e5m2\" is not supported"));
  CHECK(Contains(NotServedOf(Fp8(R"(, "activation_scheme": "none")")), "activation_scheme: \"none\" is not supported"));
  CHECK(Contains(NotServedOf(Fp8(R"(, "activation_scheme": "static", "weight_block_size": [128, 128])")),
                 "activation_scheme: \"static\" is not supported (served: \"dynamic\" with weight_block_size)"));
  CHECK(Contains(NotServedOf(Fp8(R"(, "moe_quant_algo": "NVFP4")")), "moe_quant_algo: \"NVFP4\" is not supported"));
  for (const char* block : {"[128]", "[128, 0]", "128", "[128, 128, 1]"}) {
    CHECK(Contains(Refusal(QuantText(Fp8(std::string(R"(, "weight_block_size": )") + block))), "weight_block_size: wanted"));
  }
  CHECK(Contains(Refusal(QuantText(Fp8(R"(, "scale_fmt": "e4m3")"))), "scale_fmt: wanted"));
  CHECK(Contains(Refusal(QuantText(Fp8(R"(, "ignored_layers": [1])"))), "ignored_layers: wanted a list of strings"));
}

TEST_CASE("fp8 exceptions are names, containers or bare components, under either key") {
  for (const char* key : {"modules_to_not_convert", "ignored_layers"}) {
    const ModelConfig config = GoodQuant(Fp8(std::string(", \"") + key + R"(": ["gate", "lm_head", "e_score_correction_bias",
        "model.layers.0.mlp", "model.layers.1.self_attn", "visual.*", "re:.*layers\\.3\\."])"),
                                         Deepseek());
    CHECK(Declared(config, "model.layers.0.mlp.gate_proj").container == Container::kPlain);
    CHECK(Declared(config, "model.layers.1.self_attn.o_proj").container == Container::kPlain);
    CHECK(Declared(config, "model.layers.3.mlp.experts.0.up_proj").container == Container::kPlain);
    CHECK(Declared(config, "visual.blocks.0").container == Container::kPlain);
    CHECK(Declared(config, "model.layers.1.mlp.experts.0.gate_proj").container == Container::kFp8);
    CHECK(Declared(config, "model.layers.10.mlp.experts.0.gate_proj").container == Container::kFp8);
  }
}

TEST_CASE("Experts of a model with FP4 experts are FP4, its other modules FP8") {
  json model = Deepseek();
  model["expert_dtype"] = "fp4";
  const std::string quant = Fp8(R"(, "weight_block_size": [128, 128], "scale_fmt": "ue8m0")");
  ModelConfig config = GoodQuant(quant, model);
  const DeclaredScheme expert = Declared(config, "layers.1.ffn.experts.3.w1");
  CHECK(expert.container == Container::kFp4);
  CHECK(expert.linear.weights == WeightScheme{ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}});
  const DeclaredScheme shared = Declared(config, "layers.1.ffn.shared_experts.w1");
  CHECK(shared.container == Container::kFp8);
  CHECK(expert.linear.input == shared.linear.input);
  model["expert_dtype"] = "fp3";
  config = GoodQuant(quant, model);
  CHECK(Contains(NotServed(config, "layers.1.ffn.experts.3.w1"), "expert_dtype: \"fp3\" is not supported"));
  CHECK(Declared(config, "layers.1.ffn.shared_experts.w1").container == Container::kFp8);
}

TEST_CASE("blockwise_int8 declares int8 blocks with dynamic groups of activations") {
  const DeclaredScheme declared = ExpertOf(R"({"quant_method": "blockwise_int8", "weight_block_size": [128, 128]})");
  CHECK(declared.container == Container::kInt8);
  CHECK(declared.linear.weights.element == ElementType::kInt8);
  CHECK(declared.linear.weights.group == GroupShape{128, 128});
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kDynamic, ElementType::kInt8, ScaleType::kF32, {1, 128}});
  CHECK(ExpertOf(R"({"quant_method": "blockwise_int8"})").linear == declared.linear);
  CHECK(Contains(NotServedOf(R"({"quant_method": "blockwise_int8", "activation_scheme": "static"})"),
                 "activation_scheme: \"static\""));
}

TEST_CASE("mxfp4 declares the fused experts, without quantized activations, and nothing else") {
  const ModelConfig config = GoodQuant(R"({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
      "model.layers.*.mlp.router", "model.layers.1.mlp.experts", "model.embed_tokens", "lm_head"]})",
                                       GptOss());
  CHECK(config.quant->Method() == "mxfp4");
  const DeclaredScheme declared = Declared(config, "model.layers.0.mlp.experts");
  CHECK(declared.container == Container::kMxfp4Fused);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}});
  CHECK(declared.linear.input.mode == ActivationMode::kNone);
  CHECK(Declared(config, "model.layers.1.mlp.experts").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.10.mlp.experts").container == Container::kMxfp4Fused);
  CHECK(Declared(config, "model.layers.0.self_attn.q_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.mlp.router").container == Container::kPlain);
}

}  // namespace
}  // namespace moed
