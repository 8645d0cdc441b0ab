#include "bench/gpu_cells.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace moed::bench {
namespace {

using Json = nlohmann::json;

constexpr Activation kSwigluOai7{Activation::Kind::kSwigluOai, 1.702f, true, 7.0f};
constexpr Shape kShapes[] = {{"dsv3", 256, 8, 7168, 2048},
                             {"gptoss", 32, 4, 2880, 2880, kSwigluOai7, true},
                             {"mixtral", 8, 2, 4096, 14336},
                             {"qwen3", 128, 8, 2048, 768}};
constexpr const char* kSchemes[] = {"bf16", "fp8_block", "int4_w4a16_g128", "int8_w8a16", "int8_w8a8", "mxfp4_w4a16"};
constexpr int64_t kUsualTokens[] = {1, 8, 32, 128, 512, 2048, 8192};
constexpr double kReachableShare = 0.93;  // of the arithmetic's peak, in limit_ms

std::string ShapeNames() {
  return absl::StrJoin(kShapes, ", ", [](std::string* out, const Shape& shape) { out->append(shape.name); });
}

const Shape* FindShape(const std::string& name) {
  const Shape* shape = std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& one) { return one.name == name; });
  return shape == std::end(kShapes) ? nullptr : shape;
}

WeightScheme Weights(ElementType element, ScaleType scale, GroupShape group) {
  WeightScheme weights;
  weights.element = element;
  weights.scale = scale;
  weights.group = group;
  return weights;
}

ActivationScheme Quantized(ElementType element, GroupShape group) {
  ActivationScheme input;
  input.mode = ActivationMode::kDynamic;
  input.element = element;
  input.group = group;
  return input;
}

// `name` is one of kSchemes.
LinearScheme SchemeOf(const std::string& name, const Shape& shape) {
  constexpr int kGroup = 128;
  if (name == "fp8_block") {
    return {Weights(ElementType::kFp8E4m3, ScaleType::kF32, {kGroup, kGroup}), Quantized(ElementType::kFp8E4m3, {1, kGroup})};
  }
  if (name == "int4_w4a16_g128") return {Weights(ElementType::kInt4, ScaleType::kBf16, {1, kGroup}), {}};
  if (name == "int8_w8a16" && shape.hidden % kGroup == 0 && shape.intermediate % kGroup == 0) {
    return {Weights(ElementType::kInt8, ScaleType::kBf16, {1, kGroup}), {}};
  }
  if (name == "int8_w8a16") return {Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}), {}};
  if (name == "int8_w8a8") return {Weights(ElementType::kInt8, ScaleType::kF32, {1, 0}), Quantized(ElementType::kInt8, {1, 0})};
  if (name == "mxfp4_w4a16") return {Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}), {}};
  return {Weights(ElementType::kBf16, ScaleType::kNone, {}), {}};
}

double MatrixBytes(const WeightScheme& scheme, int64_t rows, int64_t cols) {
  const double codes = static_cast<double>(rows * cols) * ElementBits(scheme.element) / 8;
  return codes +
         static_cast<double>(GroupCount(rows, scheme.group.rows) * GroupCount(cols, scheme.group.cols) * ScaleBytes(scheme.scale));
}

// --- the file ---

absl::Status Wrong(const std::string& where, const char* key, const std::string& wanted, const Json& object) {
  const auto at = object.find(key);
  return absl::InvalidArgumentError(
      absl::StrCat(where, key, ": wanted ", wanted, ", got ",
                   at == object.end() ? "nothing" : at->dump(-1, ' ', false, Json::error_handler_t::replace)));
}

// Members of one object, in turn until one is wrong.
class MemberReader {
 public:
  MemberReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  void Name(const char* key, std::string* out) {
    if (!status_.ok()) return;
    const auto at = object_.find(key);
    if (at == object_.end() || !at->is_string() || at->get_ref<const std::string&>().empty()) {
      status_ = Wrong(where_, key, "a name", object_);
    } else {
      *out = at->get<std::string>();
    }
  }

  void Positive(const char* key, double* out) {
    if (!status_.ok()) return;
    const auto at = object_.find(key);
    if (at == object_.end() || !at->is_number() || !(at->get<double>() > 0) || !std::isfinite(at->get<double>())) {
      status_ = Wrong(where_, key, "a number above 0", object_);
    } else {
      *out = at->get<double>();
    }
  }

  template <typename Integer>
  void Count(const char* key, int64_t most, Integer* out) {
    if (!status_.ok()) return;
    const auto at = object_.find(key);
    if (at == object_.end() || !at->is_number_integer() || *at < 1 || *at > most) {
      status_ = Wrong(where_, key, absl::StrCat("an integer from 1 to ", most), object_);
    } else {
      *out = at->get<Integer>();
    }
  }

  const absl::Status& status() const { return status_; }

 private:
  const Json& object_;
  const std::string where_;
  absl::Status status_;
};

absl::Status ReadCell(const Json& object, size_t place, GpuCell* cell) {
  const std::string where = absl::StrCat("cell ", place, ": ");
  if (!object.is_object()) return absl::InvalidArgumentError(absl::StrCat(where, "wanted an object, got a ", object.type_name()));
  constexpr int64_t kMostTurns = 1024;
  MemberReader reader(object, where);
  reader.Name("shape", &cell->shape);
  reader.Name("scheme", &cell->scheme);
  reader.Count("tokens", kMaxTokens, &cell->tokens);
  reader.Positive("flops", &cell->flops);
  reader.Name("best_peer", &cell->peer);
  reader.Positive("best_peer_ms", &cell->peer_ms);
  reader.Positive("limit_ms", &cell->limit_ms);
  reader.Positive("goal_ms", &cell->goal_ms.emplace());
  reader.Count("rotations", kMostTurns, &cell->rotations);
  reader.Count("weight_sets", kMostTurns, &cell->weight_sets);
  if (!reader.status().ok()) return reader.status();
  const absl::Status known = GpuDescOf(cell->shape, cell->scheme).status();
  return known.ok() ? known : absl::InvalidArgumentError(absl::StrCat(where, known.message()));
}

// --- the usual cells ---

// Experts that `tokens` rows of `top_k` different experts touch, on average.
double TouchedExperts(const MoeDesc& desc, int64_t tokens) {
  const double untouched = 1.0 - static_cast<double>(desc.top_k) / desc.num_experts;
  return desc.num_experts * (1.0 - std::pow(untouched, static_cast<double>(tokens)));
}

bool QuantizesActivations(const MoeDesc& desc) { return desc.scheme.gate.input.mode != ActivationMode::kNone; }

double PeakOf(const GpuCells& recorded, const MoeDesc& desc) {
  return QuantizesActivations(desc) ? recorded.fp8_tflops : recorded.bf16_tflops;
}

GpuCell UsualCell(const GpuCells& recorded, const Shape& shape, const char* scheme, int64_t tokens) {
  const MoeDesc desc = GpuDescOf(shape.name, scheme).value();
  // An op's weights are used again after so many bytes of others, ten times the cache of an H200; a layer's copies together hold
  // twice that, so that turns of few experts do not meet.
  constexpr double kBetween = 500e6, kHeld = 1200e6;
  constexpr double kMostRotations = 24;
  const double bytes = ExpertBytes(desc), touched = TouchedExperts(desc, tokens) * bytes;
  GpuCell cell;
  cell.shape = shape.name;
  cell.scheme = scheme;
  cell.tokens = tokens;
  cell.flops = 6.0 * static_cast<double>(tokens * desc.top_k) * static_cast<double>(desc.hidden * desc.intermediate);
  cell.limit_ms = std::max(touched / (recorded.read_gbs * 1e6), cell.flops / (PeakOf(recorded, desc) * kReachableShare * 1e9));
  cell.rotations = static_cast<int>(std::min(kMostRotations, std::ceil(kBetween / touched)));
  cell.weight_sets = static_cast<int>(std::ceil(kHeld / (bytes * desc.num_experts)));
  return cell;
}

}  // namespace

std::span<const Shape> GpuShapes() { return kShapes; }
std::span<const char* const> GpuSchemes() { return kSchemes; }

absl::StatusOr<MoeDesc> GpuDescOf(const std::string& shape, const std::string& scheme) {
  const Shape* const found = FindShape(shape);
  if (found == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("shape: wanted one of ", ShapeNames(), ", got \"", shape, "\""));
  }
  if (std::find(std::begin(kSchemes), std::end(kSchemes), scheme) == std::end(kSchemes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scheme: wanted one of ", absl::StrJoin(kSchemes, ", "), ", got \"", scheme, "\""));
  }
  return DescOf(*found, UniformScheme(SchemeOf(scheme, *found)));
}

double ExpertBytes(const MoeDesc& desc) {
  return MatrixBytes(desc.scheme.gate.weights, desc.intermediate, desc.hidden) +
         MatrixBytes(desc.scheme.up.weights, desc.intermediate, desc.hidden) +
         MatrixBytes(desc.scheme.down.weights, desc.hidden, desc.intermediate);
}

absl::StatusOr<GpuCells> ParseGpuCells(const std::string& text) {
  const Json file = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded()) return absl::InvalidArgumentError("wanted a JSON object, got text that is no JSON");
  if (!file.is_object()) return absl::InvalidArgumentError(absl::StrCat("wanted a JSON object, got a ", file.type_name()));
  GpuCells cells;
  MemberReader reader(file, "");
  reader.Positive("read_ceiling_GBs", &cells.read_gbs);
  reader.Positive("bf16_TFLOPS", &cells.bf16_tflops);
  reader.Positive("fp8_TFLOPS", &cells.fp8_tflops);
  if (!reader.status().ok()) return reader.status();
  const auto list = file.find("cells");
  if (list == file.end() || !list->is_array()) return Wrong("", "cells", "a list", file);
  cells.cells.resize(list->size());
  for (size_t place = 0; place < cells.cells.size(); ++place) {
    absl::Status status = ReadCell((*list)[place], place, &cells.cells[place]);
    if (!status.ok()) return status;
  }
  return cells;
}

absl::StatusOr<GpuCells> ReadGpuCells(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat("peers: cannot read ", path));
  absl::StatusOr<GpuCells> cells = ParseGpuCells(text);
  if (cells.ok()) return cells;
  return absl::Status(cells.status().code(), absl::StrCat("peers: ", path, ": ", cells.status().message()));
}

GpuCells UsualGpuCells() {
  GpuCells cells = {4614.0, 794.0, 1462.0, {}};  // docs/performance.md
  for (const Shape& shape : kShapes) {
    for (const char* scheme : kSchemes) {
      for (const int64_t tokens : kUsualTokens) cells.cells.push_back(UsualCell(cells, shape, scheme, tokens));
    }
  }
  return cells;
}

absl::StatusOr<std::vector<GpuCell>> ChooseGpuCells(const GpuCells& cells, const std::vector<std::string>& shapes,
                                                    const std::vector<int64_t>& tokens) {
  for (const std::string& shape : shapes) {
    if (FindShape(shape) == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("shapes: wanted names of ", ShapeNames(), ", got \"", shape, "\""));
    }
  }
  std::vector<GpuCell> chosen;
  for (const GpuCell& cell : cells.cells) {
    const bool shape = shapes.empty() || std::count(shapes.begin(), shapes.end(), cell.shape) > 0;
    if (shape && (tokens.empty() || std::count(tokens.begin(), tokens.end(), cell.tokens) > 0)) chosen.push_back(cell);
  }
  return chosen;
}

bool BoundByArithmetic(const GpuCells& recorded, const GpuCell& cell) {
  const absl::StatusOr<MoeDesc> desc = GpuDescOf(cell.shape, cell.scheme);
  if (!desc.ok()) return false;
  constexpr double kRounding = 1.001;  // files round their times
  return cell.limit_ms <= kRounding * cell.flops / (PeakOf(recorded, *desc) * kReachableShare * 1e9);
}

void Compare(const GpuCells& recorded, const GpuCell& cell, const MeasuredGpu& measured, Row* row) {
  double scale = recorded.read_gbs / measured.read_gbs;
  row->ceiling = "read stream";
  row->ceiling_unit = "GB/s";
  row->ceiling_value = measured.read_gbs;
  if (BoundByArithmetic(recorded, cell)) {
    scale = measured.gemm_tflops ? recorded.bf16_tflops / *measured.gemm_tflops : 1.0;
    row->ceiling = measured.gemm_tflops ? "bf16 GEMM" : "recorded bf16 GEMM";
    row->ceiling_unit = "TFLOPS";
    row->ceiling_value = measured.gemm_tflops.value_or(recorded.bf16_tflops);
  }
  row->bench = "gpu";
  row->shape = cell.shape;
  row->scheme = cell.scheme;
  row->tokens = cell.tokens;
  row->operations = cell.flops;
  row->fraction = scale * cell.limit_ms / row->ms;
  row->peer = cell.peer;
  row->peer_ms = scale * cell.peer_ms;
  if (cell.goal_ms) row->goal_ms = scale * *cell.goal_ms;
}

}  // namespace moed::bench
