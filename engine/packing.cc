#include "engine/packing.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr int64_t kCodesPerWord = 8;

int64_t Words(int64_t codes) { return (codes + kCodesPerWord - 1) / kCodesPerWord; }

uint32_t LoadWord(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

}  // namespace

void UnpackGptqInt4(std::span<const uint8_t> qweight, int64_t rows, int64_t cols, std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols + 1) / 2;
  codes->resize(static_cast<size_t>(rows * row_bytes));
  // 16 words of a column block at a time: both sides stay within a few cache lines.
  constexpr int64_t kBlock = 16;
  const int64_t words = Words(cols);
  for (int64_t first = 0; first < rows; first += kBlock) {
    const int64_t last = std::min(first + kBlock, rows);
    for (int64_t word = 0; word < words; ++word) {
      const int64_t bytes = std::min<int64_t>(4, row_bytes - word * 4);
      const uint8_t* from = qweight.data() + (word * rows + first) * 4;
      for (int64_t n = first; n < last; ++n, from += 4) {
        std::memcpy(codes->data() + n * row_bytes + word * 4, from, bytes);
      }
    }
  }
}

void UnpackRowsInt4(std::span<const uint8_t> packed, int64_t rows, int64_t cols, std::vector<uint8_t>* codes) {
  const int64_t row_bytes = (cols + 1) / 2;
  codes->resize(static_cast<size_t>(rows * row_bytes));
  for (int64_t n = 0; n < rows; ++n) {
    std::memcpy(codes->data() + n * row_bytes, packed.data() + n * Words(cols) * 4, row_bytes);
  }
}

void TransposeElements(std::span<const uint8_t> in, int64_t in_rows, int64_t in_cols, int bytes, std::vector<uint8_t>* out) {
  out->resize(in.size());
  for (int64_t r = 0; r < in_rows; ++r) {
    for (int64_t c = 0; c < in_cols; ++c) {
      std::memcpy(out->data() + (c * in_rows + r) * bytes, in.data() + (r * in_cols + c) * bytes, bytes);
    }
  }
}

absl::Status CheckGptqSymmetricZeros(std::span<const uint8_t> qzeros, int64_t groups, int64_t rows, bool version2) {
  const int64_t words = Words(rows);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t word = 0; word < words; ++word) {
      uint32_t value = LoadWord(qzeros.data() + (group * words + word) * 4);
      // The writer of version 1 subtracts from the whole word, so the reader adds to the whole word.
      if (!version2) value += 0x11111111u;
      for (int64_t j = 0; j < kCodesPerWord && word * kCodesPerWord + j < rows; ++j) {
        const uint32_t zero = (value >> (4 * j)) & 0xF;
        if (zero == 8) continue;
        return absl::InvalidArgumentError(absl::StrCat("zero point of group ", group, ", column ", word * kCodesPerWord + j,
                                                       " is ", zero, ", want 8 since the config says sym: true (",
                                                       version2 ? "checkpoint_format gptq_v2" : "checkpoint_format gptq", ")"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTrivialGroupIndex(std::span<const uint8_t> g_idx, int64_t group) {
  for (int64_t k = 0; k < static_cast<int64_t>(g_idx.size() / 4); ++k) {
    const int32_t got = static_cast<int32_t>(LoadWord(g_idx.data() + 4 * k));
    if (got == k / group) continue;
    return absl::InvalidArgumentError(absl::StrCat("entry ", k, " is ", got, ", want ", k / group,
                                                   " (groups of ", group, ", desc_act false)"));
  }
  return absl::OkStatus();
}

}  // namespace moed
