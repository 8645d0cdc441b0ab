// The workspace of one CPU call: which arrays it needs, how large, and where each one lies.
#ifndef MOED_KERNELS_CPU_CALL_PLAN_H_
#define MOED_KERNELS_CPU_CALL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/layer_store.h"
#include "kernels/cpu/operands.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Whether a projection's input is quantized with a number of its own from the file, so that it differs from expert to expert.
inline bool UsesStoredScale(const ActivationScheme& scheme) {
  return scheme.mode == ActivationMode::kStatic || (scheme.mode == ActivationMode::kDynamic && scheme.global_scale);
}

// What one of the two multiplications works on: float32 rows, or records for dot products.
struct StagePlan {
  const DotTable* dots = nullptr;  // null: float32 rows, also for groups too long for exact integer sums
  RowFormat row;                   // with dots only
  int64_t float_below = 0;         // experts with fewer rows go by float32 rows all the same

  // The products for an expert of `rows` rows; null: float32 arithmetic.
  const DotTable* For(int64_t rows) const { return rows < float_below ? nullptr : dots; }
};

// How many rows a call has, and in which format.
struct CallSize {
  int64_t tokens = 0;    // rows of x; batched: the counted ones
  int top_k = 1;
  bool batched = false;  // batched experts: every row has one expert, and nothing is combined
};

// Sizes in floats. Strides are multiples of 16, so that rows start on a cache line.
struct CallPlan {
  // For x of type `x`; bf16 needs the most.
  CallPlan(const MoeDesc& desc, const LayerShape& shape, const CpuKernels& kernels, DType x, const CallSize& size);

  StagePlan gate_up, down;
  int64_t slots = 0;
  bool combines = true;         // results are combined from the workspace; else they go straight to the output
  bool input_per_slot = false;  // x depends on the slot: weighted input, stored activation scales, an order of its own; or batched
  bool two_inputs = false;      // gate and up may see different inputs
  bool sorted_copy = false;     // records of x are copied to the order of experts, of those with enough rows
  int64_t input_rows = 0;       // at most: of x, or sorted positions where x depends on the slot
  int64_t input_stride = 0;       // x as float32
  int64_t hidden_act_stride = 0;  // h as the activation writes it
  int64_t gathered_stride = 0;    // h in packed order; 0 when that is the same
  int64_t output_stride = 0;      // y of a slot; 0 unless combined

  size_t bytes() const;
  // Records of x for gate and up.
  int64_t input_records() const { return input_rows + kSlackRecords; }

  static constexpr int64_t kSlackRecords = 16;  // readable ones after the last, see DotTable::contiguous_from
};

// The arrays of a plan inside a workspace of at least plan.bytes().
struct CallBuffers {
  CallBuffers(const CallPlan& plan, std::span<std::byte> workspace);

  float* input;             // [input_rows][input_stride]
  float* up_input;          // the same for up; null unless two_inputs
  float* hidden_act;        // [slots][hidden_act_stride], in sorted order
  float* gathered;          // [slots][gathered_stride]
  float* output;            // [slots][output_stride]
  uint8_t* input_records;   // [input_records()], null without dots
  uint8_t* up_records;      // the same for up; null unless two_inputs
  uint8_t* sorted_records;  // [slots + slack], null unless sorted_copy
  uint8_t* sorted_up_records;  // the same for up; null unless two_inputs
  uint8_t* hidden_records;  // [slots + slack], null without dots
  const float** combine_rows;  // [slots], the y rows of a token in slot order; both of no use unless combined
  float* combine_weights;      // [slots]
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CALL_PLAN_H_
