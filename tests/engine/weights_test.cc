// From tensors to canonical experts: every family and storage decodes to exactly what was written, and a checkpoint that is
// wrong in one place is refused with that place named.
#include <catch2/catch.hpp>

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>

#include <nlohmann/json.hpp>

#include "engine/explain.h"
#include "engine/weights.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

struct Opened {
  ModelConfig config;
  std::unique_ptr<Checkpoint> checkpoint;
};

absl::StatusOr<Opened> Open(const std::string& path) {
  Opened opened;
  absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  return Opened{*std::move(config), *std::move(checkpoint)};
}

// Plans the whole model and reads every expert; the first error.
absl::Status LoadEverything(const std::string& path) {
  absl::StatusOr<Opened> opened = Open(path);
  if (!opened.ok()) return opened.status();
  absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(opened->config, *opened->checkpoint);
  if (!plans.ok()) return plans.status();
  for (const LayerPlan& plan : *plans) {
    ExpertWeights weights;
    for (int e = 0; e < plan.routed.num_experts; ++e) {
      absl::Status status = plan.experts->Read(e, &weights);
      if (!status.ok()) return status;
    }
    absl::StatusOr<GateWeights> gate = ReadGate(opened->config, *opened->checkpoint, plan.layer);
    if (!gate.ok()) return gate.status();
  }
  return absl::OkStatus();
}

bool SameMatrix(const LinearWeights& weights, const std::vector<float>& want) {
  if (weights.rows * weights.cols != static_cast<int64_t>(want.size())) return false;
  std::vector<float> row(static_cast<size_t>(weights.cols));
  for (int64_t n = 0; n < weights.rows; ++n) {
    DequantizeRow(weights, n, row.data());
    if (std::memcmp(row.data(), want.data() + n * weights.cols, row.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

bool SameExpert(const ExpertWeights& got, const ExpertReference& want) {
  return SameMatrix(got.gate, want.gate) && SameMatrix(got.up, want.up) && SameMatrix(got.down, want.down) &&
         got.gate.bias == want.gate_bias && got.up.bias == want.up_bias && got.down.bias == want.down_bias;
}

// Writes `spec`, plans it, reads everything back and compares to the bit.
void CheckRoundTrip(const ModelSpec& spec, int shards) {
  TempDir dir;
  CheckpointBuilder builder;
  const std::vector<LayerReference> reference = AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path(), shards).ok());
  absl::StatusOr<Opened> opened = Open(dir.path());
  INFO(opened.status().ToString());
  REQUIRE(opened.ok());
  absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(opened->config, *opened->checkpoint);
  INFO(plans.status().ToString());
  REQUIRE(plans.ok());
  REQUIRE(plans->size() == reference.size());
  for (size_t at = 0; at < plans->size(); ++at) {
    const LayerPlan& plan = (*plans)[at];
    CHECK(plan.layer == reference[at].layer);
    CHECK(plan.file_bytes > 0);
    ExpertWeights weights;
    for (int e = 0; e < plan.routed.num_experts; ++e) {
      REQUIRE(plan.experts->Read(e, &weights).ok());
      CHECK(SameExpert(weights, reference[at].experts[e]));
    }
    CHECK(plan.has_shared == reference[at].has_shared);
    if (plan.has_shared) {
      REQUIRE(plan.shared_expert->Read(0, &weights).ok());
      CHECK(SameExpert(weights, reference[at].shared));
    }
    const absl::StatusOr<GateWeights> gate = ReadGate(opened->config, *opened->checkpoint, plan.layer);
    REQUIRE(gate.ok());
    CHECK(gate->weight == reference[at].router);
    CHECK(gate->bias == reference[at].router_bias);
    CHECK(gate->correction_bias == reference[at].correction_bias);
  }
}

ModelSpec GptqSpec() {
  ModelSpec spec;
  spec.hidden = 128;
  spec.intermediate = 64;
  spec.num_experts = 12;
  spec.experts = {.format = ExpertFormat::kGptq, .group = 32};
  spec.mlp_names = true;
  return spec;
}

// Applies `change` to an otherwise good checkpoint and expects a refusal whose text has every one of `words`.
void CheckRefused(const ModelSpec& spec, const std::function<void(CheckpointBuilder&)>& change,
                  const std::vector<std::string>& words) {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  change(builder);
  REQUIRE(builder.Write(dir.path()).ok());
  const absl::Status status = LoadEverything(dir.path());
  INFO(status.ToString());
  REQUIRE_FALSE(status.ok());
  for (const std::string& word : words) {
    INFO(word);
    CHECK(std::string(status.message()).find(word) != std::string::npos);
  }
}

const std::string kExpert2 = "model.layers.0.mlp.experts.2.";

}  // namespace

TEST_CASE("Plain weights of every family and type decode to the bit") {
  for (ModelFamily family : {ModelFamily::kMixtral, ModelFamily::kQwen3Moe, ModelFamily::kDeepseekV3, ModelFamily::kGptOss}) {
    for (ExpertFormat format : {ExpertFormat::kBf16, ExpertFormat::kF16, ExpertFormat::kF32}) {
      ModelSpec spec{.family = family, .num_layers = 2, .hidden = 64, .intermediate = 48};
      spec.experts.format = format;
      CheckRoundTrip(spec, 1);
    }
  }
}

TEST_CASE("Quantized experts of every family, group and naming decode to the bit") {
  for (ModelFamily family : {ModelFamily::kMixtral, ModelFamily::kQwen3Moe, ModelFamily::kDeepseekV3}) {
    for (ExpertFormat format : {ExpertFormat::kGptq, ExpertFormat::kPacked}) {
      for (int group : {32, 64, -1}) {
        ModelSpec spec{.family = family, .hidden = 128, .intermediate = 64};
        spec.experts = {.format = format, .group = group, .vary_groups = true};
        spec.mlp_names = format == ExpertFormat::kGptq;
        CheckRoundTrip(spec, 1);
      }
    }
  }
}

TEST_CASE("GPTQ with a short last group and with version 2 zero points decodes to the bit") {
  ModelSpec spec = GptqSpec();
  spec.hidden = 176;
  spec.intermediate = 208;
  spec.experts.group = 128;
  CheckRoundTrip(spec, 1);
  spec.experts.gptq_v2 = true;
  CheckRoundTrip(spec, 1);
}

TEST_CASE("The pieces of one weight may lie in different shards") {
  ModelSpec spec = GptqSpec();
  CheckRoundTrip(spec, 5);
  spec.experts.format = ExpertFormat::kPacked;
  spec.mlp_names = false;
  CheckRoundTrip(spec, 7);
}

TEST_CASE("B14: a file without g_idx is the file with a trivial one") {
  ModelSpec spec = GptqSpec();
  spec.experts.group_index = GroupIndex::kNone;
  CheckRoundTrip(spec, 1);
}

TEST_CASE("A scattered g_idx in a file that says desc_act false is refused") {
  ModelSpec spec = GptqSpec();
  spec.experts.group_index = GroupIndex::kShuffled;
  spec.quantization = GptqConfigText(GptqSpec().experts);
  CheckRefused(spec, [](CheckpointBuilder&) {}, {".g_idx", "desc_act"});
}

TEST_CASE("B15: version 2 zero points under a version 1 tag are refused with tensor, group and value") {
  ModelSpec spec = GptqSpec();
  spec.experts.gptq_v2 = true;
  spec.quantization = GptqConfigText(GptqSpec().experts);
  CheckRefused(spec, [](CheckpointBuilder&) {}, {"qzeros", "is 9, want 8", "sym"});
}

TEST_CASE("B32: renamed experts are refused with the count and the first ten names") {
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) { b.RenameAll(".experts.", ".expertz."); }, {"tensors are missing", "more"});
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) { b.RenameAll("experts.2.", "expertz.2."); },
               {"layer 0", "model.layers.0.mlp.experts.2.gate_proj"});
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) { CHECK(b.Remove(kExpert2 + "up_proj.scales") == 1); },
               {"1 tensors are missing", kExpert2 + "up_proj.scales"});
}

TEST_CASE("B32: tensors that have nothing to do with experts are ignored, expert-like ones are not") {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(GptqSpec(), &builder);
  const std::vector<float> zeros(16, 0.0f);
  builder.AddFloats("lm_head.weight", StDtype::kBf16, {4, 4}, zeros);
  builder.AddFloats("model.layers.0.self_attn.k_proj.k_scale", StDtype::kF32, {}, std::span(zeros).first(1));
  builder.AddFloats("rotary.inv_freq", StDtype::kF32, {16}, zeros);
  builder.AddFloats("model.layers.9.mlp.experts.0.gate_proj.weight", StDtype::kBf16, {4, 4}, zeros);  // multi-token prediction
  builder.AddFloats("mtp.layers.0.mlp.experts.0.gate_proj.weight", StDtype::kBf16, {4, 4}, zeros);
  REQUIRE(builder.Write(dir.path()).ok());
  CHECK(LoadEverything(dir.path()).ok());
  CheckRefused(GptqSpec(), [&](CheckpointBuilder& b) {
    b.AddFloats("model.layers.0.mlp.experts.12.gate_proj.weight", StDtype::kBf16, {4, 4}, zeros);
  }, {"1 expert tensors", "experts.12.gate_proj", "E = 12"});
  CheckRefused(GptqSpec(), [&](CheckpointBuilder& b) {
    b.AddFloats(kExpert2 + "gate_proj.bias", StDtype::kBf16, {4, 4}, zeros);
  }, {kExpert2 + "gate_proj.bias"});
}

TEST_CASE("A tensor of the wrong shape or type is refused with file, tensor, wanted and got") {
  const auto reshape = [](const std::string& name, std::vector<int64_t> shape) {
    return [=](CheckpointBuilder& b) {
      REQUIRE(b.Find(name) != nullptr);
      b.Find(name)->shape = shape;
    };
  };
  CheckRefused(GptqSpec(), reshape(kExpert2 + "down_proj.qweight", {128, 8}),
               {"model.safetensors", kExpert2 + "down_proj.qweight", "[128, 8]", "want [8, 128]"});
  CheckRefused(GptqSpec(), reshape(kExpert2 + "gate_proj.scales", {64, 4}), {"want [4, 64]"});
  CheckRefused(GptqSpec(), reshape("model.layers.0.mlp.gate.weight", {128, 12}), {"mlp.gate.weight", "want [12, 128]"});
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) { b.Find(kExpert2 + "gate_proj.qweight")->dtype = StDtype::kF32; },
               {"dtype is F32, want I32"});
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) { b.Find(kExpert2 + "gate_proj.scales")->dtype = StDtype::kI16; },
               {"gate_proj.scales", "dtype is I16"});
}

TEST_CASE("A config whose sizes are not those of the tensors is refused") {
  for (const auto& [key, value] : std::vector<std::pair<std::string, int>>{{"hidden_size", 256}, {"intermediate_size", 128},
                                                                          {"num_local_experts", 13}, {"num_local_experts", 11}}) {
    CheckRefused(GptqSpec(), [&, key = key, value = value](CheckpointBuilder& b) {
      nlohmann::json config = nlohmann::json::parse(b.GetFile("config.json"));
      REQUIRE(config.contains(key));
      config[key] = value;
      b.SetConfig(config.dump());
    }, {"model.layers.0"});
  }
}

TEST_CASE("NaN and infinity in a scale are refused with the index") {
  for (uint16_t bits : {0x7E00, 0x7C00, 0xFC00}) {
    CheckRefused(GptqSpec(), [&](CheckpointBuilder& b) {
      std::memcpy(b.Find(kExpert2 + "up_proj.scales")->bytes.data() + 2 * 70, &bits, 2);
    }, {kExpert2 + "up_proj.scales", "scale 70", "finite"});
  }
}

TEST_CASE("weight_shape that contradicts the config is refused") {
  ModelSpec spec = GptqSpec();
  spec.mlp_names = false;
  spec.experts.format = ExpertFormat::kPacked;
  CheckRefused(spec, [](CheckpointBuilder& b) {
    for (const BuilderTensor& tensor : b.tensors()) {
      if (tensor.name.find("experts.3.w2.weight_shape") == std::string::npos &&
          tensor.name.find("experts.3.down_proj.weight_shape") == std::string::npos) {
        continue;
      }
      const int64_t wrong = 63;
      std::memcpy(b.Find(tensor.name)->bytes.data() + 8, &wrong, 8);
    }
  }, {"weight_shape", "63]", "want [128, 64]"});
}

TEST_CASE("An expert stored twice, and one stored unlike the others, are refused") {
  const std::vector<float> zeros(64 * 128, 0.0f);
  CheckRefused(GptqSpec(), [&](CheckpointBuilder& b) {
    b.AddFloats(kExpert2 + "gate_proj.weight", StDtype::kBf16, {64, 128}, zeros);
  }, {"more than once"});
  CheckRefused(GptqSpec(), [&](CheckpointBuilder& b) {
    for (const char* suffix : {"qweight", "qzeros", "scales", "g_idx"}) b.Remove(kExpert2 + "gate_proj." + suffix);
    b.AddFloats(kExpert2 + "gate_proj.weight", StDtype::kBf16, {64, 128}, zeros);
  }, {kExpert2 + "gate_proj", "bf16", "int4"});
}

TEST_CASE("Quantized tensors without a declared quantization are refused, plain ones with one are read as they are") {
  CheckRefused(GptqSpec(), [](CheckpointBuilder& b) {
    nlohmann::json config = nlohmann::json::parse(b.GetFile("config.json"));
    config.erase("quantization_config");
    b.SetConfig(config.dump());
  }, {"qweight", "unquantized"});
  ModelSpec plain = GptqSpec();
  plain.experts.format = ExpertFormat::kBf16;
  plain.quantization = GptqConfigText(GptqSpec().experts);
  CheckRoundTrip(plain, 1);
}

TEST_CASE("B33: ignored layers stay unquantized, a container's exact name changes nothing, the router keeps its type") {
  TempDir dir;
  CheckpointBuilder builder;
  ModelSpec spec = GptqSpec();
  spec.family = ModelFamily::kQwen3Moe;
  spec.mlp_names = false;
  spec.num_layers = 2;
  spec.experts = {.format = ExpertFormat::kPacked, .group = 64};
  spec.layer_experts = {spec.experts, {}};
  spec.quantization = PackedConfigText(spec.experts, {"re:.*layers\\.1\\..*", "model.layers.0.mlp.experts.1"});
  const std::vector<LayerReference> reference = AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  absl::StatusOr<Opened> opened = Open(dir.path());
  REQUIRE(opened.ok());
  const absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(opened->config, *opened->checkpoint);
  INFO(plans.status().ToString());
  REQUIRE(plans.ok());
  CHECK((*plans)[0].routed.scheme.gate.weights.element == ElementType::kInt4);
  CHECK((*plans)[1].routed.scheme.gate.weights.element == ElementType::kBf16);
  ExpertWeights weights;
  for (int e : {1, 10, 11}) {
    REQUIRE((*plans)[0].experts->Read(e, &weights).ok());
    CHECK(SameExpert(weights, reference[0].experts[e]));
    REQUIRE((*plans)[1].experts->Read(e, &weights).ok());
    CHECK(SameExpert(weights, reference[1].experts[e]));
  }
}

TEST_CASE("A file shortened after it was opened gives DATA_LOSS, not a fault") {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(GptqSpec(), &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  absl::StatusOr<Opened> opened = Open(dir.path());
  REQUIRE(opened.ok());
  const absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(opened->config, *opened->checkpoint);
  REQUIRE(plans.ok());
  REQUIRE(truncate((dir.path() + "/model.safetensors").c_str(), 30000) == 0);
  ExpertWeights weights;
  int lost = 0;
  for (int e = 0; e < 12; ++e) {
    const absl::Status status = (*plans)[0].experts->Read(e, &weights);
    lost += status.code() == absl::StatusCode::kDataLoss;
    CHECK((status.ok() || status.code() == absl::StatusCode::kDataLoss));
  }
  CHECK(lost > 0);
}

namespace {

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
