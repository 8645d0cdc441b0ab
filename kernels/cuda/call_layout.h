// Where a call's arrays lie in its lane's memory, and the arguments and the plan of launches that follow: plain arithmetic, nothing
// is enqueued or allocated here.
#ifndef MOED_KERNELS_CUDA_CALL_LAYOUT_H_
#define MOED_KERNELS_CUDA_CALL_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/part_args.h"

namespace moed::cuda {

// `bytes` up to where the next array may begin.
constexpr size_t Aligned(size_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

// Rows and slots of a call, and of the launches that it takes.
struct CallSizes {
  int64_t rows = 0, slots = 0;
  int64_t row_capacity = 0, slot_capacity = 0;
  int32_t top_k = 1;
};
CallSizes SizesOf(const CallTarget& target, const CallInput& input);

// Offsets in the workspace. What comes from the host in one copy is first: [0, sent), ids and weights before the rest. That part
// moves to the lane's own arrays where it is small enough (cuda_call.cc), at the same offsets.
struct CallLayout {
  size_t ids = 0, weights = 0, counts = 0, logits = 0;
  size_t sent = 0;
  size_t computed_logits = 0, scratch = 0, local_ids = 0, factor = 0;
  size_t x = 0, out = 0;
  PartWorkspace part[2];
  size_t bytes = 0;
};
// `x_on_host` and `out_on_host`: the workspace holds the device's copy of it.
CallLayout LayoutOf(const CallTarget& target, const CallInput& input, const CallSizes& sizes, DType out_dtype, bool x_on_host,
                    bool out_on_host);

// Addresses that a layout's offsets and a call's tensors have for the device.
struct CallPlaces {
  std::byte* base = nullptr;     // of the workspace
  std::byte* sent = nullptr;     // of what comes from the host, [0, CallLayout::sent)
  int32_t* error_row = nullptr;  // RouterArgs::error_row
  const void* x = nullptr;
  void* out = nullptr;
};

// Fills the arguments and the plan of the launches; `block` and `plan` are as constructed.
void FillCall(const CallTarget& target, const CallInput& input, const CallSizes& sizes, const CallLayout& layout,
              const CallPlaces& places, DType out_dtype, CallBlock* block, LaunchPlan* plan);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CALL_LAYOUT_H_
