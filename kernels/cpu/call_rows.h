// The rows that a call multiplies: x and h, widened, quantized by the scheme's rules, in packed order, as float32 or as records.
//
// Every function makes one row and writes that row only, so that different rows may be made by different threads at once.
#ifndef MOED_KERNELS_CPU_CALL_ROWS_H_
#define MOED_KERNELS_CPU_CALL_ROWS_H_

#include <cstdint>

#include "kernels/activation_quant.h"
#include "kernels/cpu/call_plan.h"
#include "kernels/cpu/call_route.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/layer_store.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

class CallRows {
 public:
  CallRows(const MoeDesc& desc, const KernelTable& kernels, const LayerStore& store, const CallRoute& route, const CallPlan& plan,
           const CallBuffers& buffers)
      : desc_(desc), kernels_(kernels), store_(store), route_(route), plan_(plan), buffers_(buffers) {}

  // Whether a scale of x (of h) spans all rows of the call, so that every row must be widened (computed) before one is quantized.
  bool InputSpansRows() const { return SpansRows(desc_.scheme.gate.input) || SpansRows(desc_.scheme.up.input); }
  bool HiddenSpansRows() const { return SpansRows(desc_.scheme.down.input); }
  // Whether h needs a step of its own between the two multiplications.
  bool HiddenNeedsWork() const;

  // Rows of the input: those of x, or one for each sorted position where x depends on the slot.
  int64_t input_rows() const { return plan_.input_per_slot ? route_.positions() : route_.x().rows; }
  // Row `row` of the input as float32 in plain order, times the slot's weight when that goes to the input.
  void WidenInput(int64_t row) const;
  // The largest magnitudes over all rows, for scales that span them; after WidenInput of every row.
  void MeasureInput();
  void MeasureHidden();
  // The same row, quantized and in packed order, for gate and for up.
  void FinishInput(int64_t row) const;
  // Whether gate and up of this expert see the same input, so that one multiplication does for both.
  bool SameInput(int expert) const;
  // Whether the kernel wants the rows of `expert` one after the other, though they are not.
  bool WantsSorted(int expert) const {
    const int64_t rows = route_.sorted().begin[expert + 1] - route_.sorted().begin[expert];
    return plan_.sorted_copy && plan_.gate_up.For(rows) != nullptr &&
           rows >= plan_.gate_up.dots->ContiguousFrom(store_.shape().gate_up.format.group);
  }
  // The records of sorted position `position`, copied from its row's; nothing where that is not wanted.
  void CopyToSorted(int64_t position) const;
  // Row `position` of h likewise.
  void FinishHidden(int64_t position) const;

  // Row of the input that sorted position `position` multiplies.
  int64_t InputRow(int64_t position) const { return plan_.input_per_slot ? position : route_.row(position); }

 private:
  // Row `row` of x as float32 [hidden].
  void Widen(int64_t row, float* out) const;

  // One projection's input: its rule, its stored scale, the largest magnitude of all rows, the order that it is packed in.
  struct Rule {
    const ActivationScheme& scheme;
    float stored;
    float absmax;
    const int32_t* order;
  };

  // x[n] in plain order becomes float32 in packed order in `out` (may be x), padded to `stride`; or a record of `stage`.
  void Finish(const Rule& rule, const StagePlan& stage, int64_t depth, float* x, int64_t n, float* out, int64_t stride,
              uint8_t* record) const;

  const MoeDesc& desc_;
  const KernelTable& kernels_;
  const LayerStore& store_;
  const CallRoute& route_;
  const CallPlan& plan_;
  const CallBuffers& buffers_;
  float gate_max_ = 0.0f, up_max_ = 0.0f, hidden_max_ = 0.0f;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CALL_ROWS_H_
