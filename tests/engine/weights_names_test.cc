// Names of a layer's tensors in checkpoints of every family, with every prefix, and as other tools write them.
#include "engine/weights_names.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::CheckpointBuilder;
using testing::TempDir;

// A checkpoint that has these names and nothing else worth looking at.
struct Named {
  explicit Named(const std::vector<std::string>& names) {
    CheckpointBuilder builder;
    for (const std::string& name : names) builder.Add(name, StDtype::kU8, {1}, {0});
    REQUIRE(builder.Write(dir.path()).ok());
    absl::StatusOr<std::unique_ptr<Checkpoint>> opened = Checkpoint::Open(dir.path());
    INFO(opened.status().ToString());
    REQUIRE(opened.ok());
    checkpoint = *std::move(opened);
  }
  TempDir dir;
  std::unique_ptr<Checkpoint> checkpoint;
};

ModelConfig Parsed(const std::string& text) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  INFO(config.status().ToString());
  REQUIRE(config.ok());
  return *config;
}

// Keys that every family can be read from; `more` is added, with a leading comma.
ModelConfig Config(const std::string& type, const std::string& more = "") {
  return Parsed(R"({"model_type": ")" + type + R"(", "hidden_size": 8, "num_hidden_layers": 4, "intermediate_size": 4,
    "moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0)" +
                more + "}");
}

ModelConfig Dbrx() {
  return Parsed(R"({"model_type": "dbrx", "d_model": 8, "n_layers": 4,
    "ffn_config": {"ffn_hidden_size": 4, "moe_num_experts": 4, "moe_top_k": 2}})");
}

const char kSharedWidth[] = R"(, "shared_expert_intermediate_size": 4, "norm_topk_prob": true)";

TEST_CASE("A layer's prefix is the one under which the checkpoint has a norm or a router") {
  for (const std::string root :
       {"model.layers.", "model.language_model.layers.", "language_model.model.layers.", "transformer.blocks."}) {
    for (const std::string marker :
         {"post_attention_layernorm.weight", "mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight",
          "block_sparse_moe.router.layer.weight", "feed_forward.router.weight", "ffn.router.layer.weight"}) {
      const Named named({root + "3." + marker});
      CHECK(LayerPrefix(*named.checkpoint, 3) == root + "3.");
      CHECK(LayerPrefix(*named.checkpoint, 1) == "model.layers.1.");
    }
  }
}

TEST_CASE("Experts of their own are found by either projection naming, in any block and under any prefix") {
  for (const std::string prefix : {"model.layers.2.", "model.language_model.layers.2.", "language_model.model.layers.2."}) {
    for (const std::string block : {"mlp.", "block_sparse_moe.", "feed_forward."}) {
      for (const std::string gate : {"gate_proj", "w1"}) {
        for (const std::string suffix : {".weight", ".qweight", ".weight_packed"}) {
          const std::string experts = prefix + block + "experts.";
          // Only the third expert has a tensor: a damaged file still shows which naming it uses.
          const Named named({prefix + "post_attention_layernorm.weight", experts + "2." + gate + suffix});
          for (const ModelConfig& config : {Config("mixtral"), Config("qwen3_moe"), Config("llama4"), Config("gpt_oss")}) {
            const ExpertNaming naming = FindExpertNaming(config, *named.checkpoint, 2);
            CHECK_FALSE(naming.fused);
            const ExpertModules modules = naming.Expert(3);
            CHECK(modules.gate == experts + "3." + gate);
            CHECK(modules.up == experts + "3." + (gate == "w1" ? "w3" : "up_proj"));
            CHECK(modules.down == experts + "3." + (gate == "w1" ? "w2" : "down_proj"));
          }
        }
      }
    }
  }
}

TEST_CASE("The fused names of each family are found") {
  struct Case {
    ModelConfig config;
    std::string gate, up, down;
    FusedLayout layout;
  };
  const std::string vision = "model.language_model.layers.0.mlp.experts.";
  const std::vector<Case> cases = {
      {Config("qwen3_vl_moe"), vision + "gate_up_proj", vision + "gate_up_proj", vision + "down_proj",
       FusedLayout::kColumns},
      {Config("qwen3_5_moe", kSharedWidth), vision + "gate_up_proj", vision + "gate_up_proj", vision + "down_proj",
       FusedLayout::kRows},
      {Config("llama4"), "language_model.model.layers.0.feed_forward.experts.gate_up_proj",
       "language_model.model.layers.0.feed_forward.experts.gate_up_proj",
       "language_model.model.layers.0.feed_forward.experts.down_proj", FusedLayout::kColumns},
      {Config("gpt_oss"), "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj",
       "model.layers.0.mlp.experts.down_proj", FusedLayout::kInterleavedColumns},
      {Config("granitemoe"), "model.layers.0.block_sparse_moe.input_linear.weight",
       "model.layers.0.block_sparse_moe.input_linear.weight", "model.layers.0.block_sparse_moe.output_linear.weight",
       FusedLayout::kLinear},
      {Dbrx(), "transformer.blocks.0.ffn.experts.mlp.w1", "transformer.blocks.0.ffn.experts.mlp.v1",
       "transformer.blocks.0.ffn.experts.mlp.w2", FusedLayout::kStacked}};
  for (const Case& c : cases) {
    // Named as missing, found whole, and found by one tensor alone.
    for (const Named& named : {Named({"x"}), Named({c.gate, c.down}), Named({c.down})}) {
      const ExpertNaming naming = FindExpertNaming(c.config, *named.checkpoint, 0);
      INFO(c.config.model_type);
      CHECK(naming.fused);
      CHECK(naming.layout == c.layout);
      const FusedNames names = FusedNamesOf(naming);
      CHECK(names.gate == c.gate);
      CHECK(names.up == c.up);
      CHECK(names.down == c.down);
      CHECK(names.gate_up_bias.empty() == (c.config.family != Family::kGptOss));
      CHECK(names.down_bias.empty() == names.gate_up_bias.empty());
    }
  }
}

TEST_CASE("Families that are written one by one are also found as the fused tensors of transformers") {
  for (const std::string type : {"mixtral", "qwen3_moe", "olmoe"}) {
    const Named named({"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"});
    const ExpertNaming naming = FindExpertNaming(Config(type), *named.checkpoint, 0);
    CHECK(naming.fused);
    CHECK(naming.layout == FusedLayout::kRows);
    CHECK(FusedNamesOf(naming).down == "model.layers.0.mlp.experts.down_proj");
  }
}

TEST_CASE("Without any expert tensor the family's own names are what is missing") {
  const Named named({"x"});
  CHECK(FindExpertNaming(Config("mixtral"), *named.checkpoint, 1).Expert(0).up ==
        "model.layers.1.block_sparse_moe.experts.0.w3");
  CHECK(FindExpertNaming(Config("phimoe"), *named.checkpoint, 1).Expert(0).gate ==
        "model.layers.1.block_sparse_moe.experts.0.w1");
  CHECK(FindExpertNaming(Config("qwen3_moe"), *named.checkpoint, 1).Expert(0).down ==
        "model.layers.1.mlp.experts.0.down_proj");
  CHECK(FindGateNames(Config("mixtral"), *named.checkpoint, 1).weight == "model.layers.1.block_sparse_moe.gate.weight");
  CHECK(FindGateNames(Dbrx(), *named.checkpoint, 1).weight == "transformer.blocks.1.ffn.router.layer.weight");
  CHECK(SharedExpertModules(Config("qwen2_moe", kSharedWidth), *named.checkpoint, 1).gate ==
        "model.layers.1.mlp.shared_expert.gate_proj");
}

TEST_CASE("The gate's tensors are named as each family has them") {
  const std::string deepseek = R"(, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0)";
  struct Case {
    ModelConfig config;
    std::string weight, bias, correction, shared_gate;
  };
  const std::string l = "model.layers.1.";
  const std::vector<Case> cases = {
      {Config("qwen3_moe"), l + "mlp.gate.weight", "", "", ""},
      {Config("qwen2_moe", kSharedWidth), l + "mlp.gate.weight", "", "", l + "mlp.shared_expert_gate.weight"},
      {Config("deepseek_v3", deepseek), l + "mlp.gate.weight", "", l + "mlp.gate.e_score_correction_bias", ""},
      {Config("kimi_linear", R"(, "num_experts_per_token": 2)"), l + "block_sparse_moe.gate.weight", "",
       l + "block_sparse_moe.gate.e_score_correction_bias", ""},
      {Config("minimax_m2", R"(, "use_routing_bias": true)"), l + "block_sparse_moe.gate.weight", "",
       l + "block_sparse_moe.e_score_correction_bias", ""},
      {Config("gpt_oss"), l + "mlp.router.weight", l + "mlp.router.bias", "", ""},
      {Config("granitemoe"), l + "block_sparse_moe.router.layer.weight", "", "", ""},
      {Config("llama4"), "language_model.model.layers.1.feed_forward.router.weight", "", "", ""},
      {Dbrx(), "transformer.blocks.1.ffn.router.layer.weight", "", "", ""}};
  for (const Case& c : cases) {
    const Named named({c.weight});
    const GateNames names = FindGateNames(c.config, *named.checkpoint, 1);
    INFO(c.config.model_type);
    CHECK(names.weight == c.weight);
    CHECK(names.bias == c.bias);
    CHECK(names.correction_bias == c.correction);
    CHECK(names.shared_gate == c.shared_gate);
  }
}

TEST_CASE("A router that a tool renamed is found, with the correction bias beside it") {
  const Named mixtral({"model.layers.0.mlp.gate.weight"});
  CHECK(FindGateNames(Config("mixtral"), *mixtral.checkpoint, 0).weight == "model.layers.0.mlp.gate.weight");
  const ModelConfig kimi = Config("kimi_linear", R"(, "num_experts_per_token": 2)");
  const Named renamed({"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias"});
  CHECK(FindGateNames(kimi, *renamed.checkpoint, 0).correction_bias == "model.layers.0.mlp.gate.e_score_correction_bias");
}

TEST_CASE("The shared expert is found under each of its names") {
  const ModelConfig config = Config("qwen2_moe", kSharedWidth);
  for (const std::string prefix : {"model.layers.0.", "language_model.model.layers.0."}) {
    for (const std::string root :
         {"mlp.shared_experts.", "mlp.shared_expert.", "block_sparse_moe.shared_experts.", "feed_forward.shared_expert."}) {
      const Named named({prefix + "post_attention_layernorm.weight", prefix + root + "up_proj.weight"});
      CHECK(SharedExpertModules(config, *named.checkpoint, 0).down == prefix + root + "down_proj");
    }
  }
}

}  // namespace
}  // namespace moed
