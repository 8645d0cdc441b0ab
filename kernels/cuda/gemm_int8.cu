// The product of gemm-inl.cuh for int8 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/gemm_launch-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchGemmInt8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchGemmOf<Codes::kInt8>(launch, args, sort, stream);
}

}  // namespace moed::cuda
