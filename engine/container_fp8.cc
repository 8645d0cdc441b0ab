// FP8 E4M3 matrices with scales of every granularity; all scales multiply, whatever their name.
//
//   weight F8_E4M3 [N, K]   weight_scale, weight_scale_inv or scale:
//     F32, BF16 or F16: per tensor, per channel, groups, or blocks [ceil(N/r), ceil(K/c)] whose last ones may be partial
//     F8_E8M0: the same, powers of two;  U8 [N, K/32]: the powers of two of MXFP8, only where those are declared
//
// transformers can save the scales of all experts in one tensor beside weights per expert: experts.gate_up_proj_scale_inv
// [E, ceil(2I/r), ceil(K/c)] (or _scales_inv), gate's rows before up's, and experts.down_proj_scale_inv. When I is no
// multiple of r a row of scales covers rows of both, so that both then get blocks of gcd(I, r) rows.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"

namespace moed {
namespace {

// Where the scales of `module` are when one tensor holds those of all experts.
struct FusedPlace {
  std::string name;  // without suffix: "....experts.gate_up_proj"; empty when the module is no expert's
  int64_t expert = 0;
  bool down = false;
  bool up = false;
};

FusedPlace PlaceOf(const std::string& module) {
  const size_t projection = module.rfind('.');
  if (projection == std::string::npos || projection == 0) return {};
  const size_t number = module.rfind('.', projection - 1);
  if (number == std::string::npos || projection - number < 2 || projection - number > 8) return {};
  FusedPlace place;
  for (size_t at = number + 1; at < projection; ++at) {
    if (module[at] < '0' || module[at] > '9') return {};
    place.expert = place.expert * 10 + (module[at] - '0');
  }
  const std::string last = module.substr(projection + 1);
  place.down = last == "down_proj" || last == "w2";
  place.up = last == "up_proj" || last == "w3";
  if (!place.down && !place.up && last != "gate_proj" && last != "w1") return {};
  place.name = module.substr(0, number + 1) + (place.down ? "down_proj" : "gate_up_proj");
  return place;
}

class Fp8 : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    if (source->linear().weights.element != ElementType::kFp8E4m3) {
      return absl::InvalidArgumentError(absl::StrCat(source->module, ": ", ContainerName(source->declared.container),
                                                     " holds FP8 E4M3, the config declares ",
                                                     Describe(source->linear().weights)));
    }
    source->codes = finder.Want(source->module + ".weight");
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kF8E4m3}));
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->rows, source->cols}}));
    MOED_RETURN_IF_ERROR(FindScales(finder, source));
    return source->scale_slice >= 0 ? TakeFusedScales(source) : TakeScales(source);
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    absl::Status status = ReadBytes(source.codes, &out->codes);
    if (status.ok()) status = CheckFp8Codes(out->codes);
    if (!status.ok()) return AtTensor(source.codes, status);
    return source.scale_slice >= 0 ? ReadFusedScales(source, out) : ReadScales(source, out);
  }

 private:
  static absl::Status FindScales(TensorFinder& finder, LinearSource* source) {
    std::vector<std::string> found;
    for (const char* suffix : {".weight_scale_inv", ".weight_scale", ".scale"}) {
      if (finder.Exists(source->module + suffix)) found.push_back(source->module + suffix);
    }
    if (found.size() > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(source->module, ": has ", found[0], " and ", found[1], ", want one scale tensor"));
    }
    if (found.empty()) {
      const FusedPlace place = PlaceOf(source->module);
      for (const char* suffix : {"_scale_inv", "_scales_inv"}) {
        if (place.name.empty() || !finder.Exists(place.name + suffix)) continue;
        source->scales = finder.Want(place.name + suffix);
        source->scale_slice = place.expert;
        source->scale_first_row = place.up ? source->rows : 0;
        source->scale_block_rows = source->linear().weights.group.rows;
        return absl::OkStatus();
      }
      const bool block = source->linear().weights.group.rows > 1;
      found.push_back(source->module + (block ? ".weight_scale_inv" : ".weight_scale"));
    }
    source->scales = finder.Want(found.front());
    return absl::OkStatus();
  }

  static absl::Status TakeScales(LinearSource* source) {
    if (!source->scales) return absl::OkStatus();
    WeightScheme& weights = source->declared.linear.weights;
    const StDtype dtype = source->scales.info->dtype;
    if (weights.scale != ScaleType::kE8m0 && dtype != StDtype::kF8E8m0) return TakeFloatScales(source);
    MOED_RETURN_IF_ERROR(CheckDtype(source->scales, {StDtype::kU8, StDtype::kF8E8m0}));
    weights.scale = ScaleType::kE8m0;
    return CheckShape(source->scales, ScaleShapes(*source, weights.group));
  }

  static absl::Status TakeFusedScales(LinearSource* source) {
    WeightScheme& weights = source->declared.linear.weights;
    const TensorRef& scales = source->scales;
    if (weights.group.rows <= 0 || weights.group.cols <= 0) {
      return TensorError(scales, absl::StrCat("holds block scales of all experts, the config declares ", Describe(weights)));
    }
    const bool down = PlaceOf(source->module).down;
    const int64_t fused_rows = GroupCount(down ? source->rows : 2 * source->rows, weights.group.rows);
    const Shape& shape = scales.info->shape;
    const int64_t experts = shape.empty() ? 0 : shape[0];
    MOED_RETURN_IF_ERROR(
        CheckShape(scales, {Shape{std::max(experts, source->scale_slice + 1), fused_rows, GroupsAlongK(*source)}}));
    MOED_RETURN_IF_ERROR(CheckFloat(scales));
    weights.scale = FloatScaleType(scales.info->dtype);
    if (!down && source->rows % weights.group.rows != 0) {
      weights.group.rows = static_cast<int32_t>(std::gcd<int64_t>(source->rows, weights.group.rows));
    }
    return absl::OkStatus();
  }

  // Rows of the expert's own scales out of those of the fused matrix.
  static absl::Status ReadFusedScales(const LinearSource& source, LinearWeights* out) {
    const TensorInfo& info = *source.scales.info;
    const WeightScheme& weights = source.linear().weights;
    const int64_t fused_rows = info.shape[1];
    const size_t row_bytes = static_cast<size_t>(info.shape[2]) * ScaleBytes(weights.scale);
    std::vector<uint8_t> raw(static_cast<size_t>(fused_rows) * row_bytes);
    absl::Status status = source.scales.file->Read(info, static_cast<uint64_t>(source.scale_slice) * raw.size(), raw);
    if (status.ok()) status = CheckScaleValues(weights.scale, raw);
    if (!status.ok()) return AtTensor(source.scales, status);
    const int64_t rows = GroupCount(source.rows, weights.group.rows);
    // Rows of weights that a row of the file covers: what was declared, before it was cut to a common divisor.
    const int64_t stored = source.scale_block_rows;
    out->scales.resize(static_cast<size_t>(rows) * row_bytes);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = (source.scale_first_row + row * weights.group.rows) / stored;
      std::memcpy(out->scales.data() + row * row_bytes, raw.data() + from * row_bytes, row_bytes);
    }
    return absl::OkStatus();
  }
};

}  // namespace

const Container& Fp8Container() {
  static const Fp8* const container = new Fp8;
  return *container;
}

}  // namespace moed
