// The product of few_rows-inl.cuh for int8 codes with zero points.
#include "kernels/cuda/few_rows_launch-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchFewRowsInt8Zeros(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchFewRowsOf<Codes::kInt8, true>(launch, args, sort, stream);
}

}  // namespace moed::cuda
