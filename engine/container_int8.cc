// Integers one a byte, two's complement: compressed-tensors int-quantized (8 bits, and 4-bit values -8 .. 7), Quark int8,
// and the block form of "blockwise_int8".
//
//   weight I8 [N, K]   weight_scale or weight_scale_inv in any plain shape   weight_zero_point I8, shaped like the scales
//   weight_g_idx I32 [K] where groups are scattered
//
// Symmetric files may hold zero points too; they must then all be zero.
#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/packing.h"

namespace moed {
namespace {

class Int8 : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    MOED_RETURN_IF_ERROR(CheckInteger(*source));
    const std::string& module = source->module;
    source->codes = finder.Want(module + ".weight");
    const bool inverse = !finder.Exists(module + ".weight_scale") && finder.Exists(module + ".weight_scale_inv");
    source->scales = finder.Want(module + (inverse ? ".weight_scale_inv" : ".weight_scale"));
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kI8}));
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->rows, source->cols}}));
    MOED_RETURN_IF_ERROR(TakeFloatScales(source));
    const WeightScheme& weights = source->linear().weights;
    const std::string zeros = module + ".weight_zero_point";
    source->zeros = weights.zero_points ? finder.Want(zeros) : finder.Optional(zeros);
    MOED_RETURN_IF_ERROR(CheckDtype(source->zeros, {StDtype::kI8}));
    MOED_RETURN_IF_ERROR(CheckShape(source->zeros, ScaleShapes(*source, weights.group)));
    return FindGroupIndex(finder, module + ".weight_g_idx", source);
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    absl::Status status;
    if (source.linear().weights.element == ElementType::kInt8) {
      status = ReadBytes(source.codes, &out->codes);
      OffsetInt8(out->codes);
    } else {
      std::vector<uint8_t> raw;
      status = ReadBytes(source.codes, &raw);
      if (status.ok()) status = PackSignedInt4(raw, source.rows, source.cols, &out->codes);
    }
    if (!status.ok()) return AtTensor(source.codes, status);
    MOED_RETURN_IF_ERROR(ReadZeros(source, out));
    MOED_RETURN_IF_ERROR(ReadGroupIndex(source, /*unset_means_none=*/true, out));
    return ReadScales(source, out);
  }

 private:
  static absl::Status ReadZeros(const LinearSource& source, LinearWeights* out) {
    if (!source.linear().weights.zero_points) return CheckAllZero(source.zeros);
    absl::Status status = ReadBytes(source.zeros, &out->zero_points);
    if (!status.ok()) return AtTensor(source.zeros, status);
    const bool nibbles = source.linear().weights.element == ElementType::kInt4;
    for (size_t at = 0; at < out->zero_points.size(); ++at) {
      uint8_t& zero = out->zero_points[at];
      const int stored = static_cast<int8_t>(zero);
      zero = static_cast<uint8_t>(zero + (nibbles ? 8 : 128));
      if (!nibbles || zero <= 0xF) continue;
      return TensorError(source.zeros, absl::StrCat("element ", at, " is ", stored, ", want a 4-bit value in -8 .. 7"));
    }
    return absl::OkStatus();
  }
};

}  // namespace

const Container& Int8Container() {
  static const Int8* const container = new Int8;
  return *container;
}

}  // namespace moed
