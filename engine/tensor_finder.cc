#include "engine/tensor_finder.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/number_formats.h"

namespace moed {
namespace {

constexpr size_t kMissingNamesKept = 10;

}  // namespace

TensorRef TensorFinder::Want(const std::string& name) {
  const TensorRef tensor = Optional(name);
  if (!tensor && ++missing_count_ <= kMissingNamesKept) missing_.push_back(name);
  return tensor;
}

TensorRef TensorFinder::Optional(const std::string& name) {
  const TensorRef tensor = checkpoint_.Find(name);
  if (tensor) used_->push_back(tensor.info);
  return tensor;
}

std::string TensorName(const TensorRef& tensor) {
  for (const auto& [name, info] : tensor.file->tensors()) {
    if (&info == tensor.info) return name;
  }
  return "?";
}

absl::Status TensorError(const TensorRef& tensor, const std::string& text) {
  return absl::InvalidArgumentError(absl::StrCat(tensor.file->path(), ": ", TensorName(tensor), ": ", text));
}

absl::Status AtTensor(const TensorRef& tensor, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(tensor.file->path(), ": ", TensorName(tensor), ": ",
                                                  std::string(status.message().data(), status.message().size())));
}

absl::Status CheckShape(const TensorRef& tensor, const std::vector<Shape>& shapes) {
  if (!tensor || std::find(shapes.begin(), shapes.end(), tensor.info->shape) != shapes.end()) return absl::OkStatus();
  return TensorError(tensor, absl::StrCat("shape is ", ShapeText(tensor.info->shape), ", want ", ShapeText(shapes.front())));
}

absl::Status CheckDtype(const TensorRef& tensor, std::initializer_list<StDtype> dtypes) {
  if (!tensor || std::find(dtypes.begin(), dtypes.end(), tensor.info->dtype) != dtypes.end()) return absl::OkStatus();
  std::string wanted;
  for (StDtype dtype : dtypes) absl::StrAppend(&wanted, wanted.empty() ? "" : " or ", StDtypeName(dtype));
  return TensorError(tensor, absl::StrCat("dtype is ", StDtypeName(tensor.info->dtype), ", want ", wanted));
}

absl::Status CheckFloat(const TensorRef& tensor) {
  return CheckDtype(tensor, {StDtype::kF16, StDtype::kBf16, StDtype::kF32});
}

absl::Status CheckScalar(const TensorRef& tensor) { return CheckShape(tensor, {Shape{1}, Shape{}}); }

bool IsFloat(StDtype dtype) { return dtype == StDtype::kF16 || dtype == StDtype::kBf16 || dtype == StDtype::kF32; }

ScaleType FloatScaleType(StDtype dtype) {
  if (dtype == StDtype::kF16) return ScaleType::kF16;
  return dtype == StDtype::kBf16 ? ScaleType::kBf16 : ScaleType::kF32;
}

ElementType FloatElementType(StDtype dtype) {
  if (dtype == StDtype::kF16) return ElementType::kF16;
  return dtype == StDtype::kBf16 ? ElementType::kBf16 : ElementType::kF32;
}

absl::Status ReadBytes(const TensorRef& tensor, std::vector<uint8_t>* out) {
  out->resize(tensor.info->bytes);
  return tensor.file->Read(*tensor.info, 0, *out);
}

float ElementAsFloat(StDtype dtype, const uint8_t* bytes) {
  uint16_t half;
  float single;
  if (dtype == StDtype::kF32) {
    std::memcpy(&single, bytes, 4);
    return single;
  }
  std::memcpy(&half, bytes, 2);
  return dtype == StDtype::kBf16 ? Bf16ToFloat(half) : F16ToFloat(half);
}

absl::Status ReadFloats(const TensorRef& tensor, std::vector<float>* out) {
  MOED_RETURN_IF_ERROR(CheckFloat(tensor));
  std::vector<uint8_t> raw;
  MOED_RETURN_IF_ERROR(ReadBytes(tensor, &raw));
  const size_t bytes = static_cast<size_t>(StDtypeBits(tensor.info->dtype)) / 8;
  out->resize(raw.size() / bytes);
  for (size_t at = 0; at < out->size(); ++at) (*out)[at] = ElementAsFloat(tensor.info->dtype, raw.data() + at * bytes);
  return absl::OkStatus();
}

}  // namespace moed
