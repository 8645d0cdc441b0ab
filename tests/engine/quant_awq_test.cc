// AWQ: what quantization_config declares per module, and what is refused in it.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

std::string Awq(const std::string& more) { return R"({"quant_method": "awq", "bits": 4, "group_size": 64)" + more + "}"; }

TEST_CASE("AWQ declares the gemm container, with zero points unless the file says none") {
  CHECK(GoodQuant(Awq("")).quant->Method() == "awq");
  const DeclaredScheme declared = ExpertOf(Awq(R"(, "version": "gemm", "zero_point": true)"));
  CHECK(declared.container == Container::kAwq);
  CHECK(declared.linear.weights.element == ElementType::kInt4);
  CHECK(declared.linear.weights.group == GroupShape{1, 64});
  CHECK(declared.linear.weights.zero_points);
  CHECK(ExpertOf(Awq("")).linear == declared.linear);
  CHECK(ExpertOf(Awq(R"(, "version": "GEMM")")).linear == declared.linear);
  CHECK_FALSE(ExpertOf(Awq(R"(, "zero_point": false)")).linear.weights.zero_points);
  CHECK(ExpertOf(R"({"quant_method": "awq", "bits": 4, "group_size": -1})").linear.weights.group == GroupShape{1, 0});
  CHECK(ExpertOf(R"({"quant_method": "awq", "w_bit": 4, "q_group_size": 128})").linear.weights.group == GroupShape{1, 128});
}

TEST_CASE("AWQ layouts and bits that are not served are refused by name") {
  for (const char* layout : {"gemv", "gemv_fast", "marlin", "exllama"}) {
    for (const char* key : {"version", "checkpoint_format", "format"}) {
      const std::string more = std::string(", \"") + key + "\": \"" + layout + "\"";
      const std::string message = Refusal(QuantText(Awq(more)));
      INFO(message);
      CHECK(Contains(message, std::string(key) + ": wanted \"gemm\""));
      CHECK(Contains(message, std::string("got \"") + layout));
    }
  }
  CHECK(Contains(NotServedOf(R"({"quant_method": "awq", "bits": 8, "group_size": 64})"),
                 "bits: 8 is not supported (served: 4)"));
  CHECK(Contains(NotServedOf(Awq(R"(, "desc_act": true)")), "desc_act: true is not supported"));
  CHECK(Contains(Refusal(QuantText(R"({"quant_method": "awq", "group_size": 64})")), "bits: wanted"));
  CHECK(Contains(Refusal(QuantText(R"({"quant_method": "awq", "bits": 4})")), "group_size: wanted -1 or a positive"));
  CHECK(Contains(Refusal(QuantText(Awq(R"(, "modules_to_not_convert": "gate")"))), "modules_to_not_convert: wanted a list"));
  CHECK(Contains(Refusal(QuantText(Awq(R"(, "dynamic": [1])"))), "dynamic: wanted an object"));
}

TEST_CASE("AWQ exceptions hit whole components only: \"gate\" spares gate_proj, experts.1 spares experts.10") {
  const ModelConfig config = GoodQuant(Awq(R"(, "modules_to_not_convert":
      ["gate", "mlp.gate", "self_attn", "model.layers.2.mlp", ".shared_experts.", "model.layers.1.mlp.experts.1"])"));
  const auto plain = [&config](const std::string& module) {
    return Declared(config, module).container == Container::kPlain;
  };
  CHECK_FALSE(plain(kExpert));
  CHECK_FALSE(plain("model.layers.0.mlp.gate_proj"));
  CHECK(plain("model.layers.0.self_attn.q_proj"));
  CHECK(plain("model.layers.2.mlp.experts.0.up_proj"));
  CHECK_FALSE(plain("model.layers.20.mlp.experts.0.up_proj"));
  CHECK(plain("model.layers.0.mlp.shared_experts.up_proj"));
  CHECK_FALSE(plain("model.layers.0.mlp.shared_expert.up_proj"));
  CHECK(plain("model.layers.1.mlp.experts.1.up_proj"));
  CHECK(plain("language_model.model.layers.1.mlp.experts.1.up_proj"));
  CHECK_FALSE(plain("model.layers.1.mlp.experts.10.up_proj"));
  CHECK_FALSE(Declared(GoodQuant(Awq(R"(, "modules_to_not_convert": null)")), kExpert).container == Container::kPlain);
}

TEST_CASE("AWQ exceptions in mixtral's spelling are found") {
  const ModelConfig config = GoodQuant(Awq(R"(, "modules_to_not_convert": ["block_sparse_moe.experts.1"])"), Mixtral());
  CHECK(Declared(config, "model.layers.0.block_sparse_moe.experts.1.w1").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.mlp.experts.1.gate_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.block_sparse_moe.experts.11.w1").container == Container::kAwq);
}

TEST_CASE("GPTQModel's dynamic rules apply to AWQ files") {
  const ModelConfig config = GoodQuant(Awq(R"(, "dynamic": {"-:.*self_attn": {}, "+:.*down_proj": {"group_size": 32},
      "+:.*experts\\.5\\.": {"bits": 8}})"));
  CHECK(Declared(config, "model.layers.0.self_attn.q_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.mlp.experts.5.down_proj").linear.weights.group.cols == 32);
  CHECK(Declared(config, kExpert).linear.weights.group.cols == 64);
  CHECK(Contains(NotServed(config, "model.layers.0.mlp.experts.5.up_proj"), "bits: 8 is not supported (served: 4)"));
}

}  // namespace
}  // namespace moed
