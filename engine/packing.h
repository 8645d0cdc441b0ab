// Packed containers to canonical codes: the bit layouts of checkpoints, one function each. Pure; sizes are the caller's
// duty.
//
// Words are 32 bits, little-endian, and hold 32 / b codes of b = 4 or 8 bits, least significant first. Canonical codes are
// those of expert_weights.h: rows of N, along K, unsigned. Canonical zero points are [N, G], one byte each.
#ifndef MOED_ENGINE_PACKING_H_
#define MOED_ENGINE_PACKING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace moed {

// How codes lie in a word that is packed along N: natural, or as AWQ has them: nibble i holds column order[i],
// order = 0 2 4 6 1 3 5 7 (4 bits only).
enum class NibbleOrder : uint8_t { kNatural, kAwq };

// GPTQ: words [ceil(K b / 32), N], packed along K. A word of column n is consecutive codes of canonical row n, so that
// unpacking is a transpose of words.
void UnpackAlongK(std::span<const uint8_t> words, int64_t rows, int64_t cols, int bits, std::vector<uint8_t>* codes);

// compressed-tensors: words [N, ceil(K b / 32)], packed along K: canonical rows, cut to K.
void UnpackRows(std::span<const uint8_t> words, int64_t rows, int64_t cols, int bits, std::vector<uint8_t>* codes);

// AWQ and Quark int4: words [K, N / 8], packed along N, N a multiple of 8. `flip` turns two's complement nibbles into codes
// with zero point 8.
void UnpackAlongN(std::span<const uint8_t> words, int64_t rows, int64_t cols, NibbleOrder order, bool flip,
                  std::vector<uint8_t>* codes);

// Rows of words [N, K / 8] in AWQ order, and two's complement, in place: to natural order and codes with zero point 8.
void ReorderNibbles(NibbleOrder order, bool flip, std::span<uint8_t> words);

// Int4 values one a byte, [N, K] two's complement: to codes with zero point 8. INVALID_ARGUMENT names the first value
// outside -8 .. 7 and its place.
absl::Status PackSignedInt4(std::span<const uint8_t> values, int64_t rows, int64_t cols, std::vector<uint8_t>* codes);

// Int8 values to codes with zero point 128, in place.
void OffsetInt8(std::span<uint8_t> values);

// Zero points packed along N, words [G, ceil(N b / 32)] (GPTQ, AWQ, Quark). `add` is added to each whole word, modulo 2^32,
// before it is taken apart: the writer of GPTQ version 1 subtracts from whole words, so that a zero of 0 borrows from the
// next.
void UnpackZeros(std::span<const uint8_t> words, int64_t groups, int64_t rows, int bits, uint32_t add, NibbleOrder order,
                 std::vector<uint8_t>* zero_points);
// What GPTQ version 1 subtracted: one in every field.
uint32_t GptqV1Offset(int bits);

// Zero points packed along N, words [ceil(N b / 32), G] (compressed-tensors).
void UnpackZerosByColumn(std::span<const uint8_t> words, int64_t groups, int64_t rows, int bits,
                         std::vector<uint8_t>* zero_points);

// Whether every zero point [N, G] is `want`. INVALID_ARGUMENT names group and column of the first that is not.
absl::Status CheckZerosAre(std::span<const uint8_t> zero_points, int64_t groups, int want);

// [G, N] elements of `bytes` bytes to [N, G].
void TransposeElements(std::span<const uint8_t> in, int64_t in_rows, int64_t in_cols, int bytes, std::vector<uint8_t>* out);

// int32 [K] as numbers.
void ReadInt32(std::span<const uint8_t> bytes, std::vector<int32_t>* out);
// Whether g_idx is k / group everywhere, or within [0, groups). INVALID_ARGUMENT names the first k that is not.
absl::Status CheckTrivialGroupIndex(std::span<const int32_t> g_idx, int64_t group);
absl::Status CheckGroupRange(std::span<const int32_t> g_idx, int64_t groups);

}  // namespace moed

#endif  // MOED_ENGINE_PACKING_H_
