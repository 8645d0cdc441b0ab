// Tensors by name from a safetensors file, with errors that name the tensor, what was wanted and what was got. No state.
#ifndef MOED_CLIENT_TENSOR_FILE_H_
#define MOED_CLIENT_TENSOR_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "engine/safetensors.h"

namespace moed::client {

// A two-dimensional tensor. `columns` is -1 in a wish for any number of columns.
struct MatrixShape {
  int64_t rows = 0;
  int64_t columns = 0;
};

struct FloatMatrix {  // hidden states or expected outputs, as stored
  DType dtype = DType::kF32;
  MatrixShape shape;
  std::vector<uint8_t> bytes;
};

// The tensor `name`, [rows, columns] of F32, BF16 or F16; a wanted dimension of -1 takes any. `option` names the
// command-line option that asked for it. INVALID_ARGUMENT when it is missing or otherwise; the file's own errors when it
// cannot be read.
absl::StatusOr<FloatMatrix> LoadFloats(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                       MatrixShape wanted);

template <typename T>
struct Matrix {
  MatrixShape shape;
  std::vector<T> values;
};
// The same for a tensor of exactly I32 or F32.
absl::StatusOr<Matrix<int32_t>> LoadI32(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                        MatrixShape wanted);
absl::StatusOr<Matrix<float>> LoadF32(const SafetensorsFile& file, const std::string& option, const std::string& name,
                                      MatrixShape wanted);

}  // namespace moed::client

#endif  // MOED_CLIENT_TENSOR_FILE_H_
