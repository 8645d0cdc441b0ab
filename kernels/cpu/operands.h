// In which arithmetic a CPU backend multiplies a projection, and how a row of x is held for it.
#ifndef MOED_KERNELS_CPU_OPERANDS_H_
#define MOED_KERNELS_CPU_OPERANDS_H_

#include "kernels/cpu/dot_table.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/quant.h"
#include "kernels/tensor.h"

namespace moed::cpu {

// The kernels of one backend: float32 ones for everything, and dot products where the backend has them.
struct CpuKernels {
  const KernelTable* base = nullptr;
  const DotTable* int8 = nullptr;
  const DotTable* bf16 = nullptr;
};

// Input features of a group whose integer products are sure to fit into 32 bits: x 255 of a weight less its zero point x 128 of x.
inline constexpr int64_t kLongestExactGroup = int64_t{1} << 16;

// Whether integer products execute `linear`: int4, int8 or FP4 weights of a packed layout, and int8 activations with one scale for a
// row or for all rows.
bool FitsInt8Dots(const LinearScheme& linear);

// Whether bf16 products execute `linear` on x of bf16: every packed element that bf16 holds exactly (all but f16 and f32), and
// activations that are not quantized.
bool FitsBf16Dots(const LinearScheme& linear);

// The dot products that `kernels` uses for `linear`, whose groups hold `group` features, on x of type `x`; null: float32 arithmetic,
// also for groups too long for exact integer sums.
const DotTable* DotsFor(const CpuKernels& kernels, const LinearScheme& linear, int64_t group, DType x);

// How `dots` takes rows that meet such weights.
const RowKind& KindOf(const DotTable& dots, ElementType weights);

// A row of x for `dots` and weights of `panel`.
RowFormat MakeRowFormat(const DotTable& dots, const PanelFormat& panel);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_OPERANDS_H_
