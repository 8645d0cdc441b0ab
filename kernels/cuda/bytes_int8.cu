// The product of bytes-inl.cuh for int8 codes.
#include "kernels/cuda/bytes-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchBytesInt8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  return LaunchBytesOf<Codes::kInt8, 0>(launch, args, sort, stream);
}

}  // namespace moed::cuda
