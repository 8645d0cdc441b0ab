// Values at the edge of a type inside and outside the layer, and parts of a file that the layer must not ignore.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/judge.h"

namespace moed::testing {
namespace {

// Experts PC(value, value) whose down projections are all `down`, in `format`.
ModelSpec LargeSpec(ExpertFormat format, float value, float down) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 3, .top_k = 2};
  spec.experts = {.format = format, .group = 32, .scale_divisor = 4};
  const WeightFn probe = PcWeights(64, 32, value, value);
  spec.weights = [=](int e, int p, int64_t n) { return p == kDown ? down : probe(e, p, n); };
  return spec;
}

CaseInput Unit(int64_t rows, DType dtype, const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  CaseInput input = UnitInput(rows, 64);
  input.dtype = dtype;
  for (int64_t row = 0; row < rows; ++row) {
    input.ids.insert(input.ids.end(), ids.begin(), ids.end());
    input.weights.insert(input.weights.end(), weights.begin(), weights.end());
  }
  return input;
}

const ExpertFormat kFormats[] = {ExpertFormat::kF16, ExpertFormat::kBf16, ExpertFormat::kF32, ExpertFormat::kPacked};
const DType kTypes[] = {DType::kF16, DType::kBf16, DType::kF32};

}  // namespace

TEST_CASE("B56: what overflows f16 inside the layer and comes back into range is finite and right, in every type") {
  for (ExpertFormat format : kFormats) {
    const CaseModel large(LargeSpec(format, 300.0f, std::ldexp(1.0f, -10) / 32));
    const CaseModel sums(LargeSpec(format, 200.0f, 2.0f / 32));
    for (const std::string& backend : large.Backends()) {
      CaseEngine large_engine(large, backend), sums_engine(sums, backend);
      for (DType dtype : kTypes) {
        INFO("format " << static_cast<int>(format) << " on " << backend << ", " << DTypeName(dtype));
        // h = 90,000
        for (float y : large_engine.Rows(Unit(3, dtype, {1}, {1.0f}))) REQUIRE(y == Approx(87.89).epsilon(0.005));
        // each expert 80,000, also of one sign and of two
        for (float y : sums_engine.Rows(Unit(3, dtype, {0, 2}, {0.25f, 0.25f})))
          REQUIRE(y == Approx(40000.0).epsilon(0.005));
        for (float y : sums_engine.Rows(Unit(3, dtype, {0, 2}, {1.0f, -0.5f}))) REQUIRE(y == Approx(40000.0).epsilon(0.005));
        for (float y : sums_engine.Rows(Unit(3, dtype, {0, 1, 2}, {9.0f, -9.0f, 0.5f}))) {
          REQUIRE(y == Approx(40000.0).epsilon(0.005));
        }
      }
    }
  }
}

TEST_CASE("B56: a true result above 65,504 is infinity in f16, itself in wider types, and no other row's matter") {
  for (ExpertFormat format : kFormats) {
    const CaseModel model(LargeSpec(format, 200.0f, 2.0f / 32));
    for (const std::string& backend : model.Backends()) {
      CaseEngine engine(model, backend);
      for (DType dtype : kTypes) {
        INFO("format " << static_cast<int>(format) << " on " << backend << ", " << DTypeName(dtype));
        const std::vector<float> quiet = engine.Rows(Unit(5, dtype, {0, 2}, {0.25f, 0.25f}));
        CaseInput loud = Unit(5, dtype, {0, 2}, {0.25f, 0.25f});
        loud.weights[2 * 2] = 1.0f;   // row 2: 100,000
        loud.weights[3 * 2] = -2.0f;  // row 3: -140,000
        const std::vector<float> y = engine.Rows(loud);
        for (int64_t c = 0; c < 64; ++c) {
          for (int64_t row : {0, 1, 4}) REQUIRE(y[row * 64 + c] == quiet[row * 64 + c]);
          if (dtype == DType::kF16) {
            REQUIRE(y[2 * 64 + c] == std::numeric_limits<float>::infinity());
            REQUIRE(y[3 * 64 + c] == -std::numeric_limits<float>::infinity());
          } else {
            // h and y may both be rounded to bf16, each by up to 1 in 256.
            const double epsilon = dtype == DType::kBf16 ? 0.01 : 0.005;
            REQUIRE(y[2 * 64 + c] == Approx(100000.0).epsilon(epsilon));
            REQUIRE(y[3 * 64 + c] == Approx(-140000.0).epsilon(epsilon));
          }
        }
      }
    }
  }
}

TEST_CASE("B57: adapter weights that lie among the experts are refused by name, whatever they are tied to") {
  for (const std::string& name : {std::string("model.layers.0.mlp.experts.0.up_proj.lora_A.weight"),
                                  std::string("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_B.default.weight"),
                                  std::string("model.layers.0.mlp.experts.0.up_proj.base_layer.weight")}) {
    for (const std::string& scheme_name : {std::string("fp8"), std::string("int4"), std::string("bf16")}) {
      const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
      const CaseModel model(SpecOf(scheme, 4, 2, 128, 128), scheme, [&](CheckpointBuilder& builder) {
        builder.AddFloats(name, StDtype::kBf16, {4, 128}, std::vector<float>(4 * 128, 0.01f));
      });
      EngineOptions options;
      options.device = ThisDevice();
      Engine engine(options, LinkedBackends());
      const absl::Status status = engine.Plan("m", model.path());
      INFO(scheme_name << ", " << name << ": " << status.ToString());
      CHECK(status.code() == absl::StatusCode::kInvalidArgument);
      CHECK(std::string(status.message()).find(name) != std::string::npos);
    }
  }
}

}  // namespace moed::testing
