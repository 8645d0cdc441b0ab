// GPTQ, 4 and 8 bits: everything runs along K first, codes packed along K, zero points along N.
//
//   qweight I32 [ceil(K b / 32), N]   scales [G, N]   qzeros I32 [G, ceil(N b / 32)]   g_idx I32 [K], may be absent
//
// Version 1 stores zero points minus one, version 2 as they are. Symmetric files must hold the constant 2^(b-1): a file
// under the wrong version's tag shows there.
#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/packing.h"

namespace moed {
namespace {

int64_t Words(int64_t codes, int bits) { return (codes * bits + 31) / 32; }

class Gptq : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    MOED_RETURN_IF_ERROR(CheckInteger(*source));
    const int bits = ElementBits(source->linear().weights.element);
    const int64_t groups = GroupsAlongK(*source);
    source->codes = finder.Want(source->module + ".qweight");
    source->scales = finder.Want(source->module + ".scales");
    source->zeros = finder.Want(source->module + ".qzeros");
    MOED_RETURN_IF_ERROR(CheckShape(source->codes, {Shape{Words(source->cols, bits), source->rows}}));
    MOED_RETURN_IF_ERROR(CheckShape(source->scales, {Shape{groups, source->rows}}));
    MOED_RETURN_IF_ERROR(CheckShape(source->zeros, {Shape{groups, Words(source->rows, bits)}}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->codes, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckDtype(source->zeros, {StDtype::kI32, StDtype::kU32}));
    MOED_RETURN_IF_ERROR(CheckFloat(source->scales));
    if (source->scales) source->declared.linear.weights.scale = FloatScaleType(source->scales.info->dtype);
    return FindGroupIndex(finder, source->module + ".g_idx", source);
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    const int bits = ElementBits(source.linear().weights.element);
    std::vector<uint8_t> raw;
    absl::Status status = ReadBytes(source.codes, &raw);
    if (!status.ok()) return AtTensor(source.codes, status);
    UnpackAlongK(raw, source.rows, source.cols, bits, &out->codes);
    MOED_RETURN_IF_ERROR(ReadZeros(source, bits, &raw, out));
    MOED_RETURN_IF_ERROR(ReadGroupIndex(source, /*unset_means_none=*/false, out));
    return ReadTransposedScales(source, out);
  }

 private:
  static absl::Status ReadZeros(const LinearSource& source, int bits, std::vector<uint8_t>* raw, LinearWeights* out) {
    absl::Status status = ReadBytes(source.zeros, raw);
    if (!status.ok()) return AtTensor(source.zeros, status);
    const uint32_t add = source.declared.gptq_v2 ? 0 : GptqV1Offset(bits);
    UnpackZeros(*raw, GroupsAlongK(source), source.rows, bits, add, NibbleOrder::kNatural, &out->zero_points);
    if (source.linear().weights.zero_points) return absl::OkStatus();
    status = CheckZerosAre(out->zero_points, GroupsAlongK(source), 1 << (bits - 1));
    out->zero_points.clear();
    if (status.ok()) return status;
    return TensorError(source.zeros,
                       absl::StrCat(std::string(status.message()), " since the config says sym: true (checkpoint_format ",
                                    source.declared.gptq_v2 ? "gptq_v2" : "gptq", ")"));
  }
};

}  // namespace

const Container& GptqContainer() {
  static const Gptq* const container = new Gptq;
  return *container;
}

}  // namespace moed
