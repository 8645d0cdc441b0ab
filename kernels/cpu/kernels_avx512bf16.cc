// bf16 products by AVX-512 BF16: VDPBF16PS adds two bf16 products a lane in float32.
#include "kernels/cpu/bf16_dot-inl.h"

namespace moed::cpu {
namespace {

void Multiply(const DotArgs& args) { MultiplyBf16<Bf16Sums, WordTiles<Bf16Sums, 8, 6>, 8>(args); }

}  // namespace

const DotTable& Avx512Bf16Dots() {
  // One or two rows are bound by memory, if bytes need not be made into pairs first: that takes longer than float32 arithmetic.
  static constexpr DotTable table = {
      {RowCodes::kBf16, RowOrder::kNibblePairs}, {RowCodes::kBf16, RowOrder::kNatural, 3}, 0, 0, MakeBf16Row, Multiply};
  return table;
}

}  // namespace moed::cpu
