// Integer products by AVX-512 VNNI: VPDPBUSD adds four u8 x s8 products a lane, exactly.
#include "kernels/cpu/int8_dot-inl.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moed::cpu {
namespace {

struct Vnni : IntegerSums<Avx512> {
  static constexpr int kPerWord = 4;
  // Spelled out: GCC 12 copies the sums of the intrinsic from register to register and back in each step of a loop.
  static MOED_INLINE Acc Dot(Acc acc, Acc weights, Acc x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(x));
    return acc;
  }
};

// 8 rows x 2 vectors of sums hide the latency of the instruction, and GCC 12 keeps them in registers.
void Multiply(const DotArgs& args) { MultiplyQuads<Vnni, WordTiles<Vnni, 8, 6>, 8>(args); }

}  // namespace

const DotTable& VnniDots() {
  static constexpr DotTable table = {
      {RowCodes::kInt8, RowOrder::kNibbleQuads}, {RowCodes::kInt8, RowOrder::kNatural}, 0, 0, MakeIntegerRow<Avx512>, Multiply};
  return table;
}

}  // namespace moed::cpu
