// Unquantized matrices: `weight` [N, K] in F32, BF16 or F16, kept as it is.
#include "engine/container_parts.h"

namespace moed {
namespace {

class Plain : public Container {
 public:
  absl::Status Find(TensorFinder& finder, LinearSource* source) const override {
    source->codes = finder.Want(source->module + ".weight");
    source->declared.linear = LinearScheme{};
    if (!source->codes) return absl::OkStatus();
    MOED_RETURN_IF_ERROR(CheckFloat(source->codes));
    source->declared.linear.weights.element = FloatElementType(source->codes.info->dtype);
    return CheckShape(source->codes, {Shape{source->rows, source->cols}});
  }

  absl::Status Read(const LinearSource& source, LinearWeights* out) const override {
    return AtTensor(source.codes, ReadBytes(source.codes, &out->codes));
  }
};

}  // namespace

const Container& PlainContainer() {
  static const Plain* const container = new Plain;
  return *container;
}

}  // namespace moed
