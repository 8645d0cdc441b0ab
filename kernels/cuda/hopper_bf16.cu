// The product of hopper-inl.cuh for bf16 codes.
#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/hopper-inl.cuh"

namespace moed::cuda {

cudaError_t LaunchHopperBf16(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchHopperOf<Codes::kBf16>(launch, args, sort, stream);
}

}  // namespace moed::cuda
