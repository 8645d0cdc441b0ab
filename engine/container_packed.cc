// compressed-tensors pack-quantized, 4 and 8 bits: the plain orientation, codes packed along K with an offset of 2^(b-1).
//
//   weight_packed I32 [N, ceil(K b / 32)]   weight_scale [N, G], [N, 1] or [1]   weight_shape {N, K}
//   weight_zero_point I32 [ceil(N b / 32), G], packed along N, same offset   weight_g_idx I32 [K]
//
// A weight_g_idx with -1 anywhere was never set: groups are then contiguous.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/packing.h"

namespace moed {
namespace {

int64_t Words(int64_t codes, int bits) { return (codes * bits + 31) / 32; }

// Rows of scales: one for all of a matrix whose scheme is per tensor.
int64_t ScaleRows(const LinearSource& source) { return GroupCount(source.rows, source.linear().weights.group.rows); }

// weight_shape holds {N, K} as int64 (int32 in some files).
absl::Status CheckStoredShape(const LinearSource& source) {
  std::vector<uint8_t> raw;
  absl::Status status = ReadBytes(source.shape, &raw);
  if (!status.ok()) return AtTensor(source.shape, status);
  int64_t got[2];
  if (source.shape.info->dtype == StDtype::kI64) {
    std::memcpy(got, raw.data(), sizeof(got));
  } else {
    int32_t narrow[2];
    std::memcpy(narrow, raw.data(), sizeof(narrow));
    got[0] = narrow[0];
    got[1] = narrow[1];
  }
  if (got[0] == source.rows && got[1] == source.cols) return absl::OkStatus();
  return TensorError(source.shape, absl::StrCat("says [", got[0], ", ", got[1], "], want [", source.rows, ", ", source.cols,
                                                "] from the config"));
}

class Packed : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    MOED_RETURN_IF_ERROR(CheckInteger(*source));
    const int bits = ElementBits(source->linear().weights.element);
    source->codes = finder.Want(source->module + ".weight_packed");
    source->scales = finder.Want(source->module + ".weight_scale");
    source->shape = finder.Want(source->module + ".weight_shape");
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{source->rows, Words(source->cols, bits)}}));
    MOED_RETURN_IF_ERROR(CheckShape(source->shape, {Shape{2}}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->shape, {StDtype::kI64, StDtype::kI32}));
    MOED_RETURN_IF_ERROR(TakeFloatScales(source));
    MOED_RETURN_IF_ERROR(FindZeros(finder, bits, source));
    return FindGroupIndex(finder, source->module + ".weight_g_idx", source);
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    const int bits = ElementBits(source.linear().weights.element);
    std::vector<uint8_t> raw;
    // Rows without padding are canonical as they are.
    const bool whole = source.cols * bits % 32 == 0;
    absl::Status status = ReadBytes(source.codes, whole ? &out->codes : &raw);
    if (!status.ok()) return AtTensor(source.codes, status);
    if (!whole) UnpackRows(raw, source.rows, source.cols, bits, &out->codes);
    MOED_RETURN_IF_ERROR(CheckStoredShape(source));
    MOED_RETURN_IF_ERROR(ReadZeros(source, bits, &raw, out));
    MOED_RETURN_IF_ERROR(ReadGroupIndex(source, /*unset_means_none=*/true, out));
    return ReadScales(source, out);
  }

 private:
  static absl::Status FindZeros(TensorFinder& finder, int bits, LinearSource* source) {
    const std::string name = source->module + ".weight_zero_point";
    source->zeros = source->linear().weights.zero_points ? finder.Want(name) : finder.Optional(name);
    const int64_t groups = GroupsAlongK(*source), words = Words(ScaleRows(*source), bits);
    std::vector<Shape> shapes = {Shape{words, groups}};
    if (groups == 1) shapes.push_back(Shape{words});
    MOED_RETURN_IF_ERROR(CheckShape(source->zeros, shapes));
    return CheckDtype(source->zeros, {StDtype::kI32, StDtype::kU32});
  }

  static absl::Status ReadZeros(const LinearSource& source, int bits, std::vector<uint8_t>* raw, LinearWeights* out) {
    if (!source.zeros) return absl::OkStatus();
    absl::Status status = ReadBytes(source.zeros, raw);
    if (!status.ok()) return AtTensor(source.zeros, status);
    UnpackZerosByColumn(*raw, GroupsAlongK(source), ScaleRows(source), bits, &out->zero_points);
    if (source.linear().weights.zero_points) return absl::OkStatus();
    status = CheckZerosAre(out->zero_points, GroupsAlongK(source), 1 << (bits - 1));
    out->zero_points.clear();
    return AtTensor(source.zeros, status);
  }
};

}  // namespace

const Container& PackedContainer() {
  static const Packed* const container = new Packed;
  return *container;
}

}  // namespace moed
