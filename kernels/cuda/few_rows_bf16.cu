// The product of few_rows-inl.cuh for bf16 codes.
#include "kernels/cuda/few_rows_launch-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchFewRowsBf16(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchFewRowsOf<Codes::kBf16>(launch, args, sort, stream);
}

}  // namespace moed::cuda
