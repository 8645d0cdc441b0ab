// CPU kernels for AVX-512 (F, BW, VL, DQ): 16 floats a vector, one vector a panel; integer products by multiply-add.
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/madd_dot-inl.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moed::cpu {

const KernelTable& Avx512Kernels() {
  static constexpr KernelTable table = MakeTable<Avx512>();
  return table;
}

const DotTable& Avx512Dots() {
  // With 32 registers the direct way is the faster one for any number of rows.
  static constexpr DotTable table = MakeMaddTable<Avx512, kRowBlock, 0>();
  return table;
}

}  // namespace moed::cpu
