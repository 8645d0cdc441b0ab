// Acceptance cases about shapes: widths that are no multiple of a tile, short last groups, and probes that show a border
// between gate and up that padding moved. Every backend that takes the layer on this machine.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

struct Size {
  int64_t hidden;
  int64_t intermediate;
};

// Runs `rows` rows on every backend and holds them to the exact answer.
void CheckLayer(const ModelSpec& spec, const CaseScheme& scheme, int64_t rows) {
  const CaseModel model(spec, scheme);
  const CaseInput input = RoutedInput(rows, spec.hidden, spec.num_experts, spec.top_k);
  const std::vector<float> want = ExactRows(model.layer(), input);
  for (const std::string& backend : model.Backends()) {
    INFO(scheme.name << ", H = " << spec.hidden << ", I = " << spec.intermediate << ", " << backend);
    CaseEngine engine(model, backend);
    CheckWithin(engine.Rows(input), want, spec.hidden, scheme.bound);
  }
}

// silu(a) * b: what a probe layer answers for x = (1, 0, 0, ...).
double Silu(double z) { return z / (1.0 + std::exp(-z)); }

// bf16 output of `rows` rows; fails the test when a byte beyond [rows, hidden] is written.
void CheckNothingBeyond(CaseEngine& engine, int64_t rows, int64_t hidden) {
  constexpr size_t kGuard = 4096;
  const size_t size = static_cast<size_t>(rows * hidden);
  const std::vector<uint16_t> x(size, 0x3F80);
  std::vector<uint16_t> out(size + kGuard, 0xABCD);
  ForwardCall call;
  call.hidden = {x.data(), DType::kBf16, rows, hidden};
  ForwardInfo info;
  REQUIRE(engine.engine().Forward("m", call, {out.data(), DType::kBf16, rows, hidden}, &info).ok());
  CHECK(std::vector<uint16_t>(out.end() - kGuard, out.end()) == std::vector<uint16_t>(kGuard, 0xABCD));
  CHECK(out[size - 1] != 0xABCD);
}

}  // namespace

TEST_CASE("B05: MXFP4 with H = I = 2880 answers with M rows of 2880, and its weights are not padded to 3072") {
  const CaseScheme& scheme = CaseSchemeNamed("mxfp4");
  const CaseModel model(SpecOf(scheme, 4, 4, 2880, 2880), scheme);
  const CaseInput input = RoutedInput(33, 2880, 4, 4);
  const std::vector<int64_t> judged = {0, 3, 32};
  const std::vector<float> want = ExactRows(model.layer(), input.Pick(judged));
  for (const std::string& backend : model.Backends()) {
    if (backend == "reference") continue;  // slow
    INFO(backend);
    CaseEngine engine(model, backend);
    const double held = 4.0 * 3 * 2880 * 2880 * 17 / 32;  // half a byte a weight, one scale for 32
    CHECK(static_cast<double>(engine.engine().Status()[0].layers[0].bytes) == Approx(held).epsilon(0.02));
    CheckWithin(engine.Rows(input.Part(0, 1)), PickRows(want, 2880, {0}), 2880, scheme.bound);
    CheckWithin(PickRows(engine.Rows(input.Part(0, 4)), 2880, {0, 3}), PickRows(want, 2880, {0, 1}), 2880, scheme.bound);
    CheckWithin(PickRows(engine.Rows(input), 2880, judged), want, 2880, scheme.bound);
    CheckNothingBeyond(engine, 4, 2880);
  }
}

TEST_CASE("B05: H = 2880 with other widths and other schemes is within the bound") {
  const std::vector<std::pair<std::string, int64_t>> layers = {{"mxfp4", 96}, {"mxfp8", 160},     {"nvfp4", 144},
                                                               {"int4", 200}, {"fp8 block", 320}, {"bf16", 90}};
  for (const auto& [name, intermediate] : layers) {
    const CaseScheme& scheme = CaseSchemeNamed(name);
    CheckLayer(SpecOf(scheme, 2, 2, 2880, intermediate), scheme, 5);
  }
}

TEST_CASE("B02a, B06: int4 layers whose last group is short run within the bound, and so do those of g = 32") {
  for (const Size& size : {Size{512, 192}, Size{512, 448}, Size{512, 320}, Size{512, 640}, Size{328, 176}, Size{40, 24}}) {
    for (int group : {128, 32, 64}) {
      for (ExpertFormat format : {ExpertFormat::kGptq, ExpertFormat::kPacked}) {
        const CaseScheme scheme = {.name = "int4 g" + std::to_string(group),
                                   .experts = {.format = format, .group = group, .vary_groups = true}};
        CheckLayer(SpecOf(scheme, 4, 2, size.hidden, size.intermediate), scheme, 5);
      }
    }
  }
}

TEST_CASE("B06: zero points and int8 keep their short last group, too") {
  for (const Size& size : {Size{512, 192}, Size{192, 448}}) {
    for (int bits : {4, 8}) {
      CaseScheme scheme = {.name = "packed with zero points",
                           .experts = {.format = ExpertFormat::kPacked, .bits = bits, .group = 128, .asymmetric = true}};
      ModelSpec spec = SpecOf(scheme, 4, 2, size.hidden, size.intermediate);
      const CaseModel model(spec, scheme, [](CheckpointBuilder& builder) {
        PatchConfig(&builder, R"({"quantization_config": {"config_groups": {"group_0": {"weights": {"symmetric": false}}}}})");
      });
      const CaseInput input = RoutedInput(5, size.hidden, 4, 2);
      for (const std::string& backend : model.Backends()) {
        INFO(bits << " bits, I = " << size.intermediate << ", " << backend);
        CaseEngine engine(model, backend);
        CheckWithin(engine.Rows(input), ExactRows(model.layer(), input), size.hidden, scheme.bound);
      }
    }
  }
}

TEST_CASE("B08: padding of an unaligned width does not move the border between gate and up") {
  struct Row {
    const char* scheme;
    double tolerance;
    std::vector<int64_t> widths;
  };
  const std::vector<int64_t> any = {176, 704, 1, 7, 177, 701}, words = {176, 704, 8, 200}, blocks = {176, 704, 16, 208};
  for (const Row& row : std::vector<Row>{{"bf16", 0.005, any},
                                         {"int4", 0.005, words},
                                         {"int8", 0.005, words},
                                         {"int8 W8A8", 0.05, any},
                                         {"fp8", 0.05, any},
                                         {"fp8 static", 0.05, any},
                                         {"nvfp4", 0.005, blocks},
                                         {"nvfp4 W4A4", 0.05, blocks}}) {
    const CaseScheme& scheme = CaseSchemeNamed(row.scheme);
    for (int64_t width : row.widths) {
      const CaseModel model(ProbeSpec(scheme, 1.0f, 2.0f, 64, width), scheme);
      for (const std::string& backend : model.Backends()) {
        INFO(row.scheme << ", I = " << width << ", " << backend);
        CaseEngine engine(model, backend);
        CHECK(ProbeValue(engine, 64, {}) == Approx(2.0 * Silu(1.0)).epsilon(row.tolerance));  // 1.46212
      }
    }
  }
}

TEST_CASE("B08: without quantized activations FP8 and int8 weights answer within half a percent") {
  EngineOptions weights_only;
  weights_only.activations = ActivationChoice::kNone;
  for (const char* name : {"fp8", "fp8 static", "int8 W8A8", "nvfp4 W4A4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(name);
    for (int64_t width : {176, 704}) {
      const CaseModel model(ProbeSpec(scheme, 1.0f, 2.0f, 64, width), scheme);
      CaseEngine engine(model, "auto", weights_only);
      INFO(name << ", I = " << width);
      CHECK(ProbeValue(engine, 64, {}) == Approx(2.0 * Silu(1.0)).epsilon(0.005));
      CHECK(engine.info().scheme.find("16-bit activations") != std::string::npos);
    }
  }
}

}  // namespace moed
