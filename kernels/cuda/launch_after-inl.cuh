// Kernels of one call follow each other on a stream, each reading what the one before wrote. Launched by LaunchAfter, a kernel may
// start while that one still runs (programmatic dependent launch, from compute capability 9.0 on; elsewhere the launch is a plain
// one): its thread blocks are there, and have fetched their first instructions and arguments, when their inputs are.
//
// What it takes, of every kernel that is launched so: each of its thread blocks calls WaitForEarlier, also one that has nothing to
// do, before it reads what the kernel right before it wrote, and before it writes anything; and LetLaterStart after that, never
// before. So when a kernel starts, all kernels but the one right before it have ended, and what they wrote may be read at once.
#ifndef MOED_KERNELS_CUDA_LAUNCH_AFTER_INL_CUH_
#define MOED_KERNELS_CUDA_LAUNCH_AFTER_INL_CUH_

#include <cuda_runtime.h>

namespace moed::cuda {

// Returns when the kernel before has ended and its writes can be read.
__device__ inline void WaitForEarlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// The next kernel's thread blocks may start where there is room, once all of this one's have come here.
__device__ inline void LetLaterStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ inline void BeginAfterEarlier() {
  WaitForEarlier();
  LetLaterStart();
}

// Objects hold machine code for given architectures alone, so that a device of capability 9.0 never runs code that was compiled for
// one without the instructions above.
template <typename... Parameters>
cudaError_t LaunchAfter(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                        Parameters... arguments) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute after;
  after.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  after.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &after;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_LAUNCH_AFTER_INL_CUH_
