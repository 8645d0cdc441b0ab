// The workspace of one CPU call: which arrays it needs, how large, and where each one lies.
#ifndef MOED_KERNELS_CPU_CALL_PLAN_H_
#define MOED_KERNELS_CPU_CALL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/layer_store.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Whether a projection's input is quantized with a number of its own from the file, so that it differs from expert to expert.
inline bool UsesStoredScale(const ActivationScheme& scheme) {
  return scheme.mode == ActivationMode::kStatic || (scheme.mode == ActivationMode::kDynamic && scheme.global_scale);
}

// Sizes in floats. Strides are multiples of 16, so that rows start on a cache line.
struct CallPlan {
  CallPlan(const MoeDesc& desc, const LayerShape& shape, int64_t tokens, int top_k);

  int64_t slots = 0;
  bool input_per_slot = false;  // x depends on the slot: weighted input, or stored activation scales
  bool two_inputs = false;      // gate and up may see differently quantized inputs
  int64_t input_rows = 0;
  int64_t input_stride = 0;       // x as float32 in packed order
  int64_t hidden_act_stride = 0;  // h as the activation writes it
  int64_t gathered_stride = 0;    // h in packed order; 0 when that is the same
  int64_t output_stride = 0;      // y of a slot

  size_t bytes() const;
};

// The arrays of a plan inside a workspace of at least plan.bytes().
struct CallBuffers {
  CallBuffers(const CallPlan& plan, std::span<std::byte> workspace);

  float* input;            // [input_rows][input_stride]
  float* up_input;         // the same for up; null unless two_inputs
  float* hidden_act;       // [slots][hidden_act_stride], in sorted order
  float* gathered;         // [slots][gathered_stride]
  float* output;           // [slots][output_stride]
  const float** combine_rows;  // [slots], the y rows of a token in slot order
  float* combine_weights;      // [slots]
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CALL_PLAN_H_
