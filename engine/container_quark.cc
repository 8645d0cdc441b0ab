// Quark's two-stage int4: int4 codes of an FP8 matrix, so that two scales multiply.
//
//   weight I32 [N, K/8], packed along K   weight_scale_2 [N], of the codes   weight_scale [], of the FP8 values
//   weight_zero_point_2 I32 [N/8] and weight_zero_point [], all zero where they exist
//
// W = code * weight_scale_2 * weight_scale: canonical scales are weight_scale_2, per channel, and weight_scale is the global
// multiplier. (The transposed group form of Quark's int4 is read with AWQ's, in container_awq.cc.)
#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/packing.h"

namespace moed {
namespace {

class TwoStage : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    WeightScheme& weights = source->declared.linear.weights;
    if (weights.element != ElementType::kInt4 || weights.zero_points || source->cols % 8 != 0) {
      return absl::InvalidArgumentError(absl::StrCat(source->module, ": ", ContainerName(source->declared.container),
                                                     " holds symmetric int4 in words of 8 columns, got ", Describe(weights),
                                                     " of ", source->cols, " columns"));
    }
    const std::string& module = source->module;
    weights.group = {1, 0};
    weights.global_scale = GlobalScale::kMultiplier;
    weights.act_order = false;
    source->codes = finder.Want(module + ".weight");
    source->scales = finder.Want(module + ".weight_scale_2");
    source->global = finder.Want(module + ".weight_scale");
    source->zeros = finder.Optional(module + ".weight_zero_point_2");
    source->first_zeros = finder.Optional(module + ".weight_zero_point");
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->rows, source->cols / 8}}));
    MOED_RETURN_IF_ERROR(TakeFloatScales(source));
    MOED_RETURN_IF_ERROR(CheckFloat(source->global));
    MOED_RETURN_IF_ERROR(CheckScalar(source->global));
    MOED_RETURN_IF_ERROR(CheckScalar(source->first_zeros));
    return CheckShape(source->zeros, {Shape{(source->rows + 7) / 8}, Shape{(source->rows + 7) / 8, 1}, Shape{source->rows}});
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    absl::Status status = ReadBytes(source.codes, &out->codes);
    if (!status.ok()) return AtTensor(source.codes, status);
    ReorderNibbles(source.declared.awq_order ? NibbleOrder::kAwq : NibbleOrder::kNatural, source.declared.twos_complement,
                   out->codes);
    MOED_RETURN_IF_ERROR(CheckAllZero(source.zeros));
    MOED_RETURN_IF_ERROR(CheckAllZero(source.first_zeros));
    const absl::StatusOr<float> global = ReadNumber(source.global, /*zero_allowed=*/true);
    if (!global.ok()) return global.status();
    out->global_scale = *global;
    return ReadScales(source, out);
  }
};

}  // namespace

const Container& TwoStageInt4Container() {
  static const TwoStage* const container = new TwoStage;
  return *container;
}

}  // namespace moed
