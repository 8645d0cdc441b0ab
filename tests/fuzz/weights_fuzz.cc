// Fuzz target: a whole checkpoint, "config.json NUL bytes of model.safetensors": everything between the files and a
// backend, which is to say that each expert and gate that the plan promises is read.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/model_config.h"
#include "engine/weights.h"
#include "tests/fuzz/memory_folder.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr int kLayers = 2;   // of one input, at most
constexpr int kExperts = 4;  // of one layer, at most

// The canonical form that backends rely on without looking.
void CheckLinear(const LinearWeights& linear, int64_t rows, int64_t cols) {
  Require(linear.rows == rows && linear.cols == cols, "a projection has the layer's sizes");
  Require(linear.codes.size() == static_cast<size_t>(rows * linear.row_bytes()), "codes have their size");
  const WeightScheme& scheme = linear.scheme;
  const int64_t groups = GroupCount(rows, scheme.group.rows) * GroupCount(cols, scheme.group.cols);
  if (!IsUnquantized(scheme.element)) {
    Require(linear.scales.size() == static_cast<size_t>(groups * ScaleBytes(scheme.scale)), "scales have their size");
  }
  Require(linear.zero_points.size() == static_cast<size_t>(scheme.zero_points ? groups : 0), "zero points have their size");
  Require(linear.group_index.size() == static_cast<size_t>(scheme.act_order ? cols : 0), "group indices have their size");
  for (const int32_t group : linear.group_index) {
    Require(group >= 0 && group < GroupCount(cols, scheme.group.cols), "a group index names a group");
  }
  Require(linear.bias.empty() || linear.bias.size() == static_cast<size_t>(rows), "a bias has its size");
  std::vector<float> row(static_cast<size_t>(cols));
  DequantizeRow(linear, rows - 1, row.data());
}

void ReadExperts(const ExpertReader& reader, const MoeDesc& desc) {
  ExpertWeights expert;
  for (int e = 0; e < std::min(desc.num_experts, kExperts); ++e) {
    if (!reader.Read(e, &expert).ok()) continue;
    CheckLinear(expert.gate, desc.intermediate, desc.hidden);
    CheckLinear(expert.up, desc.intermediate, desc.hidden);
    CheckLinear(expert.down, desc.hidden, desc.intermediate);
  }
}

void Read(const ModelConfig& config, const Checkpoint& checkpoint, const LayerPlan& plan) {
  ReadExperts(*plan.experts, plan.routed);
  if (plan.has_shared) ReadExperts(*plan.shared_expert, plan.shared);
  const auto gate = ReadGate(config, checkpoint, plan.layer);
  if (!gate.ok()) return;
  Require(gate->weight.size() == static_cast<size_t>(config.num_experts * config.hidden), "a gate is [E, H]");
  for (const float weight : gate->weight) Require(!std::isnan(weight), "a gate has no NaN");
}

void Run(Bytes input) {
  Bytes tensors;
  const Bytes text = TakePiece(input, &tensors);
  const auto config = ParseModelConfig(TextOf(text));
  if (!config.ok()) return;
  MemoryFolder folder;
  folder.Add("model.safetensors", tensors);
  const auto checkpoint = Checkpoint::Open(MemoryFolder::kPath);
  if (!checkpoint.ok()) return;
  std::vector<LayerPlan> plans;
  for (size_t i = 0; i < config->moe_layers.size() && i < kLayers; ++i) {
    auto plan = PlanLayer(*config, **checkpoint, config->moe_layers[i]);
    if (!plan.ok()) return;
    Read(*config, **checkpoint, *plan);
    plans.push_back(*std::move(plan));
  }
  (void)CheckNoUnknownExperts(*config, **checkpoint, plans);
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
