#include "client/tensor_file.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <span>

#include "absl/strings/str_cat.h"

namespace moed::client {
namespace {

// What the error texts say about a tensor: which option wanted it, its name, its file.
std::string Where(const SafetensorsFile& file, const std::string& option, const std::string& name) {
  return absl::StrCat("tensor \"", name, "\" (", option, ") in ", file.path(), ": ");
}

// A few of the file's names, sorted, so that a typing error is found at a glance.
std::string SomeNames(const SafetensorsFile& file) {
  constexpr size_t kShown = 12;
  std::vector<std::string> names;
  for (const auto& [name, info] : file.tensors()) names.push_back(name);
  std::sort(names.begin(), names.end());
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", names[i]);
  if (names.size() > kShown) absl::StrAppend(&text, ", ... (", names.size(), " tensors)");
  return text.empty() ? "an empty file" : text;
}

std::string DtypesText(std::initializer_list<StDtype> dtypes) {
  std::string text;
  for (StDtype dtype : dtypes) absl::StrAppend(&text, text.empty() ? "" : " or ", StDtypeName(dtype));
  return text;
}

absl::StatusOr<const TensorInfo*> Find(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                       std::initializer_list<StDtype> dtypes, MatrixShape wanted) {
  const TensorInfo* info = file.Find(name);
  if (info == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(file, option, name), "wanted a tensor of that name, got ", SomeNames(file)));
  }
  if (std::find(dtypes.begin(), dtypes.end(), info->dtype) == dtypes.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(file, option, name), "wanted dtype ", DtypesText(dtypes), ", got ", StDtypeName(info->dtype)));
  }
  const auto fits = [](int64_t want, int64_t got) { return want < 0 || want == got; };
  if (info->shape.size() != 2 || !fits(wanted.rows, info->shape[0]) || !fits(wanted.columns, info->shape[1])) {
    const auto number = [](int64_t n) { return n < 0 ? std::string("any") : absl::StrCat(n); };
    return absl::InvalidArgumentError(absl::StrCat(Where(file, option, name), "wanted shape [", number(wanted.rows), ", ",
                                                   number(wanted.columns), "], got ", ShapeText(info->shape)));
  }
  return info;
}

template <typename T>
absl::StatusOr<Matrix<T>> Load(const SafetensorsFile& file, const std::string& option, const std::string& name,
                               StDtype dtype, MatrixShape wanted) {
  const absl::StatusOr<const TensorInfo*> info = Find(file, option, name, {dtype}, wanted);
  if (!info.ok()) return info.status();
  Matrix<T> matrix{.shape = {(*info)->shape[0], (*info)->shape[1]}, .values = std::vector<T>((*info)->bytes / sizeof(T))};
  const std::span<uint8_t> bytes(reinterpret_cast<uint8_t*>(matrix.values.data()), matrix.values.size() * sizeof(T));
  if (absl::Status status = file.Read(**info, 0, bytes); !status.ok()) return status;
  return matrix;
}

}  // namespace

absl::StatusOr<FloatMatrix> LoadFloats(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                       MatrixShape wanted) {
  const absl::StatusOr<const TensorInfo*> info =
      Find(file, option, name, {StDtype::kF32, StDtype::kBf16, StDtype::kF16}, wanted);
  if (!info.ok()) return info.status();
  FloatMatrix matrix;
  matrix.dtype = (*info)->dtype == StDtype::kF32    ? DType::kF32
                 : (*info)->dtype == StDtype::kBf16 ? DType::kBf16
                                                    : DType::kF16;
  matrix.shape = {(*info)->shape[0], (*info)->shape[1]};
  matrix.bytes.resize((*info)->bytes);
  if (absl::Status status = file.Read(**info, 0, matrix.bytes); !status.ok()) return status;
  return matrix;
}

absl::StatusOr<Matrix<int32_t>> LoadI32(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                        MatrixShape wanted) {
  return Load<int32_t>(file, option, name, StDtype::kI32, wanted);
}

absl::StatusOr<Matrix<float>> LoadF32(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                      MatrixShape wanted) {
  return Load<float>(file, option, name, StDtype::kF32, wanted);
}

}  // namespace moed::client
