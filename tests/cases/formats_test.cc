// Acceptance cases about what stored bytes mean: zero points of both GPTQ versions and of AWQ, small floating-point codes and
// scales, and NVFP4's second-level scale.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/explain.h"
#include "engine/weights.h"
#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

const char kAsymmetric[] = R"({"quantization_config": {"sym": false}})";

CaseScheme Gptq(int bits, bool v2, bool asymmetric) {
  return {.name = "GPTQ",
          .experts = {.format = ExpertFormat::kGptq, .bits = bits, .group = 64, .gptq_v2 = v2, .asymmetric = asymmetric}};
}

CaseModel GptqModel(const CaseScheme& scheme, const std::string& patch) {
  return CaseModel(SpecOf(scheme, 4, 2, 256, 128), scheme, [&](CheckpointBuilder& builder) { PatchConfig(&builder, patch); });
}

// Both models give the same bits on every backend that takes them, within the bound.
void CheckSame(const CaseModel& a, const CaseModel& b) {
  const CaseInput input = RoutedInput(9, a.layer().hidden, 4, 2);
  const std::vector<std::string> backends = a.Backends();
  REQUIRE(b.Backends() == backends);
  for (const std::string& backend : backends) {
    INFO(backend);
    CaseEngine first(a, backend), second(b, backend);
    const std::vector<float> y = first.Rows(input);
    CheckWithin(y, ExactRows(a.layer(), input), a.layer().hidden, 0.01);
    CHECK((second.Rows(input) == y));
  }
}

// Expert `expert` of layer 0 as the loader reads it.
ExpertWeights ReadExpert(const std::string& path, int expert) {
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  REQUIRE(config.ok());
  const auto checkpoint = Checkpoint::Open(path);
  REQUIRE(checkpoint.ok());
  const auto plans = PlanModel(*config, **checkpoint);
  INFO(plans.status().ToString());
  REQUIRE(plans.ok());
  ExpertWeights weights;
  const absl::Status status = (*plans)[0].experts->Read(expert, &weights);
  INFO(status.ToString());
  REQUIRE(status.ok());
  return weights;
}

std::vector<float> RowOf(const LinearWeights& weights, int64_t row) {
  std::vector<float> values(static_cast<size_t>(weights.cols));
  DequantizeRow(weights, row, values.data());
  return values;
}

void SetBytes(CheckpointBuilder& builder, const std::string& name, size_t first, const std::vector<uint8_t>& bytes) {
  BuilderTensor* tensor = builder.Find(name);
  REQUIRE(tensor != nullptr);
  REQUIRE(first + bytes.size() <= tensor->bytes.size());
  std::copy(bytes.begin(), bytes.end(), tensor->bytes.begin() + static_cast<int64_t>(first));
}

const std::string kExpert0 = "model.layers.0.mlp.experts.0.";

}  // namespace

TEST_CASE("B15: stored 7 under version 1 and stored 8 under version 2 are the same weights, to the bit") {
  for (int bits : {4, 8}) {
    const CaseScheme v1 = Gptq(bits, false, false), v2 = Gptq(bits, true, false);
    CheckSame(GptqModel(v1, "{}"), GptqModel(v2, "{}"));
    // Files without a tag are version 1; the old key for it is "format".
    CheckSame(GptqModel(v1, "{}"), GptqModel(v1, R"({"quantization_config": {"checkpoint_format": null}})"));
    CheckSame(GptqModel(v2, "{}"),
              GptqModel(v2, R"({"quantization_config": {"checkpoint_format": null, "format": "gptq_v2"}})"));
  }
}

TEST_CASE("B15: zero points of every value, stored minus one or as they are, are the same weights, to the bit") {
  for (int bits : {4, 8}) {
    CheckSame(GptqModel(Gptq(bits, false, true), kAsymmetric), GptqModel(Gptq(bits, true, true), kAsymmetric));
  }
}

TEST_CASE("B15: zero points that contradict sym: true under the declared version are refused with tensor and value") {
  struct Row {
    int bits;
    bool stored_v2;
    const char* tag;
    const char* text;
  };
  for (const Row& row : std::vector<Row>{{4, true, "gptq", "is 9, want 8"},
                                         {4, false, "gptq_v2", "is 7, want 8"},
                                         {8, true, "gptq", "is 129, want 128"},
                                         {8, false, "gptq_v2", "is 127, want 128"}}) {
    const std::string patch = std::string(R"({"quantization_config": {"checkpoint_format": ")") + row.tag + "\"}}";
    const CaseModel model = GptqModel(Gptq(row.bits, row.stored_v2, false), patch);
    const LoadResult result = TryLoad(model.path());
    INFO(result.status.ToString());
    CHECK(result.status.code() == absl::StatusCode::kInvalidArgument);
    for (const char* part : {"qzeros", row.text, "sym: true", row.tag, "model.safetensors"})
      CHECK(Mentions(result.status, part));
    REQUIRE(result.models.size() == 1);
    CHECK(result.models[0].state == LayerState::kFailed);
  }
}

TEST_CASE("B15: one wrong zero point among symmetric ones is enough") {
  const CaseScheme scheme = Gptq(4, false, false);
  const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme, [](CheckpointBuilder& builder) {
    SetBytes(builder, "model.layers.0.mlp.experts.3.down_proj.qzeros", 7, {0x76});
  });
  const LoadResult result = TryLoad(model.path());
  INFO(result.status.ToString());
  CHECK(Mentions(result.status, "experts.3.down_proj.qzeros"));
  CHECK(Mentions(result.status, "is 7, want 8"));
}

TEST_CASE("B17: an AWQ file and a GPTQ version 2 file that hold the same integers give the same answers") {
  for (int group : {64, 32, 128}) {
    CaseScheme awq = CaseSchemeNamed("int4 zero points"), gptq = Gptq(4, true, true);
    awq.experts.group = gptq.experts.group = group;
    const std::string group_text = std::to_string(group);
    const CaseModel a = GptqModel(awq, R"({"quantization_config": {"group_size": )" + group_text + "}}");
    const CaseModel b = GptqModel(gptq, kAsymmetric);
    for (size_t expert = 0; expert < 4; ++expert) REQUIRE(a.layer().experts[expert].down == b.layer().experts[expert].down);
    CheckSame(a, b);
  }
}

TEST_CASE("B24: E8M0 scale bytes and FP4 codes have their values, through the loader") {
  const CaseScheme& scheme = CaseSchemeNamed("mxfp4");
  const std::vector<uint8_t> exponents = {0, 1, 120, 127, 134, 140, 254};
  const std::vector<float> scales = {std::bit_cast<float>(0x00400000u), 0x1p-126f, 0x1p-7f, 1.0f, 128.0f, 8192.0f, 0x1p127f};
  const std::vector<float> codes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const CaseModel model(SpecOf(scheme, 2, 2, 64, 32), scheme, [&](CheckpointBuilder& builder) {
    for (size_t row = 0; row < exponents.size(); ++row) {
      // The codes 0 .. 15, even k in the low nibble, twice in each of two groups; only the first has the exponent.
      for (size_t half = 0; half < 4; ++half) {
        SetBytes(builder, kExpert0 + "up_proj.weight_packed", row * 32 + half * 8,
                 {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE});
      }
      SetBytes(builder, kExpert0 + "up_proj.weight_scale", row * 2, {exponents[row], 127});
    }
  });
  const LinearWeights up = ReadExpert(model.path(), 0).up;
  for (size_t row = 0; row < exponents.size(); ++row) {
    const std::vector<float> values = RowOf(up, static_cast<int64_t>(row));
    for (size_t k = 0; k < 64; ++k) {
      INFO("exponent byte " << int{exponents[row]} << ", column " << k);
      const float want = codes[k % 16] * (k < 32 ? scales[row] : 1.0f);
      CHECK(std::bit_cast<uint32_t>(values[k]) == std::bit_cast<uint32_t>(want));
    }
  }
}

TEST_CASE("B24: E4M3 bytes have their values, through the loader, and NaN is refused") {
  const std::vector<uint8_t> bytes = {0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x80, 0x81, 0xFE, 0x3C};
  const std::vector<float> want = {0, 0x1p-9f, 7 * 0x1p-9f, 0x1p-6f, 1, 448, -0.0f, -0x1p-9f, -448, 1.5f};
  ModelSpec spec = ProbeSpec(CaseSchemeNamed("fp8"), 1.0f, 1.0f, 64, 32);
  const auto make = [&](uint8_t last) {
    return CaseModel(spec, {}, [&, last](CheckpointBuilder& builder) {
      SetBytes(builder, kExpert0 + "gate_proj.weight", 5 * 64, bytes);
      SetBytes(builder, kExpert0 + "gate_proj.weight", 5 * 64 + bytes.size(), {last});
      const float one = 1.0f;
      std::vector<uint8_t> scale(4);
      std::memcpy(scale.data(), &one, 4);
      SetBytes(builder, kExpert0 + "gate_proj.weight_scale", 5 * 4, scale);
    });
  };
  const std::vector<float> row = RowOf(ReadExpert(make(0).path(), 0).gate, 5);
  for (size_t k = 0; k < bytes.size(); ++k) {
    INFO("byte " << int{bytes[k]});
    CHECK(std::bit_cast<uint32_t>(row[k]) == std::bit_cast<uint32_t>(want[k]));
  }
  for (uint8_t nan : {0x7F, 0xFF}) {
    const LoadResult result = TryLoad(make(nan).path());
    INFO(result.status.ToString());
    CHECK(Mentions(result.status, kExpert0 + "gate_proj.weight"));
    CHECK(Mentions(result.status, "element " + std::to_string(5 * 64 + bytes.size())));
  }
}

namespace {

// What an NVFP4 file of ModelOpt holds for a projection of an expert, element by element: code * block scale * global.
std::vector<float> Nvfp4Values(CheckpointBuilder& builder, const std::string& module) {
  const std::vector<uint8_t>& codes = builder.Find(module + ".weight")->bytes;
  const std::vector<uint8_t>& scales = builder.Find(module + ".weight_scale")->bytes;
  float global = 0.0f;
  std::memcpy(&global, builder.Find(module + ".weight_scale_2")->bytes.data(), 4);
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  std::vector<float> values;
  for (size_t i = 0; i < 2 * codes.size(); ++i) {
    const int code = codes[i / 2] >> (4 * (i % 2)) & 0xF;
    const float scale = static_cast<float>(scales[i / 16]) * 0x1p-9f;  // the bytes here are subnormal
    values.push_back((code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7]) * (scale * global));
  }
  return values;
}

}  // namespace

TEST_CASE("B24: an NVFP4 layer whose block scales are the subnormal bytes 0x01 to 0x07 is within the bound, and not zero") {
  const CaseScheme& scheme = CaseSchemeNamed("nvfp4");
  std::vector<ExpertReference> experts(4);
  const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme, [&](CheckpointBuilder& builder) {
    for (size_t expert = 0; expert < experts.size(); ++expert) {
      std::vector<float>* const targets[] = {&experts[expert].gate, &experts[expert].up, &experts[expert].down};
      for (int projection : {kGate, kUp, kDown}) {
        const char* const names[] = {"gate_proj", "up_proj", "down_proj"};
        const std::string module = "model.layers.0.mlp.experts." + std::to_string(expert) + "." + names[projection];
        std::vector<uint8_t>& scales = builder.Find(module + ".weight_scale")->bytes;
        for (size_t at = 0; at < scales.size(); ++at) scales[at] = static_cast<uint8_t>(1 + at % 7);
        const float one = 1.0f;
        std::memcpy(builder.Find(module + ".weight_scale_2")->bytes.data(), &one, 4);
        *targets[projection] = Nvfp4Values(builder, module);
      }
    }
  });
  LayerReference layer = model.layer();
  layer.experts = experts;
  CaseInput input = RoutedInput(9, 256, 4, 2);
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    input.dtype = dtype;
    const std::vector<float> want = ExactRows(layer, input);
    REQUIRE(std::all_of(want.begin(), want.end(), [](float value) { return value != 0.0f; }));
    for (const std::string& backend : model.Backends()) {
      INFO(backend);
      CaseEngine engine(model, backend);
      CheckWithin(engine.Rows(input), want, 256, scheme.bound);
    }
  }
}

namespace {

// Second-level scales of gate and up, for one expert.
struct Globals {
  float gate;
  float up;
};
constexpr Globals kGlobals[] = {{1.0f, 0.1f}, {0.1f, 1.0f}, {1.0f, 4.0f}, {0.25f, 2.5f}, {3.0f, 0.3f}, {1.0f, 1.0f}};

// Gate and up: code 2 (1.0) in column 0 under block scale 1.0, so that each weight is its global scale.
void SetGlobals(CheckpointBuilder& builder, bool divides, int64_t hidden) {
  for (size_t expert = 0; expert < std::size(kGlobals); ++expert) {
    for (const auto& [name, global] :
         {std::pair("gate_proj", kGlobals[expert].gate), std::pair("up_proj", kGlobals[expert].up)}) {
      const std::string module = "model.layers.0.mlp.experts." + std::to_string(expert) + "." + name;
      BuilderTensor* codes = builder.Find(module + (divides ? ".weight_packed" : ".weight"));
      for (size_t row = 0; row < codes->bytes.size(); row += static_cast<size_t>(hidden) / 2) codes->bytes[row] = 0x02;
      std::vector<uint8_t>& scales = builder.Find(module + ".weight_scale")->bytes;
      scales.assign(scales.size(), 0x38);
      const float stored = divides ? 1.0f / global : global;
      std::memcpy(builder.Find(module + (divides ? ".weight_global_scale" : ".weight_scale_2"))->bytes.data(), &stored, 4);
    }
  }
}

// compressed-tensors stores the global scale of activations as it divides: the largest code products over the range.
void AddInputGlobals(CheckpointBuilder& builder) {
  for (size_t expert = 0; expert < std::size(kGlobals); ++expert) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const float stored = 6.0f * 448.0f / 16.0f;
      builder.AddFloats("model.layers.0.mlp.experts." + std::to_string(expert) + "." + name + ".input_global_scale",
                        StDtype::kF32, {1}, std::span(&stored, 1));
    }
  }
}

CaseScheme CompressedNvfp4(bool activations) {
  const std::string numbers =
      R"("num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true)";
  const std::string input = activations ? "{" + numbers + R"(, "dynamic": "local"})" : "null";
  return {.name = "nvfp4 that divides",
          .experts = {.format = ExpertFormat::kNvfp4Packed},
          .quantization = R"({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": {)" +
                          numbers + R"(, "dynamic": false}, "input_activations": )" + input + "}}}",
          .bound = activations ? 0.35 : 0.01};
}

}  // namespace

TEST_CASE("B28: gate and up each keep their own global scale, whether it multiplies or divides") {
  for (const CaseScheme& scheme :
       {CaseSchemeNamed("nvfp4"), CaseSchemeNamed("nvfp4 W4A4"), CompressedNvfp4(false), CompressedNvfp4(true)}) {
    ModelSpec spec = ProbeSpec(scheme, 1.0f, 1.0f, 64, 32);
    spec.num_experts = std::size(kGlobals);
    const bool divides = scheme.experts.format == ExpertFormat::kNvfp4Packed;
    const CaseModel model(spec, scheme, [&](CheckpointBuilder& builder) {
      SetGlobals(builder, divides, 64);
      if (divides && !scheme.weight_only()) AddInputGlobals(builder);
    });
    for (const std::string& backend : model.Backends()) {
      CaseEngine engine(model, backend);
      for (int expert = 0; expert < static_cast<int>(std::size(kGlobals)); ++expert) {
        INFO(scheme.name << ", " << backend << ", expert " << expert);
        const double gate = kGlobals[expert].gate;
        const double want = gate / (1.0 + std::exp(-gate)) * kGlobals[expert].up;  // 0.07311, 0.05250, 2.92423, ...
        const Probe probe = {.expert = expert, .dtype = DType::kBf16};
        CHECK(ProbeValue(engine, 64, probe) == Approx(want).epsilon(scheme.weight_only() ? 0.02 : 0.05));
      }
    }
  }
}

}  // namespace moed
