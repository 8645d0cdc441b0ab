// The products' launchers for each kind of codes, one source file each.
#ifndef MOED_KERNELS_CUDA_GEMM_KINDS_H_
#define MOED_KERNELS_CUDA_GEMM_KINDS_H_

#include "kernels/cuda/launch.h"

namespace moed::cuda {

using GemmLauncher = cudaError_t(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream);
GemmLauncher LaunchGemmInt4, LaunchGemmFp4, LaunchGemmInt8, LaunchGemmFp8, LaunchGemmBf16, LaunchGemmF16, LaunchGemmF32;
// Of rows that are bytes.
GemmLauncher LaunchBytesInt8, LaunchBytesFp8;
// On Hopper alone.
GemmLauncher LaunchFewRowsInt4, LaunchFewRowsFp4, LaunchFewRowsInt8, LaunchFewRowsFp8, LaunchFewRowsBf16;
GemmLauncher LaunchHopperInt4, LaunchHopperFp4, LaunchHopperInt8, LaunchHopperFp8, LaunchHopperBf16;
// Of codes with zero points.
GemmLauncher LaunchFewRowsInt4Zeros, LaunchFewRowsInt8Zeros, LaunchHopperInt4Zeros, LaunchHopperInt8Zeros;

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_GEMM_KINDS_H_
