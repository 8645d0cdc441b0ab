// Arguments and launches of one part of a call: the routed experts or the shared one. Host code without CUDA calls.
#ifndef MOED_KERNELS_CUDA_PART_ARGS_H_
#define MOED_KERNELS_CUDA_PART_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/launch_plan.h"

namespace moed::cuda {

// What a part gets of its call. Pointers are the device's.
struct PartInput {
  const void* x = nullptr;
  DType dtype = DType::kBf16;
  int64_t rows = 0;            // of the call
  int64_t row_capacity = 0;    // of its launches
  int64_t slot_capacity = 0;
  int32_t top_k = 1;
  const int32_t* ids = nullptr;      // null: every row goes to expert 0, or counts
  const float* weights = nullptr;    // of slots
  const int32_t* counts = nullptr;   // batched experts
  int64_t max_m = 0;
};

// Fills `args`, whose arrays lie at the offsets `w` from `base`, and the launches that belong to them.
void FillPart(const CudaMoe& moe, const PartInput& input, const PartWorkspace& w, std::byte* base, PartArgs* args,
              PartLaunch* launch);

// What a product of float32 or bf16 sums stores.
SumRows SumsOf(const GemmArgs& product);

// Fills `args` for the sum over slots of the routed part `part`, which FillPart filled for `input`, into `out` [rows, H] of `dtype`
// on the device; of batched experts the rows that their counts tell. The shared expert's members stay as they are.
void FillCombine(const CudaMoe& moe, const PartInput& input, const PartArgs& part, void* out, DType dtype, CombineArgs* args);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_PART_ARGS_H_
