// The product of bytes-inl.cuh for E4M3 codes.
#include "kernels/cuda/bytes-inl.cuh"
#include "kernels/cuda/gemm_kinds.h"

namespace moed::cuda {

cudaError_t LaunchBytesFp8(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.slot_steps) {
    case 8: return LaunchBytesOf<Codes::kFp8, 8>(launch, args, sort, stream);
    case 2: return LaunchBytesOf<Codes::kFp8, 2>(launch, args, sort, stream);
    case 1: return LaunchBytesOf<Codes::kFp8, 1>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moed::cuda
