// The product of hopper-inl.cuh for int4 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/hopper-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchHopperInt4(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchHopperOf<Codes::kInt4>(launch, args, sort, stream);
}

}  // namespace moed::cuda
