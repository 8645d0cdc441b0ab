// AutoRound: the container by packing_format, and exceptions by name and pattern.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

std::string AutoRound(const std::string& packing, const std::string& more = "") {
  return R"({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": ")" + packing + "\"" + more + "}";
}

TEST_CASE("AutoRound's packing_format decides the container and how zero points are stored") {
  const DeclaredScheme v1 = ExpertOf(AutoRound("auto_round:auto_gptq", R"(, "sym": true)"));
  CHECK(v1.container == Container::kGptq);
  CHECK_FALSE(v1.gptq_v2);
  CHECK_FALSE(v1.linear.weights.zero_points);
  CHECK(v1.linear.weights.group == GroupShape{1, 32});
  for (const char* packing : {"auto_round", "auto_round:gptqmodel"}) {
    const DeclaredScheme v2 = ExpertOf(AutoRound(packing, R"(, "sym": false)"));
    CHECK(v2.container == Container::kGptq);
    CHECK(v2.gptq_v2);
    CHECK(v2.linear.weights.zero_points);
  }
  const DeclaredScheme awq = ExpertOf(AutoRound("auto_round:auto_awq"));
  CHECK(awq.container == Container::kAwq);
  CHECK(awq.linear.weights.zero_points);
  const std::string eight = R"({"quant_method": "auto-round", "bits": 8, "group_size": -1, "packing_format": "auto_round"})";
  CHECK(ExpertOf(eight).linear.weights.element == ElementType::kInt8);
  CHECK(ExpertOf(eight).linear.weights.group == GroupShape{1, 0});
}

TEST_CASE("AutoRound values that are not served are refused by key and value") {
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round:llm_compressor"))),
                 "packing_format: wanted \"auto_round:auto_gptq\""));
  CHECK(Contains(Refusal(QuantText(R"({"quant_method": "auto-round", "bits": 4, "group_size": 32})")),
                 "packing_format: wanted"));
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round", R"(, "data_type": "mx_fp")"))), "data_type: wanted \"int\""));
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round", R"(, "act_bits": 8)"))), "act_bits: wanted 16"));
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round", R"(, "extra_config": [])"))), "extra_config: wanted an object"));
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round", R"(, "extra_config": {"a(": {"bits": 16}})"))),
                 "extra_config[\"a(\"]"));
  CHECK(Contains(Refusal(QuantText(AutoRound("auto_round", R"(, "extra_config": {"a": 16})"))),
                 "extra_config[\"a\"]: wanted"));
  CHECK(
      Contains(NotServedOf(R"({"quant_method": "auto-round", "bits": 2, "group_size": 32, "packing_format": "auto_round"})"),
               "bits: 2 is not supported (served: 4, 8)"));
}

TEST_CASE("AutoRound's exceptions go by exact name first, then by the first pattern found anywhere in the name") {
  const ModelConfig config = GoodQuant(AutoRound("auto_round:auto_gptq", R"(, "extra_config": {
      "experts\\.3\\.": {"bits": 8}, ".*experts\\.[34]\\.": {"bits": 16, "data_type": "float"},
      "model.layers.1.mlp.experts.3.up_proj": {"bits": 4, "group_size": 128},
      "model.layers.0.self_attn.q_proj": {"bits": 16}})"));
  CHECK(Declared(config, kExpert).linear.weights.element == ElementType::kInt8);
  CHECK(Declared(config, "model.layers.0.mlp.experts.4.up_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.1.mlp.experts.3.up_proj").linear.weights.group == GroupShape{1, 128});
  CHECK(Declared(config, "model.layers.0.self_attn.q_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.self_attn.k_proj").container == Container::kGptq);
}

TEST_CASE("AutoRound leaves blocks that it does not list plain") {
  const char* const first = "model.layers.1.mlp.experts.3.up_proj";
  const char* const tenth = "model.layers.10.mlp.experts.3.up_proj";
  for (const char* blocks : {R"("model.layers.0,model.layers.1")", R"(["model.layers.0", "model.layers.1"])"}) {
    const ModelConfig config = GoodQuant(AutoRound("auto_round", std::string(R"(, "block_name_to_quantize": )") + blocks));
    CHECK(Declared(config, first).container == Container::kGptq);
    CHECK(Declared(config, tenth).container == Container::kPlain);
  }
  const ModelConfig all = GoodQuant(AutoRound("auto_round", R"(, "block_name_to_quantize": "model.language_model.layers")"));
  CHECK(Declared(all, tenth).container == Container::kGptq);
}

}  // namespace
}  // namespace moed
