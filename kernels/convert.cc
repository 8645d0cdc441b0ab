#include "kernels/convert.h"

#include <cstring>

#include "kernels/number_formats.h"

namespace moed {

void RowToFloat(const TensorView& view, int64_t row, float* out) {
  const void* source = view.row(row);
  if (view.dtype == DType::kF32) {
    std::memcpy(out, source, view.row_bytes());
    return;
  }
  const char* bytes = static_cast<const char*>(source);
  for (int64_t c = 0; c < view.cols; ++c) {
    uint16_t bits;  // rows of a received message may start at an odd address
    std::memcpy(&bits, bytes + 2 * c, 2);
    out[c] = view.dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
  }
}

void RowFromFloat(const float* in, int64_t row, const MutableTensorView& view) {
  void* target = view.row(row);
  if (view.dtype == DType::kF32) {
    std::memcpy(target, in, view.row_bytes());
    return;
  }
  char* bytes = static_cast<char*>(target);
  for (int64_t c = 0; c < view.cols; ++c) {
    const uint16_t bits = view.dtype == DType::kBf16 ? FloatToBf16(in[c]) : FloatToF16(in[c]);
    std::memcpy(bytes + 2 * c, &bits, 2);
  }
}

}  // namespace moed
