// Fuzz target: "config.json", or "config.json NUL c side-file", where the letter c chooses the name of the side file that
// describes the quantization. What parses is asked for the modules that a load asks for, and for some that it never does.
#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/model_config.h"
#include "tests/fuzz/memory_folder.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr std::array kSideFiles = {"hf_quant_config.json", "quantize_config.json", "quant_config.json",
                                   "quantization_config.json"};

void CheckSizes(const ModelConfig& config) {
  Require(config.hidden >= 1 && config.intermediate >= 1, "H and I are positive");
  Require(config.top_k >= 1 && config.top_k <= config.num_experts && config.num_experts <= 65535, "1 <= k <= E <= 65535");
  Require(!config.moe_layers.empty() && config.moe_layers.front() >= 0, "there is a MoE layer");
  Require(config.moe_layers.back() < config.num_layers, "MoE layers are layers");
  for (size_t i = 1; i < config.moe_layers.size(); ++i) {
    Require(config.moe_layers[i - 1] < config.moe_layers[i], "MoE layers ascend");
  }
  Require(config.shared_intermediate >= 0, "the shared width is not negative");
  const RouterRule& router = config.router;
  Require(router.groups >= 1 && router.groups_kept >= 1 && router.groups_kept <= router.groups, "groups can be kept");
  Require(config.num_experts % router.groups == 0, "groups divide the experts");
}

void CheckScheme(const LinearScheme& linear) {
  for (const GroupShape& group : {linear.weights.group, linear.input.group}) {
    Require(group.rows >= 0 && group.cols >= 0, "groups are not negative");
  }
  Require(!linear.weights.zero_points || IsInteger(linear.weights.element), "only integers have zero points");
  Require(!Describe(linear.weights).empty(), "a scheme can be described");
}

void Ask(const QuantConfig& quant, const std::string& module) {
  const auto declared = quant.For(module);
  if (!declared.ok()) {
    Require(absl::IsInvalidArgument(declared.status()), "what is not served is an invalid argument");
    return;
  }
  CheckScheme(declared->linear);
}

void AskAll(const ModelConfig& config) {
  const QuantConfig& quant = *config.quant;
  Require(!quant.Method().empty(), "a method has a name");
  for (const int layer : {config.moe_layers.front(), config.moe_layers.back()}) {
    const std::string block = absl::StrCat(config.names.layers, layer, ".");
    Ask(quant, absl::StrCat(block, config.names.experts, "0", config.names.w123 ? ".w1" : ".gate_proj"));
    Ask(quant, absl::StrCat(block, config.names.experts, config.num_experts - 1, config.names.w123 ? ".w2" : ".down_proj"));
    Ask(quant, absl::StrCat(block, config.names.shared, "up_proj"));
    Ask(quant, absl::StrCat(block, config.names.router));
  }
  Ask(quant, "model.layers.0.block_sparse_moe.experts.1.w3");
  Ask(quant, "lm_head");
  Ask(quant, "..layers.layers.7");
  Ask(quant, "");
  Require(!quant.For(std::string(600, 'a')).ok(), "endless names are refused");
}

void Run(Bytes input) {
  Bytes side;
  const Bytes text = TakePiece(input, &side);
  MemoryFolder folder;
  folder.Add("config.json", text);
  if (!side.empty()) folder.Add(kSideFiles[side.front() % kSideFiles.size()], side.subspan(1));
  const auto config = ReadModelConfig(MemoryFolder::kPath);
  if (!config.ok()) {
    Require(absl::IsInvalidArgument(config.status()), "a bad config is an invalid argument");
    return;
  }
  CheckSizes(*config);
  AskAll(*config);
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
