// Reading hidden states of any type in device code.
#ifndef MOED_KERNELS_CUDA_LOAD_ELEMENT_CUH_
#define MOED_KERNELS_CUDA_LOAD_ELEMENT_CUH_

#include <cstdint>

#include "kernels/number_formats.h"
#include "kernels/tensor.h"

namespace moed::cuda {

// Element `at` of `values`, which is aligned to its type.
__device__ inline float LoadElement(const void* values, DType dtype, int64_t at) {
  if (dtype == DType::kF32) return static_cast<const float*>(values)[at];
  const uint16_t bits = static_cast<const uint16_t*>(values)[at];
  return dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_LOAD_ELEMENT_CUH_
