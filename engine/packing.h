// Packed containers to canonical codes: the bit layouts of checkpoints, one function each. Pure; sizes are the caller's duty.
#ifndef MOED_ENGINE_PACKING_H_
#define MOED_ENGINE_PACKING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/expert_weights.h"

namespace moed {

// GPTQ int4: qweight is [ceil(K/8), N] little-endian words, codes packed along K, least significant nibble first. A word of
// column n is 8 consecutive codes of canonical row n, so unpacking is a transpose of words.
void UnpackGptqInt4(std::span<const uint8_t> qweight, int64_t rows, int64_t cols, std::vector<uint8_t>* codes);

// compressed-tensors int4: weight_packed is [N, ceil(K/8)] words along K with an offset of 8: canonical rows, cut to K.
void UnpackRowsInt4(std::span<const uint8_t> packed, int64_t rows, int64_t cols, std::vector<uint8_t>* codes);

// [G, N] elements of `bytes` bytes to [N, G].
void TransposeElements(std::span<const uint8_t> in, int64_t in_rows, int64_t in_cols, int bytes, std::vector<uint8_t>* out);

// Whether every zero point of a symmetric GPTQ int4 file is 8. `qzeros` is [G, ceil(N/8)] words packed along N; version 1
// stores zero - 1 (the whole word minus 0x11111111), version 2 the zero itself. INVALID_ARGUMENT names group and column of
// the first that differs.
absl::Status CheckGptqSymmetricZeros(std::span<const uint8_t> qzeros, int64_t groups, int64_t rows, bool version2);

// Whether g_idx (int32 [K]) is k / group everywhere. INVALID_ARGUMENT names the first k that differs.
absl::Status CheckTrivialGroupIndex(std::span<const uint8_t> g_idx, int64_t group);

}  // namespace moed

#endif  // MOED_ENGINE_PACKING_H_
