// Integer products by AVX-512 VNNI: VPDPBUSD adds four u8 x s8 products a lane, exactly.
#include "kernels/cpu/int8_dot-inl.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moed::cpu {
namespace {

struct Vnni : IntegerSums<Avx512> {
  static constexpr int kPerWord = 4;
  static MOED_INLINE Acc Dot(Acc acc, Acc weights, Acc x) { return _mm512_dpbusd_epi32(acc, weights, x); }
};

// 8 rows x 2 vectors of sums hide the latency of the instruction, and GCC 12 keeps them in registers.
using Tiles = WordTiles<Vnni, 8>;

void Multiply(const DotArgs& args) {
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyWords<Vnni, NibbleQuads<Avx512>, Tiles>(args);
    case ElementType::kFp4E2m1: return MultiplyWords<Vnni, Fp4Quads<Avx512>, Tiles>(args);
    default: return MultiplyWords<Vnni, ByteQuads<Avx512>, Tiles>(args);
  }
}

}  // namespace

const DotTable& VnniDots() {
  static constexpr DotTable table = {
      {RowCodes::kInt8, RowOrder::kNibbleQuads}, {RowCodes::kInt8, RowOrder::kNatural}, false, MakeIntegerRow<Avx512>, Multiply};
  return table;
}

}  // namespace moed::cpu
