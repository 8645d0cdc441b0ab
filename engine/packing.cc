#include "engine/packing.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

int64_t Words(int64_t codes, int bits) { return (codes * bits + 31) / 32; }

uint32_t LoadWord(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Column 8 c + j lies in nibble kNibbleOf[j] of word c.
constexpr std::array<int, 8> kNatural = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr std::array<int, 8> kAwq = {0, 4, 1, 5, 2, 6, 3, 7};
const std::array<int, 8>& NibbleOf(NibbleOrder order) { return order == NibbleOrder::kAwq ? kAwq : kNatural; }

constexpr uint32_t kSignBits = 0x88888888u;

// Nibble k of out[i] = nibble i of in[k]: swaps ever smaller blocks across the diagonal.
void TransposeNibbles(std::array<uint32_t, 8>* words) {
  std::array<uint32_t, 8>& w = *words;
  const auto swap = [&w](int i, int j, int shift, uint32_t mask) {
    const uint32_t moved = ((w[i] >> shift) ^ w[j]) & mask;
    w[j] ^= moved;
    w[i] ^= moved << shift;
  };
  for (int i : {0, 1, 2, 3}) swap(i, i + 4, 16, 0x0000FFFFu);
  for (int i : {0, 1, 4, 5}) swap(i, i + 2, 8, 0x00FF00FFu);
  for (int i : {0, 2, 4, 6}) swap(i, i + 1, 4, 0x0F0F0F0Fu);
}

}  // namespace

void UnpackAlongK(std::span<const uint8_t> words, int64_t rows, int64_t cols, int bits, std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols * bits + 7) / 8;
  codes->resize(static_cast<size_t>(rows * row_bytes));
  // 16 words of a column block at a time: both sides stay within a few cache lines.
  constexpr int64_t kBlock = 16;
  const int64_t per_row = Words(cols, bits);
  for (int64_t first = 0; first < rows; first += kBlock) {
    const int64_t last = std::min(first + kBlock, rows);
    for (int64_t word = 0; word < per_row; ++word) {
      const int64_t bytes = std::min<int64_t>(4, row_bytes - word * 4);
      const uint8_t* from = words.data() + (word * rows + first) * 4;
      for (int64_t n = first; n < last; ++n, from += 4) {
        std::memcpy(codes->data() + n * row_bytes + word * 4, from, bytes);
      }
    }
  }
}

void UnpackRows(std::span<const uint8_t> words, int64_t rows, int64_t cols, int bits, std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols * bits + 7) / 8;
  codes->resize(static_cast<size_t>(rows * row_bytes));
  for (int64_t n = 0; n < rows; ++n) {
    std::memcpy(codes->data() + n * row_bytes, words.data() + n * Words(cols, bits) * 4, row_bytes);
  }
}

void UnpackAlongN(std::span<const uint8_t> words, int64_t rows, int64_t cols, NibbleOrder order, bool flip,
                  std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols + 1) / 2;
  const int64_t columns = rows / 8;  // of words
  codes->resize(static_cast<size_t>(rows * row_bytes));
  const std::array<int, 8>& nibble_of = NibbleOf(order);
  // A square of 8 x 8 nibbles at a time; 16 words side by side fill a cache line of the input.
  constexpr int64_t kBlock = 16;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t last = std::min(first + kBlock, columns);
    for (int64_t k = 0; k < cols; k += 8) {
      const int64_t depth = std::min<int64_t>(8, cols - k);
      const int64_t bytes = (depth + 1) / 2;
      for (int64_t c = first; c < last; ++c) {
        std::array<uint32_t, 8> square = {};
        for (int64_t i = 0; i < depth; ++i) square[i] = LoadWord(words.data() + ((k + i) * columns + c) * 4);
        TransposeNibbles(&square);
        for (int64_t j = 0; j < 8; ++j) {
          const uint32_t row = square[nibble_of[j]] ^ (flip ? kSignBits : 0);
          std::memcpy(codes->data() + (8 * c + j) * row_bytes + k / 2, &row, bytes);
        }
      }
    }
  }
}

void ReorderNibbles(NibbleOrder order, bool flip, std::span<uint8_t> words) {
  const std::array<int, 8>& nibble_of = NibbleOf(order);
  for (size_t at = 0; at + 4 <= words.size(); at += 4) {
    const uint32_t word = LoadWord(words.data() + at);
    uint32_t natural = 0;
    for (int j = 0; j < 8; ++j) natural |= ((word >> (4 * nibble_of[j])) & 0xF) << (4 * j);
    if (flip) natural ^= kSignBits;
    std::memcpy(words.data() + at, &natural, 4);
  }
}

absl::Status PackSignedInt4(std::span<const uint8_t> values, int64_t rows, int64_t cols, std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols + 1) / 2;
  codes->resize(static_cast<size_t>(rows * row_bytes));
  for (int64_t n = 0; n < rows; ++n) {
    const uint8_t* from = values.data() + n * cols;
    uint8_t* to = codes->data() + n * row_bytes;
    uint8_t outside = 0;  // -8 .. 7 plus 8 is 0 .. 15: anything above has a high nibble
    for (int64_t pair = 0; pair < cols / 2; ++pair) {
      const uint8_t even = static_cast<uint8_t>(from[2 * pair] + 8), odd = static_cast<uint8_t>(from[2 * pair + 1] + 8);
      outside |= even | odd;
      to[pair] = static_cast<uint8_t>((even & 0xF) | (odd << 4));
    }
    if (cols % 2 != 0) {
      const uint8_t even = static_cast<uint8_t>(from[cols - 1] + 8);
      outside |= even;
      to[row_bytes - 1] = even & 0xF;
    }
    if (outside <= 0xF) continue;
    int64_t k = 0;
    while (static_cast<uint8_t>(from[k] + 8) <= 0xF) ++k;
    return absl::InvalidArgumentError(absl::StrCat("element ", n * cols + k, " (row ", n, ", column ", k, ") is ",
                                                   static_cast<int>(static_cast<int8_t>(from[k])),
                                                   ", want a 4-bit value in -8 .. 7"));
  }
  return absl::OkStatus();
}

void OffsetInt8(std::span<uint8_t> values) {
  for (uint8_t& value : values) value ^= 0x80;
}

void UnpackZeros(std::span<const uint8_t> words, int64_t groups, int64_t rows, int bits, uint32_t add, NibbleOrder order,
                 std::vector<uint8_t>* zero_points) {
  zero_points->resize(static_cast<size_t>(groups * rows));
  const int64_t per_word = 32 / bits, columns = Words(rows, bits);
  const uint32_t mask = bits == 4 ? 0xF : 0xFF;
  const std::array<int, 8>& nibble_of = NibbleOf(order);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t n = 0; n < rows; ++n) {
      const uint32_t word = LoadWord(words.data() + (group * columns + n / per_word) * 4) + add;
      (*zero_points)[n * groups + group] = static_cast<uint8_t>((word >> (bits * nibble_of[n % per_word])) & mask);
    }
  }
}

uint32_t GptqV1Offset(int bits) { return bits == 4 ? 0x11111111u : 0x01010101u; }

void UnpackZerosByColumn(std::span<const uint8_t> words, int64_t groups, int64_t rows, int bits,
                         std::vector<uint8_t>* zero_points) {
  zero_points->resize(static_cast<size_t>(groups * rows));
  const int64_t per_word = 32 / bits;
  const uint32_t mask = bits == 4 ? 0xF : 0xFF;
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t group = 0; group < groups; ++group) {
      const uint32_t word = LoadWord(words.data() + (n / per_word * groups + group) * 4);
      (*zero_points)[n * groups + group] = static_cast<uint8_t>((word >> (bits * (n % per_word))) & mask);
    }
  }
}

absl::Status CheckZerosAre(std::span<const uint8_t> zero_points, int64_t groups, int want) {
  for (size_t at = 0; at < zero_points.size(); ++at) {
    if (zero_points[at] == want) continue;
    return absl::InvalidArgumentError(absl::StrCat("zero point of group ", static_cast<int64_t>(at) % groups, ", column ",
                                                   static_cast<int64_t>(at) / groups, " is ",
                                                   static_cast<int>(zero_points[at]), ", want ", want));
  }
  return absl::OkStatus();
}

void TransposeElements(std::span<const uint8_t> in, int64_t in_rows, int64_t in_cols, int bytes, std::vector<uint8_t>* out) {
  out->resize(in.size());
  for (int64_t r = 0; r < in_rows; ++r) {
    for (int64_t c = 0; c < in_cols; ++c) {
      std::memcpy(out->data() + (c * in_rows + r) * bytes, in.data() + (r * in_cols + c) * bytes, bytes);
    }
  }
}

void ReadInt32(std::span<const uint8_t> bytes, std::vector<int32_t>* out) {
  out->resize(bytes.size() / 4);
  for (size_t at = 0; at < out->size(); ++at) (*out)[at] = static_cast<int32_t>(LoadWord(bytes.data() + 4 * at));
}

absl::Status CheckTrivialGroupIndex(std::span<const int32_t> g_idx, int64_t group) {
  for (int64_t k = 0; k < static_cast<int64_t>(g_idx.size()); ++k) {
    if (g_idx[k] == k / group) continue;
    return absl::InvalidArgumentError(absl::StrCat("entry ", k, " is ", g_idx[k], ", want ", k / group,
                                                   " (groups of ", group, ", act-order (desc_act) is not declared)"));
  }
  return absl::OkStatus();
}

absl::Status CheckGroupRange(std::span<const int32_t> g_idx, int64_t groups) {
  for (size_t k = 0; k < g_idx.size(); ++k) {
    if (g_idx[k] >= 0 && g_idx[k] < groups) continue;
    return absl::InvalidArgumentError(absl::StrCat("entry ", k, " is ", g_idx[k], ", want a group in 0 .. ", groups - 1));
  }
  return absl::OkStatus();
}

}  // namespace moed
