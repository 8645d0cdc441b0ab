// Acceptance cases about the choice of a backend: a forced name is honoured or refused with reasons, on this machine and on
// invented ones, before a weight is read; and an unaligned width is not moved to a slower backend in silence.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "engine/explain.h"
#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

// Layer 0 as `experts` says, layer 1 bf16 and listed as ignored.
ModelSpec MixedSpec(const ExpertSpec& experts) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = 256, .intermediate = 128, .num_experts = 4};
  spec.experts = experts;
  spec.layer_experts = {experts, ExpertSpec{}};
  spec.quantization = PackedConfigText(experts, {"re:.*layers\\.1\\..*"});
  return spec;
}

std::vector<std::string> BackendNames() {
  std::vector<std::string> names;
  for (const Backend* backend : LinkedBackends()) names.push_back(backend->Name());
  return names;
}

EngineOptions OnDevice(const DeviceInfo& device) {
  EngineOptions options;
  options.device = device;
  return options;
}

// One layer's explanation on `device`.
LayerExplanation Explained(const std::string& path, const DeviceInfo& device,
                           ActivationChoice activations = ActivationChoice::kFile) {
  const auto report = ExplainCheckpoint(path, device, LinkedBackends(), Policy(), activations, 0, 1024);
  INFO(report.status().ToString());
  REQUIRE(report.ok());
  return report->layers.at(0);
}

const Verdict& VerdictOf(const LayerExplanation& layer, const std::string& backend) {
  for (const BackendVerdict& entry : layer.backends) {
    if (entry.name == backend) return entry.verdict;
  }
  FAIL("no verdict of " << backend);
  return layer.backends[0].verdict;
}

bool HasReason(const Verdict& verdict, const std::string& code, const std::string& part) {
  return std::any_of(verdict.reasons.begin(), verdict.reasons.end(),
                     [&](const Reason& reason) { return reason.code == code && reason.text.find(part) != std::string::npos; });
}

// Nothing but the missing name speaks against the backend.
bool RunsByName(const Verdict& verdict) {
  return std::all_of(verdict.reasons.begin(), verdict.reasons.end(),
                     [](const Reason& reason) { return reason.code == "only_by_name"; });
}

// The refusal has a line for every backend of its own: each of its reasons, or "ok".
void CheckLines(const absl::Status& status, const LayerExplanation& layer, const std::string& required) {
  for (const BackendVerdict& entry : layer.backends) {
    std::string line = "\n  " + entry.name + ": ";
    if (entry.verdict.ok()) line += "ok";
    for (const Reason& reason : entry.verdict.reasons) {
      // Asking for it by name is what the policy does.
      if (entry.name == required && reason.code == "only_by_name") continue;
      INFO("wanted \"" << reason.text << "\" of " << entry.name << " in: " << status.ToString());
      CHECK(Mentions(status, reason.text));
    }
    INFO("wanted \"" << line << "\" in: " << status.ToString());
    CHECK(Mentions(status, line));
  }
}

// A forced backend either runs the layer, or the plan is refused with the layer and every backend's reasons.
void CheckForced(const CaseModel& model, const std::string& policy, const std::string& name) {
  const LoadResult result = TryLoad(model.path(), policy);
  INFO(policy << ": " << result.status.ToString());
  if (!result.status.ok()) {
    CHECK(result.status.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(Mentions(result.status, "layer 0 (int"));
    CHECK(Mentions(result.status, "the required backend " + name + " cannot run this layer"));
    CheckLines(result.status, Explained(model.path(), ThisDevice()), name);
    const std::vector<std::string> able = model.Backends();
    CHECK(std::find(able.begin(), able.end(), name) == able.end());
    CHECK(result.models.empty());
    return;
  }
  REQUIRE(result.models.at(0).layers.size() == 2);
  CHECK(result.models[0].layers[0].backend == name);
  CHECK(result.models[0].layers[1].backend == TryLoad(model.path()).models.at(0).layers[1].backend);
  CHECK(result.models[0].layers[1].scheme.find("bf16") != std::string::npos);
}

// GPTQ with scattered groups.
ModelSpec ActOrderSpec() {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe};
  spec.experts = {.format = ExpertFormat::kGptq, .group = 64, .group_index = GroupIndex::kShuffled};
  return spec;
}

}  // namespace

TEST_CASE(
    "B01: a backend forced on the int4 layer runs it or is refused with reasons, and the bf16 layer is chosen for itself") {
  for (int group : {64, 32, 128}) {
    for (int bits : {4, 8}) {
      const CaseModel model(MixedSpec({.format = ExpertFormat::kPacked, .bits = bits, .group = group}));
      const std::string element = bits == 4 ? "int4" : "int8";
      for (const std::string& name : BackendNames()) {
        CheckForced(model, "auto,scheme:" + element + "=require:" + name, name);
        CheckForced(model, "auto,layers:0=require:" + name, name);
      }
    }
  }
}

TEST_CASE("B01: what a forced backend answers is within the bound, on both layers") {
  const CaseModel model(MixedSpec({.format = ExpertFormat::kPacked, .group = 64}));
  const CaseInput input = RoutedInput(5, 256, 4, 2);
  for (const std::string& name : model.Backends()) {
    INFO(name);
    CaseEngine engine(model, name);  // layer 0
    CheckWithin(engine.Rows(input), ExactRows(model.layer(0), input), 256, 0.01);
    ForwardCall call;
    call.layer = 1;
    call.hidden = {input.x.data(), DType::kF32, 5, 256};
    call.routing = RoutingByIds{2, input.ids, input.weights};
    std::vector<float> y(5 * 256);
    ForwardInfo info;
    REQUIRE(engine.engine().Forward("m", call, {y.data(), DType::kF32, 5, 256}, &info).ok());
    CHECK(info.backend == name);
    CheckWithin(y, ExactRows(model.layer(1), input), 256, 0.01);
  }
}

TEST_CASE("B01: an invented name is refused with the valid ones, wherever the policy has it") {
  const CaseModel model(MixedSpec({.format = ExpertFormat::kPacked, .group = 64}));
  for (const char* policy :
       {"require:cpu_frob", "prefer:cpu_frob", "auto,scheme:int4=require:cpu_frob", "auto,layers:7=require:cpu_frob"}) {
    const LoadResult result = TryLoad(model.path(), policy);
    INFO(policy << ": " << result.status.ToString());
    CHECK(result.status.code() == absl::StatusCode::kNotFound);
    CHECK(Mentions(result.status, "cpu_frob"));
    for (const std::string& name : BackendNames()) CHECK(Mentions(result.status, name));
    CHECK(result.models.empty());
  }
}

TEST_CASE("B01: a device without the forced backend's instructions refuses it by flag, and a preferred one is replaced aloud") {
  const CaseModel model(MixedSpec({.format = ExpertFormat::kPacked, .group = 64}));
  DeviceInfo bare = ThisDevice();
  bare.isa = IsaFlags();
  for (const auto& [name, flag] : {std::pair("cpu_avx512", "avx512f"), std::pair("cpu_avx2", "avx2")}) {
    const LoadResult required = TryLoad(model.path(), std::string("require:") + name, OnDevice(bare));
    INFO(required.status.ToString());
    CHECK(required.status.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(Mentions(required.status, flag));
    const LoadResult preferred = TryLoad(model.path(), std::string("prefer:") + name, OnDevice(bare));
    INFO(preferred.status.ToString());
    REQUIRE(preferred.status.ok());
    for (const LayerStatus& layer : preferred.models.at(0).layers) {
      CHECK(layer.backend == "cpu_generic");
      CHECK(layer.note.find(std::string("preferred backend ") + name + " not taken") != std::string::npos);
      CHECK(layer.note.find(flag) != std::string::npos);
    }
  }
}

TEST_CASE("B02b, B02c: on every device each backend that cannot run a scheme says why, and the one that is chosen can") {
  for (const char* scheme_name : {"nvfp4 W4A4", "fp8 block", "mxfp4 W4A4", "int8 W8A8", "int4", "bf16"}) {
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    for (const std::string& device_name : BuiltInDeviceNames()) {
      const DeviceInfo device = *BuiltInDevice(device_name);
      const LayerExplanation layer = Explained(model.path(), device);
      INFO(scheme_name << " on " << device_name);
      REQUIRE(layer.backends.size() == BackendNames().size());
      for (const BackendVerdict& entry : layer.backends) {
        for (const Reason& reason : entry.verdict.reasons) CHECK((!reason.code.empty() && !reason.text.empty()));
        const LoadResult forced = TryPlan(model.path(), "require:" + entry.name, OnDevice(device));
        if (RunsByName(entry.verdict)) {
          REQUIRE(forced.status.ok());
          CHECK(forced.models.at(0).layers.at(0).backend == entry.name);
          continue;
        }
        CHECK(forced.status.code() == absl::StatusCode::kFailedPrecondition);
        CHECK(Mentions(forced.status, "on " + device.name));
        CHECK(Mentions(forced.status, layer.scheme));
        CheckLines(forced.status, layer, entry.name);
      }
      CHECK(VerdictOf(layer, layer.choice).ok());
    }
  }
}

TEST_CASE("B02b, B02c: all reasons of a backend are told at once: instructions and scheme") {
  const CaseScheme& scheme = CaseSchemeNamed("int4 act-order");
  const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
  const LayerExplanation a100 = Explained(model.path(), *BuiltInDevice("a100"));  // its host has AVX2 only
  CHECK(HasReason(VerdictOf(a100, "cpu_vnni"), "isa_missing", "avx512f"));
  CHECK(HasReason(VerdictOf(a100, "cpu_vnni"), "scheme_unsupported",
                  "its products want int4, int8 or FP4 weights with int8 activations"));
  CHECK(HasReason(VerdictOf(a100, "cpu_avxvnni"), "scheme_unsupported", "got int4"));
  CHECK(a100.choice == "cpu_avx2");
  const LayerExplanation h200 = Explained(model.path(), *BuiltInDevice("h200"));
  CHECK_FALSE(HasReason(VerdictOf(h200, "cpu_vnni"), "isa_missing", ""));
  CHECK(HasReason(VerdictOf(h200, "cpu_vnni"), "scheme_unsupported", "16-bit activations"));
}

TEST_CASE("B02b, B02c: what the host of a device cannot run falls to the next backend, with its one reason") {
  for (const char* scheme_name : {"nvfp4 W4A4", "fp8 block", "int8 W8A8", "mxfp4"}) {
    INFO(scheme_name);
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    const LayerExplanation a100 = Explained(model.path(), *BuiltInDevice("a100"));
    CHECK(HasReason(VerdictOf(a100, "cpu_avx512"), "isa_missing", "avx512f"));
    CHECK_FALSE(HasReason(VerdictOf(a100, "cpu_avx512"), "scheme_unsupported", ""));
    CHECK(a100.choice == "cpu_avx2");
  }
}

TEST_CASE("B02b, B02c: each processor gets the products of its newest instructions that fit the activations") {
  using Names = std::vector<std::string>;
  const Names devices = {"cpu-avx512-vnni", "cpu-avx512-bf16", "cpu-amx", "h200", "cpu-avx2", "a100"};
  const Names bf16 = {"cpu_avx512", "cpu_avx512bf16", "cpu_amx", "cpu_amx", "cpu_avx2", "cpu_avx2"};
  const Names int8 = {"cpu_vnni", "cpu_vnni", "cpu_amx", "cpu_amx", "cpu_avx2", "cpu_avx2"};
  const Names f32 = {"cpu_avx512", "cpu_avx512", "cpu_avx512", "cpu_avx512", "cpu_avx2", "cpu_avx2"};
  struct Row {
    Names schemes;
    Names file, by_choice;  // by device: with the file's activations, and where the operator chose int8
  };
  for (const Row& row : std::vector<Row>{{{"int4", "int4 zero points", "int4 act-order", "int8", "mxfp4", "nvfp4"}, bf16, int8},
                                         {{"int8 W8A8", "int4 W4A8"}, int8, int8},
                                         {{"nvfp4 W4A4", "mxfp4 W4A4"}, f32, int8},
                                         {{"bf16"}, bf16, bf16},
                                         {{"f16", "f32", "fp8", "fp8 block"}, f32, f32}}) {
    for (const std::string& name : row.schemes) {
      const CaseScheme& scheme = CaseSchemeNamed(name);
      const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
      for (size_t at = 0; at < devices.size(); ++at) {
        INFO(name << " on " << devices[at]);
        DeviceInfo device = *BuiltInDevice(devices[at]);
        device.has_gpu = false;
        CHECK(Explained(model.path(), device).choice == row.file[at]);
        CHECK(Explained(model.path(), device, ActivationChoice::kInt8).choice == row.by_choice[at]);
      }
    }
  }
}

TEST_CASE("B02b, B02c: an H200 gets every scheme, 16-bit activations from its own products; other GPUs what is built") {
  const DeviceInfo h200 = *BuiltInDevice("h200"), a100 = *BuiltInDevice("a100");
  for (const char* name : {"int4", "int4 zero points", "int4 act-order", "int8", "mxfp4", "nvfp4", "fp8", "fp8 block", "bf16",
                           "f16", "f32", "int8 W8A8", "int4 W4A8", "nvfp4 W4A4", "mxfp4 W4A4"}) {
    INFO(name);
    const CaseScheme& scheme = CaseSchemeNamed(name);
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    const LayerExplanation layer = Explained(model.path(), h200);
    if (HasReason(VerdictOf(layer, "cuda_generic"), "not_built", "")) return testing::Skip("built without CUDA");
    CHECK(VerdictOf(layer, "cuda_generic").ok());
    const std::string text = name;
    const bool own = text[0] != 'f' && text.find("A4") == std::string::npos && text.find("A8") == std::string::npos;
    const bool fp8 = text.substr(0, 3) == "fp8";
    if (!fp8) CHECK(layer.choice == (own ? "cuda_wna16" : "cuda_generic"));
    CHECK((layer.choice == "cuda_wna16") == VerdictOf(layer, "cuda_wna16").ok());
    const LayerExplanation other = Explained(model.path(), a100);
    CHECK(HasReason(VerdictOf(other, "cuda_wna16"), "gpu_unsupported", "the GPU has 8.0"));
    CHECK(HasReason(VerdictOf(other, "cuda_generic"), "gpu_unsupported", "sm_90a") == !VerdictOf(other, "cuda_generic").ok());
  }
}

TEST_CASE("B01: with int8 activations a forced backend runs the layer or is refused with reasons, on every device") {
  for (const char* scheme_name : {"int4", "int4 act-order", "mxfp4 W4A4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    for (const std::string& device_name : BuiltInDeviceNames()) {
      EngineOptions options = OnDevice(*BuiltInDevice(device_name));
      options.activations = ActivationChoice::kInt8;
      const LayerExplanation layer = Explained(model.path(), options.device, ActivationChoice::kInt8);
      CHECK(layer.scheme.ends_with(", int8 dynamic token activations"));
      for (const BackendVerdict& entry : layer.backends) {
        INFO(scheme_name << " on " << device_name << " by " << entry.name);
        const LoadResult forced = TryPlan(model.path(), "require:" + entry.name, options);
        if (RunsByName(entry.verdict)) {
          REQUIRE(forced.status.ok());
          CHECK(forced.models.at(0).layers.at(0).backend == entry.name);
        } else {
          CHECK(forced.status.code() == absl::StatusCode::kFailedPrecondition);
          CheckLines(forced.status, layer, entry.name);
        }
      }
    }
  }
}

TEST_CASE("B02: a refusal comes before a weight is read") {
  // A NaN scale, which a load that reads it names.
  const CaseModel model(ActOrderSpec(), {}, [](CheckpointBuilder& builder) {
    builder.Find("model.layers.0.mlp.experts.0.gate_proj.scales")->bytes[1] = 0x7F;
  });
  CHECK(Mentions(TryLoad(model.path()).status, "scale 0"));
  const LoadResult refused = TryPlan(model.path(), "require:cpu_vnni");  // whose products want int8 activations
  INFO(refused.status.ToString());
  CHECK(refused.status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_FALSE(Mentions(refused.status, "scale 0"));
  CHECK(refused.models.empty());
}

TEST_CASE("B03: on every device I = 176 gets the backend of I = 192, and both are within the bound") {
  for (const char* scheme_name : {"bf16", "int8 W8A8", "int4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    std::map<std::string, std::string> chosen;  // by device
    for (int64_t width : {192, 176, 200}) {
      const CaseModel model(SpecOf(scheme, 8, 8, 1024, width), scheme);
      CaseEngine engine(model);
      for (int64_t tokens : {4, 64}) {  // vectors, and whole tiles where there are some
        const CaseInput input = RoutedInput(tokens, 1024, 8, 8);
        INFO(scheme_name << ", I = " << width << ", " << tokens << " tokens");
        CheckWithin(engine.Rows(input), ExactRows(model.layer(), input), 1024, scheme.bound);
      }
      INFO(scheme_name << ", I = " << width);
      for (const std::string& device : BuiltInDeviceNames()) {
        const LayerExplanation layer = Explained(model.path(), *BuiltInDevice(device));
        INFO(device);
        CHECK(chosen.emplace(device, layer.choice).first->second == layer.choice);
        CHECK(layer.note.empty());
      }
      CHECK(engine.info().backend == chosen.at("this"));
    }
  }
}

}  // namespace moed
