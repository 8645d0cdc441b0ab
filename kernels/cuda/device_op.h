// The routed experts' part of a layer as one piece of work on the device: hidden states, ids and weights, or the rows of batched
// experts and their counts, are there already and the result stays there. Host code without CUDA calls: it says what to launch, and
// on which arguments.
//
// For callers that hold a batch on the GPU and enqueue or capture it themselves, on a stream of their own: a benchmark, a model
// that runs in the same process. Nothing is checked on the device: ids outside [-1, E) or counts outside [0, max_m] are undefined
// behaviour.
#ifndef MOED_KERNELS_CUDA_DEVICE_OP_H_
#define MOED_KERNELS_CUDA_DEVICE_OP_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/tensor.h"

namespace moed::cuda {

// M rows of hidden states with k slots each. Pointers are the device's; all matrices are dense and row-major. 1 <= M, 1 <= k,
// M k <= kMostSlots.
struct DeviceOp {
  const void* x = nullptr;  // [M, H] in x_dtype; rows of bf16 are used in place when aligned to 16 bytes
  DType x_dtype = DType::kBf16;
  int64_t rows = 0;                // M
  int32_t top_k = 0;               // k
  const int32_t* ids = nullptr;    // [M, k], in [-1, E); -1 is "no expert"
  const float* weights = nullptr;  // [M, k], final
  void* out = nullptr;             // [M, H] in out_dtype
  DType out_dtype = DType::kBf16;

  // Batched experts, where there are counts: expert e has rows [e max_m, e max_m + counts[e]) of x and of the output, unweighted;
  // what lies beyond is neither read nor written. Then M is E max_m, k is 1, and ids and weights are null.
  const int32_t* counts = nullptr;  // [E], each in [0, max_m]
  int64_t max_m = 0;
  int64_t counted = 0;              // the sum of the counts, or more: what launches and workspace are made for, at least 1
};

// Bytes of the workspace that an op of so many rows and slots needs, whatever its pointers.
size_t DeviceOpBytes(const CudaMoe& moe, const DeviceOp& op);

// Fills `block`, to be copied into device memory that stays as it is while launches read it, and `plan`, for Enqueue. `workspace`:
// device memory of DeviceOpBytes bytes, aligned to 256; ops that follow each other on one stream may share it. Every launch reads
// `moe` and the op's arrays.
void PlanDeviceOp(const CudaMoe& moe, const DeviceOp& op, std::byte* workspace, CallBlock* block, LaunchPlan* plan);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_DEVICE_OP_H_
