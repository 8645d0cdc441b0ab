// The product of few_rows-inl.cuh for fp8 codes.
#include "kernels/cuda/few_rows_launch-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchFewRowsFp8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchFewRowsOf<Codes::kFp8>(launch, args, sort, stream);
}

}  // namespace moed::cuda
