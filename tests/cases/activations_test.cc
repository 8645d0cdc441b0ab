// Acceptance cases about the treatment of activations: dynamic int8, static FP8 and int8 with their clamps, and the limit of
// clamped SwiGLU. Probe layers whose answers are known numbers, on every backend that takes them.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

double Silu(double z) { return z / (1.0 + std::exp(-z)); }

EngineOptions WeightsOnly() {
  EngineOptions options;
  options.activations = ActivationChoice::kNone;
  return options;
}

// Gate row: 1/127, then 1/64; up row: 1/127, then 0; down 1/128. int8 per channel holds all of them.
ModelSpec TokenProbe(const CaseScheme& scheme) {
  ModelSpec spec = ProbeSpec(scheme, 1.0f, 1.0f, 256, 128);
  spec.weights = [](int, int projection, int64_t index) {
    if (projection == kDown) return 1.0f / 128;
    if (index % 256 == 0) return 1.0f / 127;
    return projection == kGate ? 1.0f / 64 : 0.0f;
  };
  return spec;
}

}  // namespace

TEST_CASE("B19: int8 activations per token are executed where the file asks for them") {
  struct Row {
    float x0, rest, gate, up;  // gate and up as quantized activations give them
  };
  const CaseScheme& scheme = CaseSchemeNamed("int8 W8A8");
  const CaseModel model(TokenProbe(scheme), scheme);
  for (const Row& row : std::vector<Row>{{127.0f, 0.4f, 1.0f, 1.0f},
                                         {127.0f, -0.4f, 1.0f, 1.0f},
                                         {127.0f, 0.6f, 1.0f + 255.0f / 64, 1.0f},  // 0.6 rounds to 1
                                         {127.0f, 0.5f, 1.0f, 1.0f},                // the tie goes to the even code 0
                                         {254.0f, 0.9f, 2.0f, 2.0f},                // the scale is 2
                                         {-127.0f, 0.4f, -1.0f, -1.0f}}) {
    for (const std::string& backend : model.Backends()) {
      INFO("x0 = " << row.x0 << ", rest = " << row.rest << ", " << backend);
      CaseEngine engine(model, backend);
      CHECK(ProbeValue(engine, 256, {.x0 = row.x0, .rest = row.rest}) == Approx(Silu(row.gate) * row.up).epsilon(0.01));
      CHECK(engine.info().scheme.find("int8 dynamic") != std::string::npos);
      CHECK(engine.engine().Status()[0].layers[0].executed_scheme == engine.info().scheme);
    }
  }
}

TEST_CASE("B19: the operator's choice of weights only is what runs, and status and answer say so") {
  const CaseScheme& scheme = CaseSchemeNamed("int8 W8A8");
  const CaseModel model(TokenProbe(scheme), scheme);
  for (const std::string& backend : model.Backends(ActivationChoice::kNone)) {
    CaseEngine engine(model, backend, WeightsOnly());
    const double gate = 1.0 + 0.4 * 255 / 64;
    CHECK(ProbeValue(engine, 256, {.x0 = 127.0f, .rest = 0.4f}) == Approx(Silu(gate)).epsilon(0.01));  // 2.415
    const LayerStatus layer = engine.engine().Status()[0].layers[0];
    CHECK(layer.scheme.find("int8 dynamic") != std::string::npos);
    CHECK(layer.executed_scheme.find("16-bit activations") != std::string::npos);
    CHECK(engine.info().scheme == layer.executed_scheme);
  }
}

namespace {

EngineOptions Int8Activations() {
  EngineOptions options;
  options.activations = ActivationChoice::kInt8;
  return options;
}

constexpr char kInt8Token[] = ", int8 dynamic token activations";

// Whether the operator's int8 applies: the weights are int4, int8 or FP4, whatever is said about activations.
bool TakesInt8(const CaseScheme& scheme) { return scheme.name.starts_with("int") || scheme.name.find("fp4") != std::string::npos; }

}  // namespace

TEST_CASE("B19: with the operator's choice of int8, activations are int8 per token on every backend, whatever the file asks for") {
  for (const char* name : {"int8", "int8 W8A8"}) {  // weight-only, and dynamic anyway
    const CaseScheme& scheme = CaseSchemeNamed(name);
    const CaseModel model(TokenProbe(scheme), scheme);
    for (const std::string& backend : model.Backends(ActivationChoice::kInt8)) {
      INFO(name << ", " << backend);
      CaseEngine engine(model, backend, Int8Activations());
      CHECK(ProbeValue(engine, 256, {.x0 = 127.0f, .rest = 0.4f}) == Approx(Silu(1.0)).epsilon(0.01));  // 2.415 unquantized
      CHECK(ProbeValue(engine, 256, {.x0 = 254.0f, .rest = 0.9f}) == Approx(Silu(2.0) * 2.0).epsilon(0.01));
      CHECK(engine.info().scheme.find(kInt8Token) != std::string::npos);
    }
  }
}

TEST_CASE("int8 by choice: each int4, int8 and FP4 scheme runs with it, others as without, and answers stay in the bounds") {
  for (const CaseScheme& scheme : CaseSchemes()) {
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    CaseInput input = RoutedInput(5, 256, 4, 2);
    input.dtype = DType::kF32;
    CaseEngine reference(model, "reference", Int8Activations());
    const std::vector<float> want = reference.Rows(input), exact = ExactRows(model.layer(), input);
    const LayerStatus status = reference.engine().Status()[0].layers[0];
    const bool taken = TakesInt8(scheme);
    INFO(scheme.name << ": " << status.scheme << ", runs " << status.executed_scheme);
    if (taken) {
      CHECK(status.executed_scheme.ends_with(kInt8Token));
      CheckWithin(want, exact, 256, 0.04);  // of int8 activations per token
    } else {
      CHECK(status.executed_scheme == status.scheme);
      CHECK(want == CaseEngine(model, "reference").Rows(input));
    }
    for (const std::string& backend : model.Backends(ActivationChoice::kInt8)) {
      INFO(backend);
      CaseEngine engine(model, backend, Int8Activations());
      const std::vector<float> got = engine.Rows(input);
      CheckWithin(got, exact, 256, taken ? 0.04 : scheme.bound);
      if (taken) CheckWithin(got, want, 256, 0.02);
      CHECK(engine.info().scheme == status.executed_scheme);
      const auto checked = engine.engine().SelfCheck("m", -1, 8, 3);
      REQUIRE(checked.ok());
      CHECK((checked->at(0).passed && checked->at(0).scheme == status.executed_scheme));
    }
  }
}

namespace {

// Static activations with one scale for every projection.
CaseModel StaticModel(const CaseScheme& scheme, float input_scale) {
  return CaseModel(ProbeSpec(scheme, 1.0f, 1.0f, 64, 32), scheme,
                   [=](CheckpointBuilder& builder) { SetInputScales(&builder, [=](int, int) { return input_scale; }); });
}

// compressed-tensors with static per-tensor activations of 8 bits.
CaseScheme CompressedStatic(const std::string& type, ExpertFormat format) {
  const std::string numbers =
      R"("num_bits": 8, "symmetric": true, "dynamic": false, "strategy": "tensor", "type": ")" + type + '"';
  return {.name = "static " + type,
          .experts = {.format = format, .bits = 8, .per_tensor = true},
          .quantization = R"({"quant_method": "compressed-tensors", "format": ")" +
                          std::string(type == "int" ? "int-quantized" : "float-quantized") +
                          R"(", "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": {)" +
                          numbers + R"(}, "input_activations": {)" + numbers + "}}}}"};
}

CaseScheme Fp8Static() {
  CaseScheme scheme = CaseSchemeNamed("fp8 static");
  scheme.quantization = R"({"quant_method": "fp8", "activation_scheme": "static"})";
  return scheme;
}

constexpr float kLargest = std::numeric_limits<float>::max();

}  // namespace

TEST_CASE("B21: static FP8 activations beyond the range clamp to it, in the files of every tool") {
  struct Row {
    float x0;
    double want;
  };
  // Scale 1/448: x clamps to 1 or -1; h is 0.7311 or 0.2689 and is rounded to 320/448 and 120/448.
  for (const CaseScheme& scheme : {CaseSchemeNamed("fp8 static"), Fp8Static(), CompressedStatic("float", ExpertFormat::kFp8)}) {
    const CaseModel model = StaticModel(scheme, 1.0f / 448);
    for (const Row& row : std::vector<Row>{{3.0f, 320.0 / 448},
                                           {1.0f, 320.0 / 448},
                                           {1e6f, 320.0 / 448},
                                           {kLargest, 320.0 / 448},
                                           {-3.0f, 120.0 / 448},
                                           {-1e6f, 120.0 / 448},
                                           {-kLargest, 120.0 / 448}}) {
      for (const std::string& backend : model.Backends()) {
        INFO(scheme.name << ", x0 = " << row.x0 << ", " << backend);
        CaseEngine engine(model, backend);
        CHECK(ProbeValue(engine, 64, {.x0 = row.x0}) == Approx(row.want).epsilon(0.005));
        CHECK(engine.info().scheme.find("fp8 static") != std::string::npos);
      }
    }
  }
}

TEST_CASE("B21: static int8 activations clamp to -128 and 127") {
  const CaseScheme scheme = CompressedStatic("int", ExpertFormat::kInt8);
  const CaseModel model = StaticModel(scheme, 1.0f / 127);
  const double low = -128.0 / 127;
  for (float x0 : {3.0f, 1.0f, 1e6f}) {
    for (const std::string& backend : model.Backends()) {
      INFO("x0 = " << x0 << ", " << backend);
      CaseEngine engine(model, backend);
      CHECK(ProbeValue(engine, 64, {.x0 = x0}) == Approx(std::nearbyint(127 * Silu(1.0)) / 127).epsilon(0.005));
      CHECK(ProbeValue(engine, 64, {.x0 = -1000.0f * x0}) ==
            Approx(std::nearbyint(127 * Silu(low) * low) / 127).epsilon(0.005));
    }
  }
}

TEST_CASE("B21: a large intermediate clamps at the second stage's own scale") {
  const CaseScheme& scheme = CaseSchemeNamed("fp8 static");
  const CaseModel model(ProbeSpec(scheme, 2.0f, 8.0f, 64, 32), scheme, [](CheckpointBuilder& builder) {
    SetInputScales(&builder, [](int, int projection) { return projection == kDown ? 0.5f / 448 : 1.0f / 448; });
  });
  for (const std::string& backend : model.Backends()) {
    CaseEngine engine(model, backend);
    CHECK(ProbeValue(engine, 64, {.x0 = 1.0f}) == Approx(0.5).epsilon(0.005));    // h = 14.1
    CHECK(ProbeValue(engine, 64, {.x0 = -50.0f}) == Approx(0.5).epsilon(0.005));  // x clamps to -1, h = 1.9
  }
}

TEST_CASE("B25: the limit of clamped SwiGLU bounds the gate from above and up on both sides, in every scheme") {
  struct Row {
    float a, b;
    double want;
  };
  const double top = Silu(7.0);
  for (const char* name : {"mxfp4", "mxfp4 W4A4", "fp8", "fp8 static", "fp8 block", "bf16", "int8 W8A8", "int4", "nvfp4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(name);
    const double tolerance = scheme.weight_only() ? 0.01 : scheme.bound < 0.35 ? 0.05 : 0.2;  // FP4 activations have few values
    for (const Row& row : std::vector<Row>{{24.0f, -32.0f, top * -7.0},
                                           {24.0f, 32.0f, top * 7.0},
                                           {4.0f, 32.0f, Silu(4.0) * 7.0},
                                           {-4.0f, 4.0f, Silu(-4.0) * 4.0},
                                           {24.0f, 2.0f, top * 2.0}}) {
      ModelSpec spec = ProbeSpec(scheme, row.a, row.b, 64, 32);
      const CaseModel model(spec, scheme,
                            [](CheckpointBuilder& builder) { PatchConfig(&builder, R"({"swiglu_limit": 7.0})"); });
      for (const std::string& backend : model.Backends()) {
        INFO(name << ", a = " << row.a << ", b = " << row.b << ", " << backend);
        CaseEngine engine(model, backend);
        CHECK(ProbeValue(engine, 64, {}) == Approx(row.want).epsilon(tolerance));
      }
    }
  }
}

namespace {

// A backend that has no clamp and says so; it never runs.
class WithoutClamp : public Backend {
 public:
  std::string Name() const override { return "puppet_without_clamp"; }
  std::string Description() const override { return "refuses clamped activations"; }
  Verdict Check(const MoeDesc& desc, const DeviceInfo&) const override {
    Verdict verdict;
    if (desc.activation.clamped)
      verdict.reasons.push_back({"activation_unsupported", "no clamp: " + Describe(desc.activation)});
    return verdict;
  }
  size_t PreparedBytes(const MoeDesc&) const override { return 0; }
  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc&, const ExpertReader&, WorkerPool&) const override {
    return absl::InternalError("prepared a layer that it cannot run");
  }
};

}  // namespace

TEST_CASE("B25: a backend without the clamp is passed over, or refused by name where it is required") {
  const CaseScheme& scheme = CaseSchemeNamed("bf16");
  const CaseModel model(ProbeSpec(scheme, 24.0f, -32.0f, 64, 32), scheme,
                        [](CheckpointBuilder& builder) { PatchConfig(&builder, R"({"swiglu_limit": 7.0})"); });
  const WithoutClamp puppet;
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &puppet);
  EngineOptions options;
  options.device = ThisDevice();
  Engine automatic(options, backends);
  REQUIRE(automatic.Plan("m", model.path()).ok());
  CHECK(automatic.Status()[0].layers[0].backend != puppet.Name());
  options.policy = *Policy::Parse("require:" + puppet.Name());
  Engine required(options, backends);
  const absl::Status status = required.Plan("m", model.path());
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(Mentions(status, puppet.Name() + ": no clamp: silu, limit 7"));
}

}  // namespace moed
