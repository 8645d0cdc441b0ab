// The product of gemm-inl.cuh for bf16 codes.
#include "kernels/cuda/gemm-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchGemmBf16(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchGemmOf<Codes::kBf16>(launch, args, sort, stream);
}

}  // namespace moed::cuda
