// The boundary between host code and the dot-product kernels: rows of x as codes, and the kernels that multiply them.
//
// A dot-product instruction multiplies words: 4 int8, 2 int16 or 2 bf16 factors side by side in 32 bits. A row of x is therefore
// made into a record of such words once (MakeRow), and every expert's kernel reads it (Multiply). As in kernel_table.h, the
// instruction-set files behind a DotTable contain no function with external linkage but the one that returns it.
#ifndef MOED_KERNELS_CPU_DOT_TABLE_H_
#define MOED_KERNELS_CPU_DOT_TABLE_H_

#include <cstdint>

#include "kernels/cpu/packed_layout.h"

namespace moed::cpu {

// What the factors of x are: codes of dynamic or static int8 quantization, in 8 or in 16 bits, or the values as bf16.
enum class RowCodes : uint8_t { kInt8, kInt16, kBf16 };

// Where input feature i of a block of 8 lies in the block of a row: the order in which the weights' words come apart.
enum class RowOrder : uint8_t {
  kNatural,      // 0 1 2 3 4 5 6 7
  kNibbleQuads,  // 0 2 4 6 1 3 5 7: low nibbles of a word, then the high ones
  kNibblePairs,  // 0 4 1 5 2 6 3 7: nibble s and s + 4 of a word
  kHalfWords,    // 0 2 1 3 4 6 5 7: bytes 0 and 2 of a word, then 1 and 3
};

// A row of x as a record: codes, zeros from `depth` up to the scale, the row's scale, sums of codes.
struct RowFormat {
  RowCodes codes = RowCodes::kInt8;
  RowOrder order = RowOrder::kNatural;
  int64_t depth = 0;         // features, as PanelFormat::depth
  int64_t group = 0;         // features that share a sum, as PanelFormat::group
  int64_t scale_offset = 0;  // bytes to the row's scale, float32; int8 and int16 only
  int64_t sums_offset = 0;   // bytes to a sum over each group: int32 codes times sum_factor, or float32 values for bf16
  bool half_sums = false;    // int8 only: two int16 instead, of the codes in the lower and in the upper halves of words
  int32_t sum_factor = -1;   // minus the weights' zero point, or -1 where every output feature has its own
  int64_t bytes = 0;         // from one row to the next: a multiple of 64

  int64_t code_bytes() const { return codes == RowCodes::kInt8 ? 1 : 2; }
};

// How a row becomes int8 codes (the rules of kernels/activation_quant.h); bf16 rows need none.
enum class RowScale : uint8_t {
  kOwn,     // largest magnitude of the row / 127
  kAbsMax,  // value / 127
  kStatic,  // value; codes reach -128
};

struct RowArgs {
  const RowFormat* format = nullptr;
  const float* x = nullptr;  // [depth] in packed order, zeros at padding
  RowScale rule = RowScale::kOwn;
  float value = 0.0f;
  uint8_t* out = nullptr;    // format->bytes, aligned to 64; every byte written
};

// Integer products take FP4 as twice its value, 12 higher.
inline constexpr int32_t kFp4Zero = 12;

// Groups up to here are one tile product of AMX.
inline constexpr int64_t kShortGroupFeatures = 64;

inline constexpr int64_t kDotScratchBytes = 80 * 1024;

// tile[pair][row][32] = x[row] . w[32 columns of the pair]: over ascending groups, the group's product (exact for integers, float32
// for bf16) times its scale, by fused multiply-adds in float32; for integers times the row's scale in the end.
struct DotArgs {
  const PanelFormat* format = nullptr;
  const uint8_t* weights = nullptr;     // first pair; pairs follow each other
  int64_t pairs = 0;
  const RowFormat* row = nullptr;
  const uint8_t* const* rows = nullptr; // [count] records; see DotTable::contiguous_from
  int64_t count = 0;                    // 1 .. kRowBlock
  float* tile = nullptr;                // [pairs][count][32], aligned to 64
  uint8_t* scratch = nullptr;           // kDotScratchBytes, aligned to 64
};

// How rows are held for weights of one size.
struct RowKind {
  RowCodes codes = RowCodes::kInt8;
  RowOrder order = RowOrder::kNatural;
  // An expert with fewer rows is faster in float32 arithmetic, which differs in the last bits; only for bf16, and not where a call
  // has to be deterministic.
  int64_t float_below = 0;
  // In groups of so many features and fewer the sums of a row are kept for the halves of words; 4-bit weights and int8 codes only.
  int64_t half_sums_up_to = 0;
};

// Data but for the two functions, which need the table's instructions.
struct DotTable {
  RowKind nibbles;  // rows that meet int4 and FP4 weights
  RowKind others;
  // From so many on, the rows of one expert must follow each other in memory, with 16 readable records after the last; 0: never.
  int64_t contiguous_from;
  int64_t short_contiguous_from;  // the same for weights in groups of up to kShortGroupFeatures
  void (*make_row)(const RowArgs& args);
  void (*multiply)(const DotArgs& args);

  int64_t ContiguousFrom(int64_t group) const { return group <= kShortGroupFeatures ? short_contiguous_from : contiguous_from; }
};

const DotTable& Avx2Dots();        // int8: AVX2
const DotTable& AvxVnniDots();     // int8: AVX2, AVX-VNNI
const DotTable& Avx512Dots();      // int8: AVX-512 F, BW, VL, DQ
const DotTable& VnniDots();        // int8: the same and AVX-512 VNNI
const DotTable& Avx512Bf16Dots();  // bf16: AVX-512 F, BW, VL, DQ, BF16
const DotTable& AmxInt8Dots();     // int8: AMX int8 beside VNNI
const DotTable& AmxBf16Dots();     // bf16: AMX bf16 beside AVX-512 BF16

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_DOT_TABLE_H_
