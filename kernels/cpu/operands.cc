#include "kernels/cpu/operands.h"

namespace moed::cpu {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

bool FitsInt8Dots(const LinearScheme& linear) {
  const ElementType weights = linear.weights.element;
  const ActivationScheme& input = linear.input;
  return (IsInteger(weights) || weights == ElementType::kFp4E2m1) && input.mode != ActivationMode::kNone &&
         input.element == ElementType::kInt8 && input.rule == ScaleRule::kAbsMax && input.group.cols == 0 && !input.zero_points;
}

bool FitsBf16Dots(const LinearScheme& linear) {
  const ElementType weights = linear.weights.element;
  return linear.input.mode == ActivationMode::kNone &&
         (IsInteger(weights) || weights == ElementType::kFp4E2m1 || weights == ElementType::kFp8E4m3 || weights == ElementType::kBf16);
}

const DotTable* DotsFor(const CpuKernels& kernels, const LinearScheme& linear, int64_t group, DType x) {
  if (kernels.int8 != nullptr && FitsInt8Dots(linear) && group <= kLongestExactGroup) return kernels.int8;
  if (kernels.bf16 != nullptr && FitsBf16Dots(linear) && x == DType::kBf16) return kernels.bf16;
  return nullptr;
}

const RowKind& KindOf(const DotTable& dots, ElementType weights) { return ElementBits(weights) == 4 ? dots.nibbles : dots.others; }

RowFormat MakeRowFormat(const DotTable& dots, const PanelFormat& panel) {
  RowFormat row;
  const RowKind& kind = KindOf(dots, panel.element);
  row.codes = kind.codes;
  row.order = kind.order;
  row.depth = panel.depth;
  row.group = panel.group;
  row.half_sums = panel.group <= kind.half_sums_up_to;
  const int64_t groups = (panel.depth + panel.group - 1) / panel.group;
  // A tile of x may reach 64 bytes beyond the last group.
  row.scale_offset = RoundUp(panel.depth * row.code_bytes(), 64) + (dots.contiguous_from > 0 ? 64 : 0);
  row.sums_offset = row.scale_offset + static_cast<int64_t>(sizeof(float));
  const bool fp4 = panel.element == ElementType::kFp4E2m1;
  row.sum_factor = panel.zero_bytes > 0 ? -1 : fp4 ? -kFp4Zero : -static_cast<int32_t>(panel.zero);
  row.bytes = RoundUp(row.sums_offset + groups * 4, 64);
  return row;
}

}  // namespace moed::cpu
