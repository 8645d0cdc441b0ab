// The product of gemm-inl.cuh for bf16 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/gemm_launch-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchGemmBf16(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchGemmOf<Codes::kBf16>(launch, args, sort, stream);
}

}  // namespace moed::cuda
