// The backends on CUDA. Asking them needs no GPU and no CUDA: where the build has none they say so.
#ifndef MOED_KERNELS_CUDA_CUDA_BACKENDS_H_
#define MOED_KERNELS_CUDA_CUDA_BACKENDS_H_

#include <vector>

#include "kernels/moe_kernel.h"

namespace moed::cuda {

// In priority order. They live as long as the process.
std::vector<const Backend*> CudaBackends();

// The process's GPU, opened at the first call; the same result ever after. NOT_FOUND with the reason where there is none, or where
// moed was built without CUDA.
absl::StatusOr<Accelerator*> TheAccelerator();

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_BACKENDS_H_
