// FP4 E2M1 matrices, two codes a byte with the even k in the low nibble, as every tool has them; names and scales differ.
//
//   compressed-tensors  weight_packed U8 [N, K/2]   weight_scale    weight_global_scale [1] (divides)
//   ModelOpt, Quark     weight U8 [N, K/2]          weight_scale    weight_scale_2 [] (multiplies)
//   DeepSeek-V4         weight I8 [N, K/2]          scale
//
// NVFP4: scales are F8_E4M3 [N, K/16], positive, with a global scale. MXFP4: E8M0 exponents as U8 or F8_E8M0 [N, K/32],
// without one. Codes may also come as F4 [N, K]: the same bytes.
#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"

namespace moed {
namespace {

class Fp4 : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    MOED_RETURN_IF_ERROR(CheckDeclared(*source));
    const std::string& module = source->module;
    source->codes = finder.Want(module + (finder.Exists(module + ".weight_packed") ? ".weight_packed" : ".weight"));
    const bool short_name = !finder.Exists(module + ".weight_scale") && finder.Exists(module + ".scale");
    source->scales = finder.Want(module + (short_name ? ".scale" : ".weight_scale"));
    const WeightScheme& weights = source->linear().weights;
    const bool logical = source->codes && source->codes.info->dtype == StDtype::kF4;
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kU8, StDtype::kI8, StDtype::kF4}));
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->rows, logical ? source->cols : (source->cols + 1) / 2}}));
    MOED_RETURN_IF_ERROR(weights.scale == ScaleType::kE4m3 ? CheckDtype(source->scales, {StDtype::kF8E4m3})
                                                           : CheckDtype(source->scales, {StDtype::kU8, StDtype::kF8E8m0}));
    MOED_RETURN_IF_ERROR(CheckShape(source->scales, ScaleShapes(*source, weights.group)));
    if (weights.global_scale == GlobalScale::kNone) return absl::OkStatus();
    source->global =
        finder.Want(module + (weights.global_scale == GlobalScale::kDivisor ? ".weight_global_scale" : ".weight_scale_2"));
    MOED_RETURN_IF_ERROR(CheckFloat(source->global));
    return CheckScalar(source->global);
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    absl::Status status = ReadBytes(source.codes, &out->codes);
    if (!status.ok()) return AtTensor(source.codes, status);
    if (source.global) {
      const bool divisor = source.linear().weights.global_scale == GlobalScale::kDivisor;
      const absl::StatusOr<float> global = ReadNumber(source.global, /*zero_allowed=*/!divisor);
      if (!global.ok()) return global.status();
      out->global_scale = *global;
    }
    return ReadScales(source, out);
  }

 private:
  static absl::Status CheckDeclared(const LinearSource& source) {
    const WeightScheme& weights = source.linear().weights;
    if (weights.element == ElementType::kFp6E2m3 || weights.element == ElementType::kFp6E3m2) {
      return absl::InvalidArgumentError(absl::StrCat(source.module, ": is declared as ", ElementName(weights.element),
                                                     ": the bit order of FP6 files is not specified (served: fp4)"));
    }
    const bool known = weights.scale == ScaleType::kE4m3 || weights.scale == ScaleType::kE8m0;
    if (weights.element == ElementType::kFp4E2m1 && known && weights.group.rows == 1 && weights.group.cols > 0)
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(source.module, ": ", ContainerName(source.declared.container),
                                                   " holds FP4 in groups with E4M3 or E8M0 scales, the config declares ",
                                                   Describe(weights)));
  }
};

}  // namespace

const Container& Fp4Container() {
  static const Fp4* const container = new Fp4;
  return *container;
}

}  // namespace moed
