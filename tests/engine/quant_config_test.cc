// What all quantization methods have in common: the choice of the method, and module names.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

TEST_CASE("Quantization methods that are not served are refused by name with those that are") {
  for (const char* method : {"bitsandbytes", "gguf", "marlin", "exl2", "hqq", "vptq", "fbgemm_fp8", "GPTQ"}) {
    const std::string message = Refusal(WithQuant(Qwen3(), {{"quant_method", method}}).dump());
    INFO(message);
    CHECK(Contains(message, std::string("\"") + method +
                                "\" is not supported (served: gptq, awq, auto-round, compressed-tensors, fp8, "
                                "blockwise_int8, mxfp4, modelopt, quark)"));
  }
  CHECK(Contains(Refusal(WithQuant(Qwen3(), json::object()).dump()), "quant_method: nothing"));
  CHECK(Contains(Refusal(WithQuant(Qwen3(), {{"quant_method", 4}}).dump()), "quant_method: wanted a string, got 4"));
  CHECK(Contains(Refusal(WithQuant(Qwen3(), 5).dump()), "quantization_config: wanted an object, got 5"));
  CHECK(Good(WithQuant(Qwen3(), nullptr)).quant->Method() == "none");
}

TEST_CASE("Every method leaves routers, the shared-expert gate, embeddings and the head plain") {
  const std::vector<std::string> quants = {
      Gptq().dump(),
      Packed({}).dump(),
      R"({"quant_method": "awq", "bits": 4, "group_size": 64})",
      R"({"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq"})",
      R"({"quant_method": "fp8"})",
      R"({"quant_method": "blockwise_int8"})",
      R"({"quant_method": "mxfp4"})",
      R"({"quant_method": "modelopt", "quant_algo": "FP8"})",
      R"({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}}})"};
  for (const std::string& quant : quants) {
    INFO(quant);
    const ModelConfig config = GoodQuant(quant);
    CHECK(Declared(config, kExpert).container != Container::kPlain);
    for (const char* module : {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate",
                               "model.layers.0.mlp.router", "model.embed_tokens", "lm_head"}) {
      CHECK(Declared(config, module).container == Container::kPlain);
    }
  }
}

TEST_CASE("Module names over 512 characters are refused, whatever the method") {
  const std::string name = "model.layers.0." + std::string(500, 'a');
  const std::vector<json> quants = {nullptr,
                                    Gptq(),
                                    Packed({}),
                                    {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}},
                                    {{"quant_method", "fp8"}},
                                    {{"quant_method", "mxfp4"}},
                                    {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}},
                                    {{"quant_method", "quark"}, {"global_quant_config", json::object()}}};
  for (const json& quant : quants) {
    const ModelConfig config = Good(WithQuant(Qwen3(), quant));
    CHECK(NotServed(config, name).find("515 characters") != std::string::npos);
  }
}

}  // namespace
}  // namespace moed
