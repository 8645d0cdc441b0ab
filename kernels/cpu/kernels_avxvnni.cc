// Integer products by AVX-VNNI: VPDPBUSD in 256-bit vectors, for processors that have it without AVX-512.
#include "kernels/cpu/int8_dot-inl.h"
#include "kernels/cpu/simd_avx2-inl.h"

namespace moed::cpu {
namespace {

struct AvxVnni : IntegerSums<Avx2> {
  static constexpr int kPerWord = 4;
  // Spelled out: GCC 12 copies the sums of the intrinsic from register to register and back in each step of a loop.
  static MOED_INLINE Acc Dot(Acc acc, Acc weights, Acc x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weights), "x"(x));
    return acc;
  }
};

// 3 rows x 4 vectors of sums, of 16 registers; 5 x 2 and the words of a block straight from the packed codes.
void Multiply(const DotArgs& args) { MultiplyQuads<AvxVnni, WordTiles<AvxVnni, 3, 0>, 5>(args); }

}  // namespace

const DotTable& AvxVnniDots() {
  static constexpr DotTable table = {
      {RowCodes::kInt8, RowOrder::kNibbleQuads}, {RowCodes::kInt8, RowOrder::kNatural}, 0, 0, MakeIntegerRow<Avx2>, Multiply};
  return table;
}

}  // namespace moed::cpu
