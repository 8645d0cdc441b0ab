// Experts whose quantization a declaration gives: MXFP4 as gpt-oss stores it, and activations with static scales.
#include <catch2/catch.hpp>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/explain.h"
#include "engine/weights.h"
#include "tests/engine/opened_checkpoint.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

// A declaration for all experts, whatever the config file says; everything else is unquantized.
class ExpertsDeclared : public QuantConfig {
 public:
  explicit ExpertsDeclared(const DeclaredScheme& declared) : declared_(declared) {}
  std::string Method() const override { return "test"; }
  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    return module.find("experts") == std::string::npos ? DeclaredScheme{} : declared_;
  }

 private:
  const DeclaredScheme declared_;
};

DeclaredScheme DeclaredMxfp4(DeclaredScheme::Container container) {
  DeclaredScheme declared;
  declared.container = container;
  declared.linear.weights = {ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}};
  return declared;
}

// gpt-oss, E = 2, H = 64, I = 32, without experts.
void AddGptOssFrame(CheckpointBuilder* builder) {
  ModelSpec spec{.family = ModelFamily::kGptOss, .hidden = 64, .intermediate = 32, .num_experts = 2, .top_k = 1};
  AddModel(spec, builder);
  for (const char* name : {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}) {
    REQUIRE(builder->Remove(std::string("model.layers.0.mlp.experts.") + name) == 1);
  }
}

// A byte stream without a pattern.
std::vector<uint8_t> Bytes(uint32_t stream, size_t count, int low, int high) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < count; ++i) bytes.push_back(static_cast<uint8_t>(low + (R(stream, i) + 0.5) * (high - low)));
  return bytes;
}

std::vector<uint8_t> Part(const std::vector<uint8_t>& bytes, size_t parts, size_t part) {
  const size_t size = bytes.size() / parts;
  return {bytes.begin() + part * size, bytes.begin() + (part + 1) * size};
}

}  // namespace

TEST_CASE("gpt-oss MXFP4, fused or one by one: gate and up are the even and odd rows, biases too") {
  const std::vector<uint8_t> blocks = Bytes(1, 2 * 64 * 32, 0, 256), scales = Bytes(2, 2 * 64 * 2, 120, 130);
  const std::vector<uint8_t> down_blocks = Bytes(3, 2 * 64 * 16, 0, 256), down_scales = Bytes(4, 2 * 64 * 1, 120, 130);
  std::vector<float> bias(2 * 64), down_bias(2 * 64);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i), down_bias[i] = -static_cast<float>(i);
  for (bool fused : {true, false}) {
    TempDir dir;
    CheckpointBuilder builder;
    AddGptOssFrame(&builder);
    const std::string root = "model.layers.0.mlp.experts.";
    if (fused) {
      builder.Add(root + "gate_up_proj_blocks", StDtype::kU8, {2, 64, 2, 16}, blocks);
      builder.Add(root + "gate_up_proj_scales", StDtype::kU8, {2, 64, 2}, scales);
      builder.AddFloats(root + "gate_up_proj_bias", StDtype::kBf16, {2, 64}, bias);
      builder.Add(root + "down_proj_blocks", StDtype::kU8, {2, 64, 1, 16}, down_blocks);
      builder.Add(root + "down_proj_scales", StDtype::kU8, {2, 64, 1}, down_scales);
      builder.AddFloats(root + "down_proj_bias", StDtype::kBf16, {2, 64}, down_bias);
    }
    for (size_t e = 0; !fused && e < 2; ++e) {
      const std::string expert = root + std::to_string(e) + ".";
      builder.Add(expert + "gate_up_proj.weight", StDtype::kU8, {64, 32}, Part(blocks, 2, e));
      builder.Add(expert + "gate_up_proj.weight_scale", StDtype::kU8, {64, 2}, Part(scales, 2, e));
      builder.AddFloats(expert + "gate_up_proj.bias", StDtype::kBf16, {64}, std::span(bias).subspan(64 * e, 64));
      builder.Add(expert + "down_proj.weight", StDtype::kU8, {64, 16}, Part(down_blocks, 2, e));
      builder.Add(expert + "down_proj.weight_scale", StDtype::kU8, {64, 1}, Part(down_scales, 2, e));
      builder.AddFloats(expert + "down_proj.bias", StDtype::kBf16, {64}, std::span(down_bias).subspan(64 * e, 64));
    }
    REQUIRE(builder.Write(dir.path()).ok());
    absl::StatusOr<Opened> opened = Open(dir.path());
    REQUIRE(opened.ok());
    using Container = DeclaredScheme::Container;
    opened->config.quant =
        std::make_shared<ExpertsDeclared>(DeclaredMxfp4(fused ? Container::kMxfp4Fused : Container::kFp4));
    const absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(opened->config, *opened->checkpoint);
    INFO(plans.status().ToString());
    REQUIRE(plans.ok());
    ExpertWeights got;
    REQUIRE(plans->front().experts->Read(1, &got).ok());
    CHECK(got.gate.scheme == plans->front().routed.scheme.gate.weights);
    for (size_t i = 0; i < 32; ++i) {
      const size_t gate_row = 64 + 2 * i;  // of all rows of both experts
      CHECK(std::memcmp(got.gate.codes.data() + 32 * i, blocks.data() + 32 * gate_row, 32) == 0);
      CHECK(std::memcmp(got.up.codes.data() + 32 * i, blocks.data() + 32 * (gate_row + 1), 32) == 0);
      CHECK(std::memcmp(got.gate.scales.data() + 2 * i, scales.data() + 2 * gate_row, 2) == 0);
      CHECK(std::memcmp(got.up.scales.data() + 2 * i, scales.data() + 2 * (gate_row + 1), 2) == 0);
      CHECK((got.gate.bias[i] == 64 + 2 * i && got.up.bias[i] == 65 + 2 * i));
    }
    CHECK(got.down.codes == Part(down_blocks, 2, 1));
    CHECK(got.down.scales == Part(down_scales, 2, 1));
    CHECK((got.down.bias.size() == 64 && got.down.bias[3] == -67));
  }
}

TEST_CASE("A NaN exponent in a fused MXFP4 tensor is refused with tensor, expert and index; blocks undeclared are refused") {
  TempDir dir;
  CheckpointBuilder builder;
  AddGptOssFrame(&builder);
  const std::string root = "model.layers.0.mlp.experts.";
  const std::vector<float> bias(2 * 64, 0.0f);
  std::vector<uint8_t> scales(2 * 64 * 2, 127);
  scales[64 * 2 + 9] = 0xFF;
  builder.Add(root + "gate_up_proj_blocks", StDtype::kU8, {2, 64, 2, 16}, std::vector<uint8_t>(2 * 64 * 32));
  builder.Add(root + "gate_up_proj_scales", StDtype::kU8, {2, 64, 2}, scales);
  builder.AddFloats(root + "gate_up_proj_bias", StDtype::kBf16, {2, 64}, bias);
  builder.Add(root + "down_proj_blocks", StDtype::kU8, {2, 64, 1, 16}, std::vector<uint8_t>(2 * 64 * 16));
  builder.Add(root + "down_proj_scales", StDtype::kU8, {2, 64, 1}, std::vector<uint8_t>(2 * 64));
  builder.AddFloats(root + "down_proj_bias", StDtype::kBf16, {2, 64}, bias);
  REQUIRE(builder.Write(dir.path()).ok());
  absl::StatusOr<Opened> opened = Open(dir.path());
  REQUIRE(opened.ok());
  const absl::Status undeclared = PlanLayer(opened->config, *opened->checkpoint, 0).status();
  CHECK(undeclared.ToString().find("unquantized") != std::string::npos);
  opened->config.quant = std::make_shared<ExpertsDeclared>(DeclaredMxfp4(DeclaredScheme::Container::kMxfp4Fused));
  const absl::StatusOr<LayerPlan> plan = PlanLayer(opened->config, *opened->checkpoint, 0);
  REQUIRE(plan.ok());
  ExpertWeights weights;
  CHECK(plan->experts->Read(0, &weights).ok());
  const std::string text = plan->experts->Read(1, &weights).ToString();
  INFO(text);
  CHECK(text.find("gate_up_proj_scales") != std::string::npos);
  CHECK(text.find("expert 1: scale 9") != std::string::npos);
}

TEST_CASE("The declared activations are part of the layer's scheme, and each projection's static scale is read") {
  TempDir dir;
  CheckpointBuilder builder;
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 3};
  spec.experts = {.format = ExpertFormat::kInt8, .bits = 8, .per_tensor = true};
  spec.quantization = "null";
  const std::vector<LayerReference> reference = AddModel(spec, &builder);
  for (int e = 0; e < 3; ++e) {
    for (const char* projection : {"gate", "up", "down"}) {
      const float scale = 0.5f + static_cast<float>(e) + 0.125f * static_cast<float>(projection[0] - 'd');
      builder.AddFloats("model.layers.0.mlp.experts." + std::to_string(e) + "." + projection + "_proj.input_scale",
                        StDtype::kF32, {}, std::span(&scale, 1));
    }
  }
  REQUIRE(builder.Write(dir.path()).ok());
  absl::StatusOr<Opened> opened = Open(dir.path());
  INFO(opened.status().ToString());
  REQUIRE(opened.ok());
  DeclaredScheme declared;
  declared.container = DeclaredScheme::Container::kInt8;
  declared.linear.weights = {ElementType::kInt8, ScaleType::kF32, {0, 0}};
  declared.linear.input = {ActivationMode::kStatic, ElementType::kInt8, ScaleType::kF32, {0, 0}};
  opened->config.quant = std::make_shared<ExpertsDeclared>(declared);
  const absl::StatusOr<LayerPlan> plan = PlanLayer(opened->config, *opened->checkpoint, 0);
  INFO(plan.status().ToString());
  REQUIRE(plan.ok());
  CHECK(plan->routed.scheme.gate.input == declared.linear.input);
  CHECK(plan->routed.scheme.down.input == declared.linear.input);
  ExpertWeights weights;
  REQUIRE(plan->experts->Read(2, &weights).ok());
  CHECK(SameExpert(weights, reference[0].experts[2]));
  CHECK(weights.down.input_scale == 2.5f);
  CHECK(weights.gate.input_scale == 2.5f + 0.125f * ('g' - 'd'));
  CHECK(weights.up.input_scale == 2.5f + 0.125f * ('u' - 'd'));
}

}  // namespace moed
