// GPTQ: what quantization_config declares per module, and what is refused in it.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

TEST_CASE("GPTQ declares bits, group and container version for experts, and nothing for the router") {
  ModelConfig config = Good(WithQuant(Qwen3(), Gptq()));
  CHECK(config.quant->Method() == "gptq");
  DeclaredScheme declared = Declared(config, kExpert);
  CHECK(declared.container == Container::kGptq);
  CHECK(declared.linear.weights.element == ElementType::kInt4);
  CHECK(declared.linear.weights.group == GroupShape{1, 128});
  CHECK_FALSE(declared.linear.weights.zero_points);
  CHECK_FALSE(declared.gptq_v2);
  CHECK(Declared(config, "model.layers.0.mlp.gate").container == Container::kPlain);
  CHECK(Declared(config, "lm_head").container == Container::kPlain);
  json quant = Gptq();
  quant["checkpoint_format"] = "gptq_v2";
  quant["group_size"] = -1;
  declared = Declared(Good(WithQuant(Qwen3(), quant)), kExpert);
  CHECK(declared.gptq_v2);
  CHECK(declared.linear.weights.group == GroupShape{1, 0});
  quant.erase("checkpoint_format");  // missing means version 1
  CHECK_FALSE(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).gptq_v2);
}

TEST_CASE("GPTQ serves 4 and 8 bits, with and without zero points") {
  json quant = Gptq();
  quant["bits"] = 8;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.element == ElementType::kInt8);
  quant["sym"] = false;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.zero_points);
  quant.erase("sym");  // the default is symmetric
  CHECK_FALSE(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.zero_points);
}

TEST_CASE("GPTQ bits that are not served are refused by key and value, only when a module needs them") {
  for (const int bits : {2, 3, 5, 16}) {
    json quant = Gptq();
    quant["bits"] = bits;
    const std::string message = NotServed(Good(WithQuant(Qwen3(), quant)), kExpert);
    CHECK(message.find("bits: " + std::to_string(bits) + " is not supported (served: 4, 8)") != std::string::npos);
    CHECK(message.find(kExpert) != std::string::npos);
    quant["dynamic"] = {{"-:.*mlp\\.experts", json::object()}};
    CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).container == Container::kPlain);
  }
}

TEST_CASE("GPTQ act-order is declared where it leaves scattered groups") {
  json quant = Gptq();
  quant["desc_act"] = true;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.act_order);
  quant["dynamic"] = {{".*experts\\.3\\.", {{"desc_act", false}}}};
  CHECK_FALSE(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.act_order);
}

TEST_CASE("GPTQ act-order that leaves no trace in the file is served") {
  json quant = Gptq();
  quant["desc_act"] = true;
  quant["group_size"] = -1;
  CHECK_FALSE(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.act_order);
  quant["group_size"] = 32;
  quant["static_groups"] = true;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.group.cols == 32);
  quant.erase("static_groups");
  quant["meta"]["static_groups"] = true;
  CHECK_FALSE(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.act_order);
}

TEST_CASE("GPTQ values that change the whole container or have a wrong type are refused at once") {
  struct Row {
    const char* key;
    json value;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{{"checkpoint_format", "marlin", "got \"marlin\""},
                                         {"checkpoint_format", "gptq_p", "got \"gptq_p\""},
                                         {"format", "gptq_v2", "format: wanted the same as checkpoint_format"},
                                         {"is_marlin_format", true, "is_marlin_format"},
                                         {"pack_dtype", "int16", "pack_dtype"},
                                         {"bits", "4", "bits: wanted an integer in 1..32, got \"4\""},
                                         {"bits", nullptr, "bits: wanted"},
                                         {"group_size", 0, "group_size: wanted -1 or a positive integer"},
                                         {"group_size", -2, "group_size"},
                                         {"group_size", "128", "group_size"},
                                         {"sym", 1, "sym: wanted true or false"},
                                         {"dynamic", json::array(), "dynamic: wanted an object"},
                                         {"dynamic", {{"-:(", json::object()}}, "pattern \"(\""},
                                         {"dynamic", {{"a", 5}}, "dynamic[\"a\"]: wanted an object"},
                                         {"dynamic", {{"a", {{"bits", "4"}}}}, "dynamic[\"a\"].bits: wanted"},
                                         {"dynamic", {{"a", {{"format", "marlin"}}}}, "dynamic[\"a\"].format"},
                                         {"modules_in_block_to_quantize", "x", "a list of lists"},
                                         {"modules_in_block_to_quantize", {{1}}, "a list of lists"}}) {
    INFO(row.key << " " << row.value.dump());
    json quant = Gptq();
    quant[row.key] = row.value;
    const std::string message = Refusal(WithQuant(Qwen3(), quant).dump());
    INFO(message);
    CHECK(message.find("quantization_config.") != std::string::npos);
    CHECK(message.find(row.part) != std::string::npos);
  }
}

TEST_CASE("GPTQ dynamic rules override and exclude by pattern; the first in the file wins") {
  // As text: an object of the JSON library would be sorted, and the order of the file is what is tested.
  std::string text = WithQuant(Qwen3(), Gptq()).dump();
  const std::string dynamic = R"("dynamic": {"+:.*layers\\.1\\..*down_proj": {"group_size": 64},
      "-:.*layers\\.1\\.": {}, "+:.*layers\\.2\\.": {"bits": 3}, ".*layers\\.3\\.": {"group_size": 32},
      "+:.*down_proj": {"group_size": 256}}, "quant_method")";
  text.replace(text.find("\"quant_method\""), std::string("\"quant_method\"").size(), dynamic);
  const auto config = ParseModelConfig(text);
  REQUIRE(config.ok());
  const auto at = [](int layer, const std::string& projection) {
    return "model.layers." + std::to_string(layer) + ".mlp.experts.10." + projection;
  };
  CHECK(Declared(*config, at(0, "gate_proj")).linear.weights.group.cols == 128);
  CHECK(Declared(*config, at(0, "down_proj")).linear.weights.group.cols == 256);
  CHECK(Declared(*config, at(1, "down_proj")).linear.weights.group.cols == 64);
  CHECK(Declared(*config, at(1, "gate_proj")).container == Container::kPlain);
  CHECK(NotServed(*config, at(2, "gate_proj")).find("dynamic[\"+:.*layers\\.2\\.\"].bits: 3") != std::string::npos);
  CHECK(Declared(*config, at(3, "down_proj")).linear.weights.group.cols == 32);
  CHECK(Declared(*config, at(10, "gate_proj")).linear.weights.group.cols == 128);
}

TEST_CASE("GPTQ leaves modules outside modules_in_block_to_quantize plain") {
  json quant = Gptq();
  quant["modules_in_block_to_quantize"] = {{"mlp.experts.3.gate_proj"}, {"mlp.experts.3.down_proj"}};
  const ModelConfig config = Good(WithQuant(Qwen3(), quant));
  CHECK(Declared(config, kExpert).container == Container::kGptq);
  CHECK(Declared(config, "model.layers.9.mlp.experts.3.down_proj").container == Container::kGptq);
  CHECK(Declared(config, "model.layers.0.mlp.experts.3.up_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.mlp.experts.30.gate_proj").container == Container::kPlain);
}

}  // namespace
}  // namespace moed
