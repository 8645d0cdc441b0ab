// compressed-tensors: which group applies to a module, and what is refused in a group.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

TEST_CASE("compressed-tensors declares group and channel int4 for what its targets hit") {
  ModelConfig config = Good(WithQuant(Qwen3(), Packed({"lm_head"})));
  CHECK(config.quant->Method() == "compressed-tensors");
  const DeclaredScheme declared = Declared(config, kExpert);
  CHECK(declared.container == Container::kPacked);
  CHECK(declared.linear.weights.element == ElementType::kInt4);
  CHECK(declared.linear.weights.group == GroupShape{1, 64});
  json quant = Packed({});
  quant["config_groups"]["group_0"]["weights"] = PackedWeights(4, 0);
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.group == GroupShape{1, 0});
  quant["config_groups"]["group_0"]["weights"].erase("strategy");
  quant["config_groups"]["group_0"]["weights"]["group_size"] = -1;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.group == GroupShape{1, 0});
  quant["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).linear.weights.group == GroupShape{1, 32});
}

TEST_CASE("B33: an ignore pattern frees its layer, an exact container name frees nothing, the router is always plain") {
  const json ignore = {"re:.*layers\\.1\\.", "model.layers.0.mlp.experts.1"};
  const ModelConfig config = Good(WithQuant(Qwen3(), Packed(ignore)));
  for (const char* expert : {"0", "1", "2", "10", "11"}) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string tail = std::string(".mlp.experts.") + expert + "." + projection;
      INFO(tail);
      CHECK(Declared(config, "model.layers.0" + tail).container == Container::kPacked);
      CHECK(Declared(config, "model.layers.1" + tail).container == Container::kPlain);
      CHECK(Declared(config, "model.layers.2" + tail).container == Container::kPacked);
      CHECK(Declared(config, "model.layers.11" + tail).container == Container::kPacked);
    }
  }
  for (const char* layer : {"0", "1", "2"}) {
    CHECK(Declared(config, std::string("model.layers.") + layer + ".mlp.gate").container == Container::kPlain);
  }
}

TEST_CASE("Ignore patterns are anchored at the start only, and the dense-layer pattern spares the experts") {
  const json ignore = {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                       "re:layers"};
  const ModelConfig config = Good(WithQuant(Deepseek(), Packed(ignore)));
  CHECK(Declared(config, "model.layers.1.mlp.shared_experts.up_proj").container == Container::kPlain);
  CHECK(Declared(config, "model.layers.0.mlp.gate_proj").container == Container::kPlain);
  // "re:layers" hits the spelling without prefix, of every module: names of another version of the library.
  CHECK(Declared(config, "model.layers.1.mlp.experts.0.gate_proj").container == Container::kPlain);
  json without = ignore;
  without.erase(4);
  CHECK(Declared(Good(WithQuant(Deepseek(), Packed(without))), "model.layers.1.mlp.experts.0.gate_proj").container ==
        Container::kPacked);
}

TEST_CASE("Names of another spelling are found: prefixes for all families, block and projections for mixtral") {
  for (const char* entry : {"model.layers.0.block_sparse_moe.experts.1.w1", "layers.0.mlp.experts.1.gate_proj",
                            "model.language_model.layers.0.block_sparse_moe.experts.1.gate_proj",
                            "re:.*block_sparse_moe\\.experts\\.1\\.w1", "re:.*mlp\\.experts\\.1\\.gate_proj",
                            "re:model\\.layers\\.0\\.mlp\\.experts\\.1\\.gate"}) {
    INFO(entry);
    const ModelConfig config = Good(WithQuant(Mixtral(), Packed({entry})));
    for (const char* module : {"model.layers.0.mlp.experts.1.gate_proj", "model.layers.0.block_sparse_moe.experts.1.w1",
                               "model.layers.0.block_sparse_moe.experts.1.gate_proj",
                               "language_model.model.layers.0.block_sparse_moe.experts.1.w1"}) {
      INFO(module);
      CHECK(Declared(config, module).container == Container::kPlain);
    }
    CHECK(Declared(config, "model.layers.0.block_sparse_moe.experts.1.w2").container == Container::kPacked);
    CHECK(Declared(config, "model.layers.0.block_sparse_moe.experts.11.w1").container == Container::kPacked);
  }
}

TEST_CASE("Among groups an exact target beats a pattern, a pattern the class, and equals go by the file's order") {
  std::string text = WithQuant(Qwen3(), Packed({})).dump();
  const std::string groups = R"("config_groups": {
    "z": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}},
    "group_10": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "group_size": 32}},
    "group_2": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "group_size": 64}},
    "a": {"targets": ["model.layers.0.mlp.experts.3.gate_proj"], "weights": {"num_bits": 4, "group_size": 128}},
    "plain": {"targets": ["re:.*shared.*"], "weights": null}}, "old_groups")";
  text.replace(text.find("\"config_groups\""), std::string("\"config_groups\"").size(), groups);
  const auto config = ParseModelConfig(text);
  REQUIRE(config.ok());
  CHECK(Declared(*config, "model.layers.0.mlp.up_proj").linear.weights.group.cols == 16);
  CHECK(Declared(*config, "model.layers.0.mlp.experts.4.gate_proj").linear.weights.group.cols == 32);
  CHECK(Declared(*config, kExpert).linear.weights.group.cols == 128);
  CHECK(Declared(*config, "model.layers.0.mlp.shared_expert.up_proj").container == Container::kPlain);
}

TEST_CASE("A compressed-tensors group that is not served is refused by group, key and value when it is needed") {
  struct Row {
    const char* key;    // in weights, or in the group when it starts with "/"
    json value;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{
           {"num_bits", 3, "weights.num_bits: 3 is not supported (served: 4, 8)"},
           {"type", "float", "weights.type: \"float\" is not supported"},
           {"strategy", "attn_head", "weights.strategy: \"attn_head\" is not supported"},
           {"strategy", "token", "weights.strategy: \"token\" is not supported"},
           {"dynamic", true, "weights.dynamic: true is not supported"},
           {"/format", "marlin-24", "format: \"marlin-24\" is not supported"},
           {"/format", "sparse-24-bitmask", "format: \"sparse-24-bitmask\" is not supported"},
           {"/format", "dense", "format: \"dense\" is not supported"},
           {"/output_activations", {{"num_bits", 8}}, "output_activations: an object of 1 keys is not supported"}}) {
    INFO(row.key << " " << row.value.dump());
    json quant = Packed({}, {"re:.*layers\\.2\\."});
    json& group = quant["config_groups"]["group_0"];
    (row.key[0] == '/' ? group[row.key + 1] : group["weights"][row.key]) = row.value;
    const ModelConfig config = Good(WithQuant(Qwen3(), quant));
    const std::string message = NotServed(config, "model.layers.2.mlp.experts.0.up_proj");
    INFO(message);
    CHECK(message.find(std::string("config_groups.group_0.") + row.part) != std::string::npos);
    CHECK(Declared(config, kExpert).container == Container::kPlain);  // hit by no target
  }
  json quant = Packed({});
  quant["config_groups"]["group_0"]["weights"]["actorder"] = "weight";  // leaves no trace in the file
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).container == Container::kPacked);
}

TEST_CASE("A group's own format overrides the global one") {
  json quant = Packed({});
  quant["format"] = "mixed-precision";
  CHECK(NotServed(Good(WithQuant(Qwen3(), quant)), kExpert).find("mixed-precision") != std::string::npos);
  quant["config_groups"]["group_0"]["format"] = "pack-quantized";
  CHECK(Declared(Good(WithQuant(Qwen3(), quant)), kExpert).container == Container::kPacked);
}

TEST_CASE("compressed-tensors keys of a wrong type, and keys that change all weights, are refused at once") {
  struct Row {
    const char* path;
    json value;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{
           {"/transform_config", {{"R1", 1}}, "transform_config: wanted null or {}"},
           {"/sparsity_config", {{"format", "sparse-24-bitmask"}}, "sparsity_config"},
           {"/ignore", "lm_head", "ignore: wanted a list of strings"},
           {"/ignore", {"re:("}, "ignore: pattern \"(\""},
           {"/ignore", {"re:" + std::string(1001, 'a')}, "1001 characters"},
           {"/config_groups", nullptr, "config_groups: wanted an object of groups"},
           {"/config_groups/group_0", "W4A16", "config_groups.group_0: wanted an object"},
           {"/config_groups/group_0/targets", nullptr, "targets: wanted a list"},
           {"/config_groups/group_0/targets", {"re:["}, "pattern \"[\""},
           {"/config_groups/group_0/weights", 4, "weights: wanted an object or null"},
           {"/config_groups/group_0/weights/num_bits", "4", "weights.num_bits: wanted an integer"},
           {"/config_groups/group_0/weights/group_size", nullptr, "a positive integer for the strategy group"},
           {"/config_groups/group_0/weights/strategy", "channel", "null or -1 for the strategy channel"},
           {"/config_groups/group_0/weights/symmetric", "yes", "weights.symmetric: wanted true or false"},
           {"/config_groups/group_0/weights/actorder", 3, "weights.actorder"}}) {
    INFO(row.path << " " << row.value.dump());
    json quant = Packed({});
    quant[json::json_pointer(row.path)] = row.value;
    const std::string message = Refusal(WithQuant(Qwen3(), quant).dump());
    INFO(message);
    CHECK(message.find(row.part) != std::string::npos);
  }
}

}  // namespace
}  // namespace moed
