#include "kernels/cpu/call_plan.h"

#include <utility>

namespace moed::cpu {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t PointerBytes(int64_t slots) { return RoundUp(slots * static_cast<int64_t>(sizeof(float*)), 64); }

}  // namespace

CallPlan::CallPlan(const MoeDesc& desc, const LayerShape& shape, int64_t tokens, int top_k) {
  const ActivationScheme& gate = desc.scheme.gate.input;
  const ActivationScheme& up = desc.scheme.up.input;
  slots = tokens * top_k;
  input_per_slot = desc.weight_on_input || UsesStoredScale(gate) || UsesStoredScale(up);
  two_inputs = UsesStoredScale(gate) || UsesStoredScale(up) || !(gate == up);
  input_rows = input_per_slot ? slots : tokens;
  input_stride = RoundUp(shape.gate_up.format.depth, 16);
  hidden_act_stride = shape.intermediate_stride();
  gathered_stride = shape.down.source.empty() ? 0 : RoundUp(shape.down.format.depth, 16);
  output_stride = shape.hidden_stride();
}

size_t CallPlan::bytes() const {
  const int64_t floats = (two_inputs ? 2 : 1) * input_rows * input_stride +
                         slots * (hidden_act_stride + gathered_stride + output_stride);
  return static_cast<size_t>(floats * 4 + PointerBytes(slots) + slots * 4);
}

CallBuffers::CallBuffers(const CallPlan& plan, std::span<std::byte> workspace) {
  float* next = reinterpret_cast<float*>(workspace.data());
  input = std::exchange(next, next + plan.input_rows * plan.input_stride);
  up_input = plan.two_inputs ? std::exchange(next, next + plan.input_rows * plan.input_stride) : nullptr;
  hidden_act = std::exchange(next, next + plan.slots * plan.hidden_act_stride);
  gathered = std::exchange(next, next + plan.slots * plan.gathered_stride);
  output = std::exchange(next, next + plan.slots * plan.output_stride);
  combine_rows = reinterpret_cast<const float**>(next);
  combine_weights = reinterpret_cast<float*>(reinterpret_cast<char*>(next) + PointerBytes(plan.slots));
}

}  // namespace moed::cpu
