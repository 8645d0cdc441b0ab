// A kernel that ends the context of its process.
#ifndef MOED_TESTS_CUDA_TRAP_H_
#define MOED_TESTS_CUDA_TRAP_H_

#include <cuda_runtime_api.h>

namespace moed::testing {

// Enqueues it. From the moment it has run, every CUDA call of the process fails.
cudaError_t LaunchTrap(cudaStream_t stream);

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_TRAP_H_
