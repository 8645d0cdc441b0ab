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
#include "tests/engine/opened_checkpoint.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

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

}  // namespace moed
