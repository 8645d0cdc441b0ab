// Rows of activations between their wire type and float32. Portable; exact to float, round to nearest even from it.
#ifndef MOED_KERNELS_CONVERT_H_
#define MOED_KERNELS_CONVERT_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace moed {

// out[cols] = row `row` of `view`.
void RowToFloat(const TensorView& view, int64_t row, float* out);

// Row `row` of `view` = in[cols].
void RowFromFloat(const float* in, int64_t row, const MutableTensorView& view);

}  // namespace moed

#endif  // MOED_KERNELS_CONVERT_H_
