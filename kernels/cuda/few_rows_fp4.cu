// The product of few_rows-inl.cuh for fp4 codes.
#include "kernels/cuda/few_rows_launch-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchFewRowsFp4(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchFewRowsOf<Codes::kFp4>(launch, args, sort, stream);
}

}  // namespace moed::cuda
