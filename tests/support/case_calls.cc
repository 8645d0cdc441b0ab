#include "tests/support/case_calls.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "engine/explain.h"
#include "kernels/backends.h"
#include "kernels/convert.h"

namespace moed::testing {
namespace {

using nlohmann::json;

constexpr float kHiddenRange = 2.0f;         // of the case hidden states
constexpr float kIntermediateRange = 64.0f;  // of h with RC weights, by some margin

std::string Compressed(const std::string& format, const json& weights, const json& activations) {
  json config;
  config["quant_method"] = "compressed-tensors";
  config["format"] = format;
  config["ignore"] = {"lm_head"};
  config["config_groups"]["group_0"] = {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", activations}};
  return config.dump();
}

json Numbers(const std::string& type, int bits, const std::string& strategy, int group = 0) {
  json numbers = {{"type", type}, {"num_bits", bits}, {"symmetric", true}, {"strategy", strategy}, {"dynamic", false}};
  if (group > 0) numbers["group_size"] = group;
  return numbers;
}

json Dynamic(json numbers) {
  numbers["dynamic"] = true;
  return numbers;
}

std::vector<CaseScheme> MakeSchemes() {
  using Format = ExpertFormat;
  const json token8 = Dynamic(Numbers("int", 8, "token")), token_fp8 = Dynamic(Numbers("float", 8, "token"));
  const json fp4 = Numbers("float", 4, "group", 32), fp8 = Numbers("float", 8, "group", 32);
  const std::string mxfp4 = "mxfp4-pack-quantized";
  return {
      {.name = "bf16", .experts = {.format = Format::kBf16}},
      {.name = "f16", .experts = {.format = Format::kF16}},
      {.name = "f32", .experts = {.format = Format::kF32}},
      {.name = "int4", .experts = {.format = Format::kPacked, .group = 64}},
      {.name = "int4 act-order", .experts = {.format = Format::kGptq, .group = 32, .group_index = GroupIndex::kShuffled}},
      {.name = "int4 zero points",
       .experts = {.format = Format::kAwq, .group = 64},
       .quantization = R"({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm"})"},
      {.name = "int8", .experts = {.format = Format::kPacked, .bits = 8}},
      {.name = "int8 W8A8",
       .experts = {.format = Format::kInt8, .bits = 8},
       .quantization = Compressed("int-quantized", Numbers("int", 8, "channel"), token8),
       .bound = 0.04},
      {.name = "int4 W4A8",
       .experts = {.format = Format::kInt8, .bits = 4, .group = 64},
       .quantization = Compressed("int-quantized", Numbers("int", 4, "group", 64), token8),
       .bound = 0.04},
      {.name = "fp8",
       .experts = {.format = Format::kFp8},
       .quantization = Compressed("float-quantized", Numbers("float", 8, "channel"), token_fp8),
       .bound = 0.10},
      {.name = "fp8 static",
       .experts = {.format = Format::kFp8, .per_tensor = true, .scale_dtype = StDtype::kF32},
       .quantization = R"({"quant_method": "modelopt", "quant_algo": "FP8"})",
       .bound = 0.10,
       .input_levels = 448.0f},
      {.name = "fp8 block",
       .experts = {.format = Format::kFp8, .group = 128, .block_rows = 128, .scale_dtype = StDtype::kF32},
       .quantization = R"({"quant_method": "fp8", "weight_block_size": [128, 128]})",
       .bound = 0.10},
      {.name = "mxfp8",
       .experts = {.format = Format::kMxfp8},
       .quantization = Compressed("mxfp8-quantized", fp8, Dynamic(fp8)),
       .bound = 0.10},
      {.name = "mxfp4", .experts = {.format = Format::kMxfp4Packed}, .quantization = Compressed(mxfp4, fp4, nullptr)},
      {.name = "mxfp4 W4A4",
       .experts = {.format = Format::kMxfp4Packed},
       .quantization = Compressed(mxfp4, fp4, Dynamic(fp4)),
       .bound = 0.35},
      {.name = "nvfp4",
       .experts = {.format = Format::kNvfp4},
       .quantization = R"({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})"},
      {.name = "nvfp4 W4A4",
       .experts = {.format = Format::kNvfp4},
       .quantization = R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})",
       .bound = 0.35,
       .input_levels = 6.0f * 448.0f},
  };
}

EngineOptions Required(EngineOptions options, const std::string& backend) {
  options.threads = 2;
  options.device = ThisDevice();
  options.policy = *Policy::Parse(backend == "auto" ? backend : "require:" + backend);
  return options;
}

bool CanRun(const BackendVerdict& backend) {
  return std::all_of(backend.verdict.reasons.begin(), backend.verdict.reasons.end(),
                     [](const Reason& reason) { return reason.code == "only_by_name"; });
}

// Bytes of `values` as `dtype`, [rows, cols].
std::vector<uint8_t> ToBytes(const std::vector<float>& values, DType dtype, int64_t rows, int64_t cols) {
  std::vector<uint8_t> bytes(values.size() * DTypeBytes(dtype));
  const MutableTensorView view = {bytes.data(), dtype, rows, cols};
  for (int64_t row = 0; row < rows; ++row) RowFromFloat(values.data() + row * cols, row, view);
  return bytes;
}

// out += factor * m in, m [rows, cols].
void AddProduct(const std::vector<float>& m, const std::vector<double>& in, double factor, std::vector<double>* out) {
  for (size_t n = 0; n < out->size(); ++n) {
    const float* row = m.data() + n * in.size();
    double sum = 0.0;
    for (size_t k = 0; k < in.size(); ++k) sum += row[k] * in[k];
    (*out)[n] += factor * sum;
  }
}

template <typename T>
void AppendRow(const std::vector<T>& from, int64_t row, int64_t rows, std::vector<T>* to) {
  const int64_t width = rows == 0 ? 0 : static_cast<int64_t>(from.size()) / rows;
  to->insert(to->end(), from.begin() + row * width, from.begin() + (row + 1) * width);
}

}  // namespace

const std::vector<CaseScheme>& CaseSchemes() {
  static const std::vector<CaseScheme>* const schemes = new std::vector<CaseScheme>(MakeSchemes());
  return *schemes;
}

const CaseScheme& CaseSchemeNamed(const std::string& name) {
  for (const CaseScheme& scheme : CaseSchemes()) {
    if (scheme.name == name) return scheme;
  }
  FAIL("no case scheme " << name);
  std::abort();
}

ModelSpec SpecOf(const CaseScheme& scheme, int experts, int top_k, int64_t hidden, int64_t intermediate) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = hidden, .intermediate = intermediate, .num_experts = experts};
  spec.top_k = top_k;
  spec.experts = scheme.experts;
  spec.quantization = scheme.quantization;
  return spec;
}

CaseModel::CaseModel(const ModelSpec& spec, const CaseScheme& scheme, const Change& change) : top_k_(spec.top_k) {
  CheckpointBuilder builder;
  layers_ = AddModel(spec, &builder);
  if (scheme.input_levels > 0.0f) {
    SetInputScales(&builder, [&](int, int projection) {
      return (projection == kDown ? kIntermediateRange : kHiddenRange) / scheme.input_levels;
    });
  }
  if (change) change(builder);
  REQUIRE(builder.Write(dir_.path()).ok());
}

std::vector<std::string> CaseModel::Backends(ActivationChoice activations) const {
  const absl::StatusOr<ExplainReport> report =
      ExplainCheckpoint(path(), ThisDevice(), LinkedBackends(), Policy(), activations, -1, 8192);
  INFO(report.status().ToString());
  REQUIRE(report.ok());
  std::vector<std::string> names;
  for (const BackendVerdict& backend : report->layers.at(0).backends) {
    const auto runs_layer = [&](const LayerExplanation& layer) {
      return std::any_of(layer.backends.begin(), layer.backends.end(),
                         [&](const BackendVerdict& other) { return other.name == backend.name && CanRun(other); });
    };
    if (std::all_of(report->layers.begin(), report->layers.end(), runs_layer)) names.push_back(backend.name);
  }
  REQUIRE(names.size() >= 2);  // the reference and at least one more
  return names;
}

void SetInputScales(CheckpointBuilder* builder, const std::function<float(int expert, int projection)>& value) {
  const std::pair<std::string, int> projections[] = {{".gate_proj", kGate}, {".up_proj", kUp}, {".down_proj", kDown}};
  std::vector<std::pair<std::string, float>> scales;
  for (const BuilderTensor& tensor : builder->tensors()) {
    const size_t at = tensor.name.find(".experts.");
    if (at == std::string::npos || !tensor.name.ends_with(".weight")) continue;
    const std::string module = tensor.name.substr(0, tensor.name.size() - 7);
    for (const auto& [name, projection] : projections) {
      if (module.ends_with(name)) scales.emplace_back(module, value(std::atoi(tensor.name.c_str() + at + 9), projection));
    }
  }
  REQUIRE(!scales.empty());
  for (const auto& [module, scale] : scales) {
    builder->Remove(module + ".input_scale");
    builder->AddFloats(module + ".input_scale", StDtype::kF32, {}, std::span(&scale, 1));
  }
}

CaseInput CaseInput::Pick(const std::vector<int64_t>& order) const {
  CaseInput picked;
  picked.rows = static_cast<int64_t>(order.size());
  picked.dtype = dtype;
  for (int64_t row : order) {
    AppendRow(x, row, rows, &picked.x);
    AppendRow(ids, row, rows, &picked.ids);
    AppendRow(weights, row, rows, &picked.weights);
    AppendRow(logits, row, rows, &picked.logits);
  }
  return picked;
}

CaseInput CaseInput::Part(int64_t first, int64_t count) const {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), first);
  return Pick(order);
}

CaseInput RoutedInput(int64_t rows, int64_t hidden, int experts, int top_k) {
  CaseInput input{.rows = rows, .x = CaseHidden(rows, hidden)};
  const std::vector<float> logits = CaseLogits(rows, experts);
  for (int64_t row = 0; row < rows; ++row) {
    const float* of_row = logits.data() + row * experts;
    std::vector<int32_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return of_row[a] > of_row[b]; });
    double sum = 0.0;
    for (int slot = 0; slot < top_k; ++slot) sum += std::exp(of_row[order[slot]]);
    for (int slot = 0; slot < top_k; ++slot) {
      input.ids.push_back(order[slot]);
      input.weights.push_back(static_cast<float>(std::exp(of_row[order[slot]]) / sum));
    }
  }
  return input;
}

CaseInput UnitInput(int64_t rows, int64_t hidden) {
  CaseInput input{.rows = rows, .dtype = DType::kF32};
  input.x.assign(static_cast<size_t>(rows * hidden), 0.0f);
  for (int64_t row = 0; row < rows; ++row) input.x[row * hidden] = 1.0f;
  return input;
}

CaseEngine::CaseEngine(const CaseModel& model, const std::string& backend, EngineOptions options)
    : engine_(Required(std::move(options), backend), LinkedBackends()) {
  absl::Status status = engine_.Plan("m", model.path());
  if (status.ok()) status = engine_.Load("m", {});
  INFO(backend << ": " << status.ToString());
  REQUIRE(status.ok());
  const ModelStatus loaded = engine_.Status()[0];
  REQUIRE((backend == "auto" || loaded.layers[0].backend == backend));
  layer_ = loaded.layers[0].layer;
  hidden_ = loaded.hidden;
}

absl::StatusOr<std::vector<float>> CaseEngine::Call(const CaseInput& input, bool routed_only) {
  const std::vector<uint8_t> x = ToBytes(input.x, input.dtype, input.rows, hidden_);
  std::vector<uint8_t> out(x.size());
  ForwardCall call;
  call.layer = layer_;
  call.routed_only = routed_only;
  call.hidden = {x.data(), input.dtype, input.rows, hidden_};
  if (!input.ids.empty()) {
    const int top_k = static_cast<int>(static_cast<int64_t>(input.ids.size()) / input.rows);
    call.routing = RoutingByIds{top_k, input.ids, input.weights};
  } else if (!input.logits.empty()) {
    call.routing = RoutingByLogits{input.logits};
  }
  info_ = ForwardInfo();
  info_.want_routing = true;
  const MutableTensorView view = {out.data(), input.dtype, input.rows, hidden_};
  const absl::Status status = engine_.Forward("m", call, view, &info_);
  if (!status.ok()) return status;
  std::vector<float> y(input.x.size());
  for (int64_t row = 0; row < input.rows; ++row) {
    RowToFloat({out.data(), input.dtype, input.rows, hidden_}, row, y.data() + row * hidden_);
  }
  return y;
}

std::vector<float> CaseEngine::Rows(const CaseInput& input, bool routed_only) {
  absl::StatusOr<std::vector<float>> y = Call(input, routed_only);
  INFO(y.status().ToString());
  REQUIRE(y.ok());
  return *std::move(y);
}

std::vector<float> ExactRows(const LayerReference& layer, const CaseInput& input) {
  const size_t hidden = static_cast<size_t>(layer.hidden), slots = input.ids.size() / static_cast<size_t>(input.rows);
  std::vector<float> all;
  for (size_t row = 0; row < static_cast<size_t>(input.rows); ++row) {
    std::vector<double> x(hidden), y(hidden, 0.0);
    for (size_t c = 0; c < hidden; ++c) x[c] = RoundTo(input.x[row * hidden + c], input.dtype);
    for (size_t slot = row * slots; slot < (row + 1) * slots; ++slot) {
      if (input.ids[slot] < 0) continue;
      const ExpertReference& expert = layer.experts.at(static_cast<size_t>(input.ids[slot]));
      std::vector<double> h(static_cast<size_t>(layer.intermediate), 0.0), up(h);
      AddProduct(expert.gate, x, 1.0, &h);
      AddProduct(expert.up, x, 1.0, &up);
      for (size_t n = 0; n < h.size(); ++n) h[n] = h[n] / (1.0 + std::exp(-h[n])) * up[n];
      AddProduct(expert.down, h, input.weights[slot], &y);
    }
    all.insert(all.end(), y.begin(), y.end());
  }
  return all;
}

float RoundTo(float value, DType dtype) {
  uint32_t bits = 0;
  RowFromFloat(&value, 0, {&bits, dtype, 1, 1});
  float rounded = 0.0f;
  RowToFloat({&bits, dtype, 1, 1}, 0, &rounded);
  return rounded;
}

}  // namespace moed::testing
