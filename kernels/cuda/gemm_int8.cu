// The product of gemm-inl.cuh for int8 codes.
#include "kernels/cuda/gemm-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchGemmInt8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchGemmOf<Codes::kInt8>(launch, args, sort, stream);
}

}  // namespace moed::cuda
