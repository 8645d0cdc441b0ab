// Acceptance case about models of mixed precision: which layers are quantized, that a container's name frees no expert, and
// that the router keeps the precision it is stored in.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

constexpr int kExperts = 12;
constexpr int kTopK = 4;
constexpr int64_t kHidden = 256, kIntermediate = 128, kTokens = 256;

const std::vector<std::string> kLayer1AndContainer = {"re:.*layers\\.1\\..*", "model.layers.0.mlp.experts.1"};

// Three layers: int4 g = 64, but for layer 1.
ModelSpec ThreeLayers(const std::vector<std::string>& ignore, StDtype router) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe,
                 .num_layers = 3,
                 .hidden = kHidden,
                 .intermediate = kIntermediate,
                 .num_experts = kExperts};
  spec.top_k = kTopK;
  spec.experts = {.format = ExpertFormat::kPacked, .group = 64};
  spec.layer_experts = {spec.experts, ExpertSpec{}, spec.experts};
  spec.quantization = PackedConfigText(spec.experts, ignore);
  spec.router_dtype = router;
  return spec;
}

// The k experts of each row by logits in double; a row whose cut is closer than float32 can tell has none.
std::vector<std::vector<int32_t>> RoutedExperts(const LayerReference& layer, const std::vector<float>& x) {
  std::vector<std::vector<int32_t>> all;
  for (int64_t row = 0; row < kTokens; ++row) {
    std::vector<std::pair<double, int32_t>> logits;
    for (int32_t expert = 0; expert < kExperts; ++expert) {
      double sum = 0.0;
      for (int64_t h = 0; h < kHidden; ++h) {
        sum += static_cast<double>(layer.router[static_cast<size_t>(expert * kHidden + h)]) *
               x[static_cast<size_t>(row * kHidden + h)];
      }
      logits.emplace_back(-sum, expert);
    }
    std::sort(logits.begin(), logits.end());
    std::vector<int32_t> ids;
    for (int slot = 0; slot < kTopK; ++slot) ids.push_back(logits[static_cast<size_t>(slot)].second);
    std::sort(ids.begin(), ids.end());
    if (logits[kTopK].first - logits[kTopK - 1].first < 1e-5) ids.clear();
    all.push_back(ids);
  }
  return all;
}

}  // namespace

TEST_CASE("B33: an ignored layer is bf16, and the container name of expert 1 frees neither it nor experts 10 and 11") {
  const CaseModel model(ThreeLayers(kLayer1AndContainer, StDtype::kBf16));
  const LoadResult result = TryLoad(model.path());
  INFO(result.status.ToString());
  REQUIRE(result.status.ok());
  const std::vector<LayerStatus>& layers = result.models.at(0).layers;
  REQUIRE(layers.size() == 3);
  CHECK(layers[0].executed_scheme.find("int4 g64") == 0);
  CHECK(layers[1].executed_scheme.find("bf16") == 0);
  CHECK(layers[2].executed_scheme == layers[0].executed_scheme);
  const double weights = 3.0 * kExperts * kHidden * kIntermediate;
  CHECK(static_cast<double>(layers[0].bytes) == Approx(weights * (0.5 + 2.0 / 64)).epsilon(0.10));  // codes, bf16 scales
  CHECK(static_cast<double>(layers[1].bytes) == Approx(weights * 2).epsilon(0.10));
  CaseInput input = RoutedInput(12, kHidden, kExperts, 2);
  for (int32_t row = 0; row < kExperts; ++row) {
    input.ids[static_cast<size_t>(2 * row)] = row;  // each expert once, 10 and 11 among them
    input.ids[static_cast<size_t>(2 * row + 1)] = 1;
  }
  for (const std::string& backend : model.Backends()) {
    INFO(backend);
    CaseEngine engine(model, backend);
    CheckWithin(engine.Rows(input), ExactRows(model.layer(0), input), kHidden, 0.01);
  }
}

TEST_CASE("B33: names that only contain or begin like an ignored one change nothing") {
  const CaseModel plain(ThreeLayers({"re:.*layers\\.1\\..*"}, StDtype::kBf16));
  const std::vector<LayerStatus> want = TryLoad(plain.path()).models.at(0).layers;
  for (const char* name : {"model.layers.0.mlp.experts.1", "model.layers.0.mlp.experts", "model.layers.0.mlp", "experts",
                           "experts.1", "mlp.gate", "model.layers.0.mlp.experts.1.gate", "proj"}) {
    const CaseModel model(ThreeLayers({"re:.*layers\\.1\\..*", name}, StDtype::kBf16));
    const LoadResult result = TryLoad(model.path());
    INFO(name << ": " << result.status.ToString());
    REQUIRE(result.status.ok());
    for (size_t layer = 0; layer < 3; ++layer) {
      CHECK(result.models.at(0).layers.at(layer).executed_scheme == want[layer].executed_scheme);
      CHECK(result.models[0].layers[layer].bytes == want[layer].bytes);
    }
  }
}

TEST_CASE("B33: the router is read as it is stored, though no list frees it, and picks what float32 picks on 256 tokens") {
  for (StDtype router : {StDtype::kBf16, StDtype::kF16, StDtype::kF32}) {
    const CaseModel model(ThreeLayers(kLayer1AndContainer, router));
    CaseInput input{.rows = kTokens, .x = CaseHidden(kTokens, kHidden), .dtype = DType::kF32};
    const std::vector<std::vector<int32_t>> want = RoutedExperts(model.layer(0), input.x);
    CHECK(std::count_if(want.begin(), want.end(), [](const std::vector<int32_t>& ids) { return ids.empty(); }) <= 1);
    for (const char* backend : {"auto", "reference"}) {
      CaseEngine engine(model, backend);
      engine.Rows(input);
      REQUIRE(engine.info().ids.size() == static_cast<size_t>(kTokens * kTopK));
      for (int64_t row = 0; row < kTokens; ++row) {
        std::vector<int32_t> got(engine.info().ids.begin() + row * kTopK, engine.info().ids.begin() + (row + 1) * kTopK);
        std::sort(got.begin(), got.end());
        INFO(backend << ", row " << row);
        if (!want[static_cast<size_t>(row)].empty()) CHECK(got == want[static_cast<size_t>(row)]);
      }
    }
  }
}

namespace {

// A tool's description that frees layer 1 of twelve.
struct OtherTool {
  std::string scheme;  // of CaseSchemes, for the experts
  std::string quantization;
};

const std::vector<OtherTool> kOtherTools = {
    {"nvfp4", R"({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head", "model.layers.1.*",
        "model.layers.0.mlp.experts.1", "model.layers.0.mlp.experts"]})"},
    {"fp8 block", R"({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "model.layers.1", "gate"]})"},
    {"int4 zero points", R"({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm",
        "modules_to_not_convert": ["model.layers.1."]})"},
    {"int4 act-order", R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "desc_act": true,
        "checkpoint_format": "gptq", "dynamic": {"-:.*layers\\.1\\..*": {}}})"},
    {"fp8", R"({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*\\.1\\.mlp.*", "layers.10"],
        "config_groups": {"group_0": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": true, "dynamic": true}}}})"},
};

}  // namespace

TEST_CASE("B33: the lists of other tools free layer 1, neither 10 nor 11, and no expert by its container's name") {
  for (const OtherTool& tool : kOtherTools) {
    const CaseScheme& scheme = CaseSchemeNamed(tool.scheme);
    ModelSpec spec = SpecOf(scheme, kExperts, 2, 128, 64);
    spec.num_layers = 12;
    spec.quantization = tool.quantization;
    spec.layer_experts.assign(12, spec.experts);
    spec.layer_experts[1] = ExpertSpec{};
    const CaseModel model(spec, scheme);
    CaseEngine engine(model, "cpu_generic");
    const std::vector<LayerStatus> layers = engine.engine().Status()[0].layers;
    CaseInput input = RoutedInput(kExperts, 128, kExperts, 2);
    for (int32_t row = 0; row < kExperts; ++row) input.ids[static_cast<size_t>(2 * row)] = row;
    for (int layer : {0, 1, 2, 10, 11}) {
      INFO(tool.scheme << ", layer " << layer << ": " << layers.at(static_cast<size_t>(layer)).executed_scheme);
      CHECK((layers[static_cast<size_t>(layer)].executed_scheme.find("bf16,") == 0) == (layer == 1));
      CHECK((layers[static_cast<size_t>(layer)].executed_scheme == layers[0].executed_scheme) == (layer != 1));
    }
    CheckWithin(engine.Rows(input), ExactRows(model.layer(0), input), 128, scheme.bound);
  }
}

}  // namespace moed
