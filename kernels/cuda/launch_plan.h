// The launches of one call, as a plain value: two calls with equal plans run the same captured graph.
#ifndef MOED_KERNELS_CUDA_LAUNCH_PLAN_H_
#define MOED_KERNELS_CUDA_LAUNCH_PLAN_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/launch.h"

namespace moed::cuda {

// Of a PreparedMoe. Counts are capacities of grids; 0 leaves a launch out.
struct PartLaunch {
  SortLaunch sort;      // of 0 experts: the call has no such part
  int32_t x_absmax = 0, h_absmax = 0;
  int32_t activate = 0;
  StageLaunch stage_gate, stage_up, stage_down;
  bool split = false;   // gate and up are two products
  GemmLaunch gate, up, down;
  // The products of the rest tiles; of 0 tiles: there are none.
  GemmLaunch gate_rests, down_rests;
  bool operator==(const PartLaunch&) const = default;
};

struct LaunchPlan {
  int32_t rows = 0;
  int32_t router_experts = 0;  // E of the model; 0: no router kernel
  bool gate = false;           // the server's own gate runs, for logits or shared factors
  PartLaunch part[2];          // routed, shared
  int32_t combine = 0;
  int64_t hidden = 0;
  bool operator==(const LaunchPlan&) const = default;
};

// All launches of `plan` on `stream`, arguments in `block` on the device. The first error.
cudaError_t Enqueue(const LaunchPlan& plan, CallBlock* block, cudaStream_t stream);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_LAUNCH_PLAN_H_
