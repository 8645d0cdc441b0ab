// What this program was built with: the CUDA toolkit and the GPUs that its kernels are compiled for.
#ifndef MOED_KERNELS_CUDA_BUILD_INFO_H_
#define MOED_KERNELS_CUDA_BUILD_INFO_H_

namespace moed::cuda {

// "CUDA 13.0, sm_90a" (architectures separated by ", "), or "built without CUDA".
const char* BuildInfo();

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_BUILD_INFO_H_
