#include "kernels/cpu/call_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace moed::cpu {
namespace {

// x[n] in plain order to `out` in packed order, zeros at padding and up to `stride`. `out` may be x; `order` may be null.
void Reorder(const int32_t* order, int64_t depth, const float* x, int64_t n, float* out, int64_t stride) {
  if (order == nullptr) {
    if (out != x) std::copy(x, x + n, out);
    std::fill(out + n, out + stride, 0.0f);
    return;
  }
  std::vector<float> plain;
  if (out == x) {
    plain.assign(x, x + n);
    x = plain.data();
  }
  for (int64_t k = 0; k < depth; ++k) out[k] = order[k] < 0 ? 0.0f : x[order[k]];
  std::fill(out + depth, out + stride, 0.0f);
}

}  // namespace

bool CallRows::HiddenNeedsWork() const {
  return desc_.scheme.down.input.mode != ActivationMode::kNone || plan_.gathered_stride > 0 || plan_.down.dots != nullptr;
}

void CallRows::Widen(int64_t row, float* out) const {
  const TensorView& x = route_.x();
  const void* source = x.row(row);
  if (x.dtype == DType::kF32) {
    std::memcpy(out, source, x.row_bytes());
  } else {
    kernels_.widen(x.dtype == DType::kBf16, source, desc_.hidden, out);
  }
}

void CallRows::WidenInput(int64_t row) const {
  float* out = buffers_.input + row * plan_.input_stride;
  Widen(plan_.input_per_slot ? route_.row(row) : row, out);
  if (!route_.weight_on_input()) return;
  const float weight = route_.input_weight(row);
  for (int64_t k = 0; k < desc_.hidden; ++k) out[k] *= weight;
}

void CallRows::MeasureInput() {
  // All rows of the request count, whether this layer holds their experts or not. A row that is weighted first exists where it is
  // routed; of a batched call the counted rows are all there is.
  const bool widened = !plan_.input_per_slot || route_.weight_on_input() || route_.batched();
  std::vector<float> plain(widened ? 0 : static_cast<size_t>(desc_.hidden));
  float largest = 0.0f;
  for (int64_t row = 0; row < (widened ? input_rows() : route_.x().rows); ++row) {
    if (!widened) Widen(row, plain.data());
    largest = MergeAbsMax(largest, AbsMax(widened ? buffers_.input + row * plan_.input_stride : plain.data(), desc_.hidden));
  }
  gate_max_ = up_max_ = largest;
}

void CallRows::MeasureHidden() {
  hidden_max_ = 0.0f;
  for (int64_t position = 0; position < route_.positions(); ++position) {
    hidden_max_ = MergeAbsMax(hidden_max_, AbsMax(buffers_.hidden_act + position * plan_.hidden_act_stride, desc_.intermediate));
  }
}

void CallRows::Finish(const Rule& rule, const StagePlan& stage, int64_t depth, float* x, int64_t n, float* out, int64_t stride,
                      uint8_t* record) const {
  RowArgs args;
  if (stage.dots == nullptr || stage.row.codes == RowCodes::kBf16) {
    QuantizeRow(rule.scheme, rule.stored, rule.absmax, x, n);
  } else {
    const bool is_static = rule.scheme.mode == ActivationMode::kStatic;
    args.rule = is_static ? RowScale::kStatic : SpansRows(rule.scheme) ? RowScale::kAbsMax : RowScale::kOwn;
    args.value = is_static ? rule.stored : rule.absmax;
  }
  Reorder(rule.order, depth, x, n, out, stride);
  if (stage.dots == nullptr) return;
  args.format = &stage.row;
  args.x = out;
  args.out = record;
  stage.dots->make_row(args);
}

void CallRows::FinishInput(int64_t row) const {
  const int expert = plan_.input_per_slot ? route_.expert(row) : 0;
  const InputScales scales = plan_.input_per_slot ? store_.input_scales(expert) : InputScales();
  const Rule gate = {desc_.scheme.gate.input, scales.gate, gate_max_, store_.gate_order(expert)};
  const Rule up = {desc_.scheme.up.input, scales.up, up_max_, store_.up_order(expert)};
  const int64_t depth = store_.shape().gate_up.format.depth;
  const int64_t record = row * plan_.gate_up.row.bytes;
  float* x = buffers_.input + row * plan_.input_stride;
  if (!SameInput(expert)) {
    float* up_x = buffers_.up_input + row * plan_.input_stride;
    std::copy(x, x + desc_.hidden, up_x);
    Finish(up, plan_.gate_up, depth, up_x, desc_.hidden, up_x, plan_.input_stride, buffers_.up_records + record);
  }
  Finish(gate, plan_.gate_up, depth, x, desc_.hidden, x, plan_.input_stride, buffers_.input_records + record);
}

bool CallRows::SameInput(int expert) const {
  if (!plan_.two_inputs) return true;
  const InputScales scales = store_.input_scales(expert);
  return desc_.scheme.gate.input == desc_.scheme.up.input && scales.gate == scales.up &&
         store_.gate_order(expert) == store_.up_order(expert);
}

void CallRows::CopyToSorted(int64_t position) const {
  if (!WantsSorted(route_.expert(position))) return;
  const int64_t bytes = plan_.gate_up.row.bytes;
  std::memcpy(buffers_.sorted_records + position * bytes, buffers_.input_records + InputRow(position) * bytes, bytes);
  if (!plan_.two_inputs) return;
  std::memcpy(buffers_.sorted_up_records + position * bytes, buffers_.up_records + InputRow(position) * bytes, bytes);
}

void CallRows::FinishHidden(int64_t position) const {
  const int expert = route_.expert(position);
  const Rule down = {desc_.scheme.down.input, store_.input_scales(expert).down, hidden_max_, store_.down_order(expert)};
  float* h = buffers_.hidden_act + position * plan_.hidden_act_stride;
  const bool gathered = plan_.gathered_stride > 0;
  Finish(down, plan_.down, store_.shape().down.format.depth, h, desc_.intermediate,
         gathered ? buffers_.gathered + position * plan_.gathered_stride : h,
         gathered ? plan_.gathered_stride : plan_.hidden_act_stride, buffers_.hidden_records + position * plan_.down.row.bytes);
}

}  // namespace moed::cpu
