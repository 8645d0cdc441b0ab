// The reference backend on the GPU: exact weights, double products and sums. The judge of every other GPU backend.
//
// Runs every weight scheme that DequantizeRow defines: each expert is decoded on the host and kept as float32, so that no packed
// layout is shared with what it judges. Follows //kernels/cpu:reference step by step; results differ in the last bits of a double.
// Chosen only by name.
#ifndef MOED_KERNELS_CUDA_REFERENCE_H_
#define MOED_KERNELS_CUDA_REFERENCE_H_

#include "kernels/moe_kernel.h"

namespace moed::cuda {

// The one instance, "cuda_reference"; it has no state. In a build without CUDA its Check always says so, and Prepare returns
// UNIMPLEMENTED. A prepared layer runs on the process's first device and needs neither lane nor workspace: accelerator() is null,
// yet x and the output may each lie on the host or on that device, complete before the call, any alignment.
const Backend& ReferenceBackend();

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_REFERENCE_H_
