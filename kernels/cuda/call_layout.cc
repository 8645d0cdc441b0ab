#include "kernels/cuda/call_layout.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace moed::cuda {
namespace {

class LayoutMaker {
 public:
  LayoutMaker(const CallTarget& target, const CallInput& input, const CallSizes& sizes, DType out_dtype, bool x_on_host,
              bool out_on_host)
      : target_(target), input_(input), sizes_(sizes), out_dtype_(out_dtype), x_on_host_(x_on_host), out_on_host_(out_on_host) {}

  CallLayout Make() {
    const int64_t rows = sizes_.row_capacity, slots = sizes_.slot_capacity;
    const int64_t experts = target_.router != nullptr ? target_.router->experts : 0;
    CallLayout l;
    l.ids = Take(slots, sizeof(int32_t));
    l.weights = Take(slots, sizeof(float));
    l.counts = Take(static_cast<int64_t>(input_.counts.size()), sizeof(int32_t));
    l.logits = Take(input_.routing == RoutingKind::kLogits ? rows * experts : 0, sizeof(float));
    l.sent = at_;
    const bool gate = input_.routing == RoutingKind::kGate;
    l.computed_logits = gate ? Take(rows * experts, sizeof(float)) : l.logits;
    l.scratch = Take(input_.routing == RoutingKind::kIds ? 0 : 2 * rows * experts, sizeof(float));
    l.local_ids = Take(slots, sizeof(int32_t));
    l.factor = Take(rows, sizeof(float));
    l.x = Take(x_on_host_ ? std::max(rows, input_.x.rows) : 0, input_.x.row_bytes());
    l.out = Take(out_on_host_ ? std::max(rows, input_.x.rows) : 0, static_cast<size_t>(input_.x.cols) * DTypeBytes(out_dtype_));
    l.part[0] = WorkspaceFor(*target_.routed, rows, slots);
    at_ = l.part[0].end;
    if (target_.shared != nullptr) {
      l.part[1] = WorkspaceFor(*target_.shared, rows, rows);
      at_ = l.part[1].end;
    }
    l.bytes = at_;
    return l;
  }

 private:
  PartWorkspace WorkspaceFor(const CudaMoe& moe, int64_t rows, int64_t slots) const {
    return WorkspaceOf(moe.desc(), moe.plan(), moe.hopper(), rows, slots, input_.x.dtype, at_);
  }

  size_t Take(int64_t count, size_t bytes) {
    const size_t begin = at_;
    at_ = Aligned(at_ + static_cast<size_t>(count) * bytes);
    return begin;
  }

  const CallTarget& target_;
  const CallInput& input_;
  const CallSizes& sizes_;
  const DType out_dtype_;
  const bool x_on_host_, out_on_host_;
  size_t at_ = 0;
};

class CallFiller {
 public:
  CallFiller(const CallTarget& target, const CallInput& input, const CallSizes& sizes, const CallLayout& layout,
             const CallPlaces& places)
      : target_(target), input_(input), sizes_(sizes), layout_(layout), places_(places) {}

  void Fill(DType out_dtype, CallBlock* block, LaunchPlan* plan) const {
    plan->rows = static_cast<int32_t>(sizes_.row_capacity);
    plan->hidden = input_.x.cols;
    if (target_.router != nullptr) FillRouter(&block->router, plan);
    PartInput routed = {places_.x,
                        input_.x.dtype,
                        sizes_.rows,
                        sizes_.row_capacity,
                        sizes_.slot_capacity,
                        sizes_.top_k,
                        nullptr,
                        At<float>(layout_.weights)};
    if (input_.counts.empty()) routed.ids = At<int32_t>(target_.router != nullptr ? layout_.local_ids : layout_.ids);
    if (!input_.counts.empty()) routed.counts = At<int32_t>(layout_.counts), routed.max_m = input_.max_m;
    FillPart(*target_.routed, routed, layout_.part[0], places_.base, &block->part[0], &plan->part[0]);
    if (target_.shared != nullptr) {
      const PartInput shared = {places_.x, input_.x.dtype, sizes_.rows, sizes_.row_capacity, sizes_.row_capacity};
      FillPart(*target_.shared, shared, layout_.part[1], places_.base, &block->part[1], &plan->part[1]);
      FillShared(block->part[1], &block->combine);
    }
    FillCombine(*target_.routed, routed, block->part[0], places_.out, out_dtype, &block->combine);
    plan->combine = static_cast<int32_t>(input_.counts.empty() ? sizes_.row_capacity : sizes_.slot_capacity);
  }

 private:
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>((offset < layout_.sent ? places_.sent : places_.base) + offset);
  }
  bool wants_factor() const { return target_.shared != nullptr && target_.router->shared_gate != nullptr; }

  void FillRouter(RouterArgs* args, LaunchPlan* plan) const {
    const LayerRouter& router = *target_.router;
    args->rows = static_cast<int32_t>(sizes_.rows);
    args->experts = router.experts;
    args->top_k = sizes_.top_k;
    args->hidden = input_.x.cols;
    args->rule = router.rule;
    args->x = places_.x;
    args->x_dtype = input_.x.dtype;
    const bool gate = input_.routing == RoutingKind::kGate;
    if (gate) args->gate = router.gate, args->gate_bias = router.gate_bias;
    if (wants_factor()) args->shared_gate = router.shared_gate, args->shared_factor = At<float>(layout_.factor);
    args->logits = At<float>(layout_.computed_logits);
    args->route = input_.routing != RoutingKind::kIds;
    args->own_gate = gate;
    args->correction_bias = router.correction_bias;
    args->ids = At<int32_t>(layout_.ids);
    args->weights = At<float>(layout_.weights);
    args->scratch = At<float>(layout_.scratch);
    args->first_expert = router.first_expert;
    args->held = target_.routed->desc().num_experts;
    args->local_ids = At<int32_t>(layout_.local_ids);
    args->error_row = places_.error_row;
    plan->router_experts = router.experts;
    plan->gate = gate || wants_factor();
  }

  void FillShared(const PartArgs& shared, CombineArgs* args) const {
    args->shared = SumsOf(shared.down);
    if (wants_factor()) args->factor = At<float>(layout_.factor);
  }

  const CallTarget& target_;
  const CallInput& input_;
  const CallSizes& sizes_;
  const CallLayout& layout_;
  const CallPlaces& places_;
};

}  // namespace

CallSizes SizesOf(const CallTarget& target, const CallInput& input) {
  CallSizes sizes;
  sizes.top_k = input.top_k;
  sizes.rows = sizes.row_capacity = input.x.rows;
  sizes.slots = sizes.slot_capacity = sizes.rows * input.top_k;
  if (!input.counts.empty()) {
    sizes.slots = sizes.slot_capacity = std::accumulate(input.counts.begin(), input.counts.end(), int64_t{0});
    sizes.row_capacity = sizes.slots;  // rows are only staged by sorted row
  } else if (target.router != nullptr && sizes.rows <= kMostCapturedRows && input.top_k == target.router->top_k) {
    sizes.row_capacity = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(sizes.rows)));
    sizes.slot_capacity = sizes.row_capacity * input.top_k;
  }
  return sizes;
}

CallLayout LayoutOf(const CallTarget& target, const CallInput& input, const CallSizes& sizes, DType out_dtype, bool x_on_host,
                    bool out_on_host) {
  return LayoutMaker(target, input, sizes, out_dtype, x_on_host, out_on_host).Make();
}

void FillCall(const CallTarget& target, const CallInput& input, const CallSizes& sizes, const CallLayout& layout,
              const CallPlaces& places, DType out_dtype, CallBlock* block, LaunchPlan* plan) {
  CallFiller(target, input, sizes, layout, places).Fill(out_dtype, block, plan);
}

}  // namespace moed::cuda
