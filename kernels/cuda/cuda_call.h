// One call on a lane: its memory, its arguments, its launches, and the copies around them.
//
// What a call needs on the device is laid out anew for every call in the lane's workspace, by the capacity of its launches; the
// arguments tell the kernels where, so that nothing but the plan of launches is ever captured.
#ifndef MOED_KERNELS_CUDA_CUDA_CALL_H_
#define MOED_KERNELS_CUDA_CUDA_CALL_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/accelerator.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/cuda_moe.h"

namespace moed::cuda {

// The router's facts of a whole layer; pointers are the device's.
struct LayerRouter {
  int32_t experts = 0;  // E of the model
  int32_t top_k = 0;
  int32_t first_expert = 0;
  RouterRule rule;
  const float* gate = nullptr;
  const float* gate_bias = nullptr;
  const float* correction_bias = nullptr;
  const float* shared_gate = nullptr;
};

// What is called.
struct CallTarget {
  const CudaMoe* routed = nullptr;
  const CudaMoe* shared = nullptr;       // null: not added
  const LayerRouter* router = nullptr;   // null: ids are those of `routed`, and were checked
};

// With what.
struct CallInput {
  TensorView x;
  IncomingRows* incoming = nullptr;  // of x on the host, where rows are still being written (DeviceCall)
  RoutingKind routing = RoutingKind::kIds;
  int32_t top_k = 0;
  std::span<const int32_t> ids;
  std::span<const float> weights;
  std::span<const float> logits;
  // Batched experts: then x is [E * max_m, H], and there are no ids.
  std::span<const int32_t> counts;
  int64_t max_m = 0;
  // Filled with the routing that was used, when not null.
  std::vector<int32_t>* used_ids = nullptr;
  std::vector<float>* used_weights = nullptr;
};

// INVALID_ARGUMENT when the rows have more slots than a call may have, or a tensor on the device is not aligned to its elements:
// kernels that read it would end the device's work for good.
absl::Status CheckPlaces(const TensorView& x, const MutableTensorView& out, int64_t top_k);

// Runs the call; `out` is complete when it returns OK. `pool` (may be null) helps to copy. INVALID_ARGUMENT names the row that
// cannot be routed; UNAVAILABLE when the device failed.
absl::Status RunCall(const CallTarget& target, const CallInput& input, MutableTensorView out, CudaLane& lane, WorkerPool* pool);

// Captures the launches of calls with up to kMostCapturedRows rows of all kinds, and gives the lane the memory of the largest call.
absl::Status WarmUpCalls(const CallTarget& target, CudaLane& lane);

// Calls with up to so many rows run captured launches for the next power of two.
inline constexpr int64_t kMostCapturedRows = 512;

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_CALL_H_
