// The rows of a call by sorted position: which expert each one goes to, which row of x it is, where its result goes.
//
// Hides the activation format from the stages: standard rows are sorted by expert, batched ones already are. Immutable.
#ifndef MOED_KERNELS_CPU_CALL_ROUTE_H_
#define MOED_KERNELS_CPU_CALL_ROUTE_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/token_sort.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

class CallRoute {
 public:
  // The batch must be valid, its memory must outlive the route.
  CallRoute(const MoeDesc& desc, const MoeBatch& batch)
      : x_(batch.x), top_k_(batch.top_k), ids_(batch.ids), weights_(batch.weights), weight_on_input_(desc.weight_on_input) {
    SortSlots(ids_, desc.num_experts, &sorted_);
  }
  explicit CallRoute(const BatchedExperts& batch) : x_(batch.x), max_m_(batch.max_m) { ListSlots(batch.counts, max_m_, &sorted_); }
  CallRoute(const CallRoute&) = delete;
  CallRoute& operator=(const CallRoute&) = delete;

  const TensorView& x() const { return x_; }
  int top_k() const { return top_k_; }
  const SortedSlots& sorted() const { return sorted_; }
  // Whether the results are the caller's to combine: that of `position` is row(position) of the output.
  bool batched() const { return max_m_ > 0; }
  int64_t positions() const { return static_cast<int64_t>(sorted_.slots.size()); }

  int expert(int64_t position) const {
    const int32_t slot = sorted_.slots[position];
    return batched() ? static_cast<int>(slot / max_m_) : ids_[slot];
  }
  // Row of x that `position` multiplies.
  int64_t row(int64_t position) const { return sorted_.slots[position] / top_k_; }

  // Whether rows of x are multiplied by their slot's weight here, and by which.
  bool weight_on_input() const { return weight_on_input_; }
  float input_weight(int64_t position) const { return weights_[sorted_.slots[position]]; }
  // By which the result of `slot` is multiplied; standard format only.
  float output_weight(int64_t slot) const { return weight_on_input_ ? 1.0f : weights_[slot]; }

 private:
  const TensorView x_;
  const int64_t max_m_ = 0;  // 0: standard format
  const int top_k_ = 1;
  const std::span<const int32_t> ids_;
  const std::span<const float> weights_;
  const bool weight_on_input_ = false;
  SortedSlots sorted_;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CALL_ROUTE_H_
