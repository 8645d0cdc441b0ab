// The product of hopper-inl.cuh for fp8 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/hopper-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchHopperFp8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchHopperOf<Codes::kFp8>(launch, args, sort, stream);
}

}  // namespace moed::cuda
