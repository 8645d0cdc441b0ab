// The product of hopper-inl.cuh for int8 codes with zero points.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/hopper-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchHopperInt8Zeros(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchHopperOf<Codes::kInt8, true>(launch, args, sort, stream);
}

}  // namespace moed::cuda
