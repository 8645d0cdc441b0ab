// The product of hopper-inl.cuh for int4 codes with zero points.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/hopper-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchHopperInt4Zeros(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchHopperOf<Codes::kInt4, true>(launch, args, sort, stream);
}

}  // namespace moed::cuda
