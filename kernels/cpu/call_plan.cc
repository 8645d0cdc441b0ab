#include "kernels/cpu/call_plan.h"

#include <algorithm>
#include <utility>

namespace moed::cpu {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t PointerBytes(int64_t slots) { return RoundUp(slots * static_cast<int64_t>(sizeof(float*)), 64); }

StagePlan PlanStage(const CpuKernels& kernels, const LinearScheme& linear, const PanelFormat& panel, DType x, bool deterministic) {
  StagePlan plan;
  plan.dots = DotsFor(kernels, linear, panel.group, x);
  if (plan.dots == nullptr) return plan;
  plan.row = MakeRowFormat(*plan.dots, panel);
  if (!deterministic) plan.float_below = KindOf(*plan.dots, panel.element).float_below;
  return plan;
}

int64_t RecordBytes(const StagePlan& stage, int64_t records) { return stage.dots == nullptr ? 0 : records * stage.row.bytes; }

}  // namespace

CallPlan::CallPlan(const MoeDesc& desc, const LayerShape& shape, const CpuKernels& kernels, DType x, const CallSize& size) {
  const LinearScheme& gate = desc.scheme.gate;
  const LinearScheme& up = desc.scheme.up;
  gate_up = PlanStage(kernels, gate, shape.gate_up.format, x, desc.deterministic);
  if (gate_up.dots != nullptr && DotsFor(kernels, up, shape.gate_up.format.group, x) != gate_up.dots) gate_up = StagePlan();
  down = PlanStage(kernels, desc.scheme.down, shape.down.format, x, desc.deterministic);
  slots = size.tokens * size.top_k;
  combines = !size.batched;
  const bool own_order = gate.weights.act_order && shape.packed;
  input_per_slot = size.batched || desc.weight_on_input || UsesStoredScale(gate.input) || UsesStoredScale(up.input) || own_order;
  two_inputs = UsesStoredScale(gate.input) || UsesStoredScale(up.input) || !(gate.input == up.input) || own_order;
  sorted_copy = gate_up.dots != nullptr && gate_up.dots->contiguous_from > 0 && !input_per_slot;
  input_rows = input_per_slot ? slots : size.tokens;
  input_stride = RoundUp(std::max(shape.gate_up.format.depth, desc.hidden), 16);
  hidden_act_stride = shape.intermediate_stride();
  const bool reordered = !shape.down.source.empty() || (desc.scheme.down.weights.act_order && shape.packed);
  gathered_stride = reordered ? RoundUp(shape.down.format.depth, 16) : 0;
  output_stride = combines ? shape.hidden_stride() : 0;
}

size_t CallPlan::bytes() const {
  const int64_t inputs = two_inputs ? 2 : 1;
  const int64_t floats = inputs * input_rows * input_stride + slots * (hidden_act_stride + gathered_stride + output_stride);
  const int64_t records = inputs * RecordBytes(gate_up, input_records()) +
                          (sorted_copy ? inputs * RecordBytes(gate_up, slots + kSlackRecords) : 0) + RecordBytes(down, slots + kSlackRecords);
  return static_cast<size_t>(floats * 4 + records + (combines ? PointerBytes(slots) + slots * 4 : 0));
}

CallBuffers::CallBuffers(const CallPlan& plan, std::span<std::byte> workspace) {
  float* next = reinterpret_cast<float*>(workspace.data());
  input = std::exchange(next, next + plan.input_rows * plan.input_stride);
  up_input = plan.two_inputs ? std::exchange(next, next + plan.input_rows * plan.input_stride) : nullptr;
  hidden_act = std::exchange(next, next + plan.slots * plan.hidden_act_stride);
  gathered = std::exchange(next, next + plan.slots * plan.gathered_stride);
  output = std::exchange(next, next + plan.slots * plan.output_stride);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(next);
  const auto take = [&](bool wanted, const StagePlan& stage, int64_t records) -> uint8_t* {
    if (!wanted || stage.dots == nullptr) return nullptr;
    return std::exchange(bytes, bytes + RecordBytes(stage, records));
  };
  input_records = take(true, plan.gate_up, plan.input_records());
  up_records = take(plan.two_inputs, plan.gate_up, plan.input_records());
  sorted_records = take(plan.sorted_copy, plan.gate_up, plan.slots + CallPlan::kSlackRecords);
  sorted_up_records = take(plan.sorted_copy && plan.two_inputs, plan.gate_up, plan.slots + CallPlan::kSlackRecords);
  hidden_records = take(true, plan.down, plan.slots + CallPlan::kSlackRecords);
  combine_rows = reinterpret_cast<const float**>(bytes);
  combine_weights = reinterpret_cast<float*>(bytes + PointerBytes(plan.slots));
}

}  // namespace moed::cpu
