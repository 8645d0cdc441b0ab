// ModelOpt: algorithms by name, exceptions by glob, and mixed precision.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

std::string Algorithm(const std::string& name, const std::string& more = "") {
  return R"({"quant_method": "modelopt", "quant_algo": ")" + name + "\"" + more + "}";
}

TEST_CASE("ModelOpt's FP8 algorithms are static per tensor, dynamic per token, and weight-only blocks") {
  const ElementType fp8 = ElementType::kFp8E4m3;
  DeclaredScheme declared = ExpertOf(Algorithm("FP8"));
  CHECK(declared.container == Container::kFp8);
  CHECK(declared.linear.weights.group == GroupShape{0, 0});
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kStatic, fp8, ScaleType::kF32, {0, 0}});
  declared = ExpertOf(Algorithm("FP8_PER_CHANNEL_PER_TOKEN"));
  CHECK(declared.linear.weights.group == GroupShape{1, 0});
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kDynamic, fp8, ScaleType::kF32, {1, 0}});
  for (const char* name : {"FP8_PB_WO", "fp8_pb_wo"}) {
    declared = ExpertOf(Algorithm(name));
    CHECK(declared.container == Container::kFp8);
    CHECK(declared.linear.weights.group == GroupShape{128, 128});
    CHECK(declared.linear.input.mode == ActivationMode::kNone);
  }
}

TEST_CASE("ModelOpt's NVFP4 multiplies by its global scale, with and without quantized activations") {
  for (const char* name : {"NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"}) {
    const DeclaredScheme declared = ExpertOf(Algorithm(name, R"(, "group_size": 16)"));
    CHECK(declared.container == Container::kFp4);
    CHECK(declared.linear.weights ==
          WeightScheme{ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}, GlobalScale::kMultiplier});
    ActivationScheme wanted;
    if (name[0] == 'N') {
      wanted = ActivationScheme{ActivationMode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}};
      wanted.global_scale = true;
    }
    CHECK(declared.linear.input == wanted);
  }
}

TEST_CASE("ModelOpt's MXFP8 rounds the scales of activations up") {
  const DeclaredScheme declared = ExpertOf(Algorithm("MXFP8"));
  CHECK(declared.container == Container::kFp8);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}});
  CHECK(declared.linear.input ==
        ActivationScheme{ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}, ScaleRule::kMxCeil});
}

TEST_CASE("ModelOpt algorithms that are not served are refused by name, only when a module needs them") {
  for (const char* name :
       {"W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A8_MXFP4_FP8", "INT3"}) {
    const ModelConfig config = GoodQuant(Algorithm(name, R"(, "ignore": ["model.layers.1*"])"));
    const std::string message = NotServed(config, kExpert);
    INFO(message);
    CHECK(Contains(message, std::string("quant_algo: \"") + name + "\""));
    CHECK(Contains(message, "is not supported (served: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4"));
    CHECK(Declared(config, "model.layers.1.mlp.experts.0.up_proj").container == Container::kPlain);
  }
  CHECK(Contains(NotServedOf(Algorithm("W4A8_MXFP4_FP8")), "do not tell the scales of its FP8 activations"));
  CHECK(Contains(NotServedOf(Algorithm("NVFP4", R"(, "group_size": 32)")), "group_size: 32 with quant_algo \"NVFP4\""));
  CHECK(Contains(Refusal(QuantText(R"({"quant_method": "modelopt"})")), "quant_algo: wanted one of FP8"));
  CHECK(Contains(Refusal(QuantText(R"({"quant_method": "modelopt", "quant_algo": 8})")), "quant_algo: wanted a string"));
}

TEST_CASE("ModelOpt exceptions are globs over whole names: layers.1* is layer 10 too, layers.1.self_attn* is not") {
  for (const char* key : {"exclude_modules", "ignore"}) {
    const std::string start = std::string(", \"") + key + "\": ";
    ModelConfig config =
        GoodQuant(Algorithm("FP8", start + R"(["lm_head", "model.layers.1*", "*layers.3.mlp.experts.[0-2].*",
        "model.layers.2.mlp.experts.0"])"));
    const auto plain = [&config](const std::string& module) {
      return Declared(config, module).container == Container::kPlain;
    };
    CHECK(plain("model.layers.1.mlp.experts.0.up_proj"));
    CHECK(plain("model.layers.10.mlp.experts.0.up_proj"));
    CHECK(plain("model.language_model.layers.1.mlp.experts.0.up_proj"));
    CHECK_FALSE(plain("model.layers.2.mlp.experts.0.up_proj"));  // an exact name is no container
    CHECK(plain("model.layers.3.mlp.experts.2.up_proj"));
    CHECK_FALSE(plain("model.layers.3.mlp.experts.3.up_proj"));
    config = GoodQuant(Algorithm("FP8", start + R"(["model.layers.1.self_attn*", "model.layers.1.mlp.gate"])"));
    CHECK_FALSE(plain("model.layers.10.mlp.experts.0.up_proj"));
    CHECK_FALSE(plain("model.layers.1.mlp.gate_proj"));
    CHECK(plain("model.layers.1.self_attn.q_proj"));
  }
}

TEST_CASE("ModelOpt's mixed precision goes by module, else by what contains it, else by glob, else it is plain") {
  const ModelConfig config = GoodQuant(R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
      "model.layers.0.mlp.experts.3.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
      "model.layers.0.mlp.experts": {"quant_algo": "FP8"},
      "model.layers.1.mlp.*": {"quant_algo": "W4A16_NVFP4"},
      "model.layers.2.mlp.experts": {"quant_algo": "W8A16"}}, "ignore": ["*.experts.5.*"]})");
  CHECK(Declared(config, kExpert).container == Container::kFp4);
  CHECK(Declared(config, "model.layers.0.mlp.experts.3.up_proj").container == Container::kFp8);
  CHECK(Declared(config, "model.layers.0.mlp.experts.5.up_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.1.mlp.experts.3.up_proj").linear.input.mode == ActivationMode::kNone);
  CHECK(Declared(config, "model.layers.3.mlp.experts.3.up_proj").container == Container::kPlain);
  CHECK(Contains(NotServed(config, "model.layers.2.mlp.experts.3.up_proj"),
                 "quantized_layers[\"model.layers.2.mlp.experts\"]"));
  CHECK(Contains(Refusal(QuantText(Algorithm("MIXED_PRECISION"))), "quantized_layers: wanted an object"));
  CHECK(Contains(Refusal(QuantText(Algorithm("MIXED_PRECISION", R"(, "quantized_layers": {"a": "FP8"})"))),
                 "quantized_layers[\"a\"]"));
}

TEST_CASE("ModelOpt files are known without quant_method, and in the nested form of the side file") {
  for (const char* quant : {R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4",
                                "exclude_modules": ["model.layers.1.*"], "kv_cache_quant_algo": "FP8"}})",
                            R"({"quant_algo": "NVFP4", "ignore": ["model.layers.1.*"], "producer": null})"}) {
    const ModelConfig config = GoodQuant(quant);
    CHECK(config.quant->Method() == "modelopt");
    CHECK(Declared(config, kExpert).container == Container::kFp4);
    CHECK(Declared(config, "model.layers.1.mlp.experts.0.up_proj").container == Container::kPlain);
  }
  const std::string bad = R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "SVD"}})";
  CHECK(Contains(NotServedOf(bad), "quantization_config.quantization.quant_algo: \"SVD\""));
  CHECK(Contains(Refusal(QuantText(R"({"producer": {"name": "modelopt"}, "quantization": 4})")),
                 "quantization: wanted an object"));
}

}  // namespace
}  // namespace moed
