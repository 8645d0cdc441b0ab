// CPU kernels for AVX2 with FMA and F16C: 8 floats a vector, two vectors a panel; integer products by multiply-add.
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/madd_dot-inl.h"
#include "kernels/cpu/simd_avx2-inl.h"

namespace moed::cpu {

const KernelTable& Avx2Kernels() {
  static constexpr KernelTable table = MakeTable<Avx2>();
  return table;
}

const DotTable& Avx2Dots() {
  // 3 rows x 4 vectors of sums, of 16 registers.
  static constexpr DotTable table = MakeMaddTable<Avx2, 16, 3>();
  return table;
}

}  // namespace moed::cpu
