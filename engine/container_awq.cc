// Int4 packed along N: AWQ (gemm) and Quark's group form, which differ in names, nibble order and signs.
//
//   AWQ    qweight I32 [K, N/8]   scales [G, N]         qzeros I32 [G, N/8]              order 0 2 4 6 1 3 5 7, unsigned
//   Quark  weight I32 [K, N/8]    weight_scale [G, N]   weight_zero_point I32 [G, N/8]   either order, signed or not
//
// A symmetric file may hold zero points too; they must then all stand for zero.
#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/packing.h"

namespace moed {
namespace {

struct Names {
  const char* codes;
  const char* scales;
  const char* zeros;
};

class AlongN : public Container {
 public:
  explicit AlongN(const Names& names) : names_(names) {}

  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    WeightScheme& weights = source->declared.linear.weights;
    if (weights.element != ElementType::kInt4 || source->rows % 8 != 0) {
      return absl::InvalidArgumentError(absl::StrCat(source->module, ": ", ContainerName(source->declared.container),
                                                     " holds int4 in words of 8 rows, got ", Describe(weights), " of ",
                                                     source->rows, " rows"));
    }
    weights.act_order = false;
    // An unsigned code without a zero point of its own is what its nibble says: a zero point of 0.
    const bool is_unsigned =
        source->declared.container == DeclaredScheme::Container::kTransposedInt4 && !source->declared.twos_complement;
    if (is_unsigned) weights.zero_points = true;
    const int64_t groups = GroupsAlongK(*source);
    source->codes = finder.Want(source->module + names_.codes);
    source->scales = finder.Want(source->module + names_.scales);
    source->zeros =
        weights.zero_points ? finder.Want(source->module + names_.zeros) : finder.Optional(source->module + names_.zeros);
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->cols, source->rows / 8}}));
    MOED_RETURN_IF_ERROR(CheckShape(source->scales, {Shape{groups, source->rows}}));
    MOED_RETURN_IF_ERROR(CheckShape(source->zeros, {Shape{groups, source->rows / 8}}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->zeros, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckFloat(source->scales));
    if (source->scales) weights.scale = FloatScaleType(source->scales.info->dtype);
    return absl::OkStatus();
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    const bool flip = Signed(source);
    std::vector<uint8_t> raw;
    absl::Status status = ReadBytes(source.codes, &raw);
    if (!status.ok()) return AtTensor(source.codes, status);
    UnpackAlongN(raw, source.rows, source.cols, Order(source), flip, &out->codes);
    MOED_RETURN_IF_ERROR(ReadZeros(source, flip, &raw, out));
    return ReadTransposedScales(source, out);
  }

 private:
  static NibbleOrder Order(const LinearSource& source) {
    const bool awq = source.declared.container == DeclaredScheme::Container::kAwq || source.declared.awq_order;
    return awq ? NibbleOrder::kAwq : NibbleOrder::kNatural;
  }
  static bool Signed(const LinearSource& source) {
    return source.declared.container == DeclaredScheme::Container::kTransposedInt4 && source.declared.twos_complement;
  }

  static absl::Status ReadZeros(const LinearSource& source, bool flip, std::vector<uint8_t>* raw, LinearWeights* out) {
    if (!source.zeros) return absl::OkStatus();
    absl::Status status = ReadBytes(source.zeros, raw);
    if (!status.ok()) return AtTensor(source.zeros, status);
    const int64_t groups = GroupsAlongK(source);
    UnpackZeros(*raw, groups, source.rows, 4, 0, Order(source), &out->zero_points);
    if (!source.linear().weights.zero_points) {
      status = CheckZerosAre(out->zero_points, groups, flip ? 0 : 8);
      out->zero_points.clear();
      return AtTensor(source.zeros, status);
    }
    if (flip) {
      for (uint8_t& zero : out->zero_points) zero ^= 8;
    }
    return absl::OkStatus();
  }

  const Names names_;
};

}  // namespace

const Container& AwqContainer() {
  static const AlongN* const container = new AlongN({".qweight", ".scales", ".qzeros"});
  return *container;
}

const Container& TransposedInt4Container() {
  static const AlongN* const container = new AlongN({".weight", ".weight_scale", ".weight_zero_point"});
  return *container;
}

}  // namespace moed
