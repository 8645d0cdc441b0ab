// The product of gemm-inl.cuh for fp8 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/gemm_launch-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchGemmFp8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if (launch.powers) return LaunchGemmOf<Codes::kFp8, true>(launch, args, sort, stream);
  return LaunchGemmOf<Codes::kFp8>(launch, args, sort, stream);
}

}  // namespace moed::cuda
