// Names of modules: one canonical spelling for all that mean the same.
#include "engine/module_names.h"

#include <catch2/catch.hpp>

#include <string>
#include <vector>

namespace moed {
namespace {

TEST_CASE("Every spelling of a module has the same canonical name") {
  for (const char* name :
       {"model.layers.0.mlp.experts.3.gate_proj", "language_model.model.layers.0.mlp.experts.3.gate_proj",
        "layers.0.mlp.experts.3.gate_proj", "model.layers.0.block_sparse_moe.experts.3.w1", "model.layers.0.mlp.experts.3.w1"}) {
    CHECK(CanonicalModule(name) == "layers.0.mlp.experts.3.gate_proj");
  }
  for (const char* name : {"lm_head", "model.lm_head"}) CHECK(CanonicalModule(name) == "lm_head");
}

TEST_CASE("A canonical name is its own canonical name, whatever it was made of") {
  const std::vector<std::string> names = {"",
                                          ".",
                                          "model",
                                          "model.",
                                          "model.model",
                                          "model.model.norm",
                                          "model.model.model.layer.0.mlp",
                                          "model.laye:rs.0.mlp.experts.b3.",
                                          "model.language_model.model.layers.1.mlp",
                                          "layers",
                                          "layers.",
                                          "layers.layers.0",
                                          "block_sparse_moe.experts.0.w1.w1",
                                          "model.block_sparse_moe.block_sparse_moe.gate"};
  for (const std::string& name : names) {
    INFO(name);
    const std::string canonical = CanonicalModule(name);
    CHECK(CanonicalModule(canonical) == canonical);
  }
}

TEST_CASE("Containers of a name are its beginnings, itself first") {
  CHECK(WithContainers("layers.0.mlp") == std::vector<std::string>{"layers.0.mlp", "layers.0", "layers"});
  CHECK(WithContainers("norm") == std::vector<std::string>{"norm"});
}

}  // namespace
}  // namespace moed
