// Finding and reading single tensors: what every container of quantized weights needs before it knows any layout.
//
// A TensorFinder collects the tensors of one layer: a missing one is remembered, so that all are reported together; one that
// contradicts the config is an error at once. It has one user thread. The reading functions are pure and may be called from
// any number of threads. Errors name file and tensor.
#ifndef MOED_ENGINE_TENSOR_FINDER_H_
#define MOED_ENGINE_TENSOR_FINDER_H_

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint.h"
#include "kernels/quant.h"

#define MOED_RETURN_IF_ERROR(expression)             \
  do {                                               \
    absl::Status status_of_step = (expression);      \
    if (!status_of_step.ok()) return status_of_step; \
  } while (false)

namespace moed {

using Shape = std::vector<int64_t>;

class TensorFinder {
 public:
  // `used` gets every tensor that is found; both must outlive the finder.
  TensorFinder(const Checkpoint& checkpoint, std::vector<const TensorInfo*>* used) : checkpoint_(checkpoint), used_(used) {}

  // The tensor `name`, counted as used; empty, and remembered as missing, when it is not there.
  TensorRef Want(const std::string& name);
  // The same without remembering.
  TensorRef Optional(const std::string& name);
  // A look without counting it as used.
  TensorRef Look(const std::string& name) const { return checkpoint_.Find(name); }
  bool Exists(const std::string& name) const { return static_cast<bool>(Look(name)); }

  // The first names that are missing, and how many there are: a config may claim experts without end.
  const std::vector<std::string>& missing() const { return missing_; }
  size_t missing_count() const { return missing_count_; }

 private:
  const Checkpoint& checkpoint_;
  std::vector<const TensorInfo*>* const used_;
  std::vector<std::string> missing_;
  size_t missing_count_ = 0;
};

// The tensor's name in its file: a search, for messages only.
std::string TensorName(const TensorRef& tensor);

// INVALID_ARGUMENT "FILE: TENSOR: text".
absl::Status TensorError(const TensorRef& tensor, const std::string& text);
// The same around another error, whose code is kept; ok stays ok.
absl::Status AtTensor(const TensorRef& tensor, const absl::Status& status);

// The shape must be one of `shapes` (the first is named as wanted), the dtype one of `dtypes`. An absent tensor passes: it
// is reported as missing.
absl::Status CheckShape(const TensorRef& tensor, const std::vector<Shape>& shapes);
absl::Status CheckDtype(const TensorRef& tensor, std::initializer_list<StDtype> dtypes);
// F32, BF16 or F16.
absl::Status CheckFloat(const TensorRef& tensor);
// One element: [] or [1].
absl::Status CheckScalar(const TensorRef& tensor);

// The scale type or unquantized element type that stores the same bits; `dtype` must be F32, BF16 or F16.
ScaleType FloatScaleType(StDtype dtype);
ElementType FloatElementType(StDtype dtype);
bool IsFloat(StDtype dtype);

// Reads all bytes of a tensor; the buffer's capacity is reused. DATA_LOSS when the file ends early.
absl::Status ReadBytes(const TensorRef& tensor, std::vector<uint8_t>* out);

// One element of a floating-point tensor (F32, BF16 or F16) as float32.
float ElementAsFloat(StDtype dtype, const uint8_t* bytes);

// Reads a whole floating-point tensor (F32, BF16 or F16) as float32. INVALID_ARGUMENT for other dtypes.
absl::Status ReadFloats(const TensorRef& tensor, std::vector<float>* out);

}  // namespace moed

#endif  // MOED_ENGINE_TENSOR_FINDER_H_
