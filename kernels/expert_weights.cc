#include "kernels/expert_weights.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/number_formats.h"

namespace moed {
namespace {

template <typename T>
T LoadAs(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

float DecodeScale(ScaleType type, const uint8_t* bytes) {
  switch (type) {
    case ScaleType::kNone: return 1.0f;
    case ScaleType::kF32: return LoadAs<float>(bytes);
    case ScaleType::kBf16: return Bf16ToFloat(LoadAs<uint16_t>(bytes));
    case ScaleType::kF16: return F16ToFloat(LoadAs<uint16_t>(bytes));
    case ScaleType::kE8m0: return E8m0ToFloat(*bytes);
    case ScaleType::kE4m3: return E4m3ToFloat(*bytes);
  }
  return 1.0f;
}

// Element k of a row's code stream as its raw code (at most 8 bits).
uint32_t CodeAt(const uint8_t* row, int bits, int64_t k) {
  if (bits == 8) return row[k];
  if (bits == 4) return (row[k / 2] >> (4 * (k & 1))) & 0xF;
  const int64_t bit = k * bits;
  uint32_t word = row[bit / 8];
  if (bit % 8 + bits > 8) word |= static_cast<uint32_t>(row[bit / 8 + 1]) << 8;
  return (word >> (bit % 8)) & ((1u << bits) - 1);
}

// Values of all codes of a small float format; entries beyond its codes are unused.
using ValueTable = std::array<float, 256>;

template <typename Decode>
ValueTable MakeTable(int bits, const Decode& decode) {
  ValueTable table = {};
  for (int code = 0; code < 1 << bits; ++code) table[code] = decode(static_cast<uint8_t>(code));
  return table;
}

const ValueTable& TableOf(ElementType element) {
  static const ValueTable fp8 = MakeTable(8, E4m3ToFloat), fp4 = MakeTable(4, E2m1ToFloat);
  static const ValueTable fp6_e2m3 = MakeTable(6, E2m3ToFloat), fp6_e3m2 = MakeTable(6, E3m2ToFloat);
  if (element == ElementType::kFp8E4m3) return fp8;
  if (element == ElementType::kFp4E2m1) return fp4;
  return element == ElementType::kFp6E2m3 ? fp6_e2m3 : fp6_e3m2;
}

// Codes [first, first + count) of a row, one a byte. Loops without branches: the compiler does many codes at once.
void UnpackCodes(const uint8_t* row, int bits, int64_t first, int64_t count, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, row + first, static_cast<size_t>(count));
    return;
  }
  int64_t done = 0;
  if (bits == 4 && first % 2 == 0) {
    const uint8_t* pairs = row + first / 2;
    for (int64_t pair = 0; pair < count / 2; ++pair) {
      out[2 * pair] = pairs[pair] & 0xF;
      out[2 * pair + 1] = pairs[pair] >> 4;
    }
    done = count / 2 * 2;
  }
  for (; done < count; ++done) out[done] = static_cast<uint8_t>(CodeAt(row, bits, first + done));
}

void CopyUnquantizedRow(ElementType element, const uint8_t* row, int64_t cols, float* out) {
  for (int64_t k = 0; k < cols; ++k) {
    if (element == ElementType::kF32) out[k] = LoadAs<float>(row + 4 * k);
    if (element == ElementType::kBf16) out[k] = Bf16ToFloat(LoadAs<uint16_t>(row + 2 * k));
    if (element == ElementType::kF16) out[k] = F16ToFloat(LoadAs<uint16_t>(row + 2 * k));
  }
}


// Scale and zero point of group `at` of a matrix.
struct GroupValues {
  float scale;
  int zero;
};

GroupValues ValuesOf(const LinearWeights& weights, int64_t at) {
  const WeightScheme& scheme = weights.scheme;
  GroupValues values;
  values.scale = DecodeScale(scheme.scale, weights.scales.data() + at * ScaleBytes(scheme.scale));
  if (scheme.global_scale == GlobalScale::kMultiplier) values.scale *= weights.global_scale;
  if (scheme.global_scale == GlobalScale::kDivisor) values.scale /= weights.global_scale;
  values.zero = scheme.zero_points ? weights.zero_points[at] : 1 << (ElementBits(scheme.element) - 1);
  return values;
}

// Values of codes before scaling: a table for float formats, code - zero point for integers.
struct Values {
  const float* table = nullptr;

  explicit Values(ElementType element) : table(IsInteger(element) ? nullptr : TableOf(element).data()) {}

  // out[i] = value of codes[i] times the group's scale.
  void Scale(const uint8_t* codes, int64_t count, const GroupValues& group, float* out) const {
    if (table == nullptr) {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<int>(codes[i]) - group.zero) * group.scale;
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = table[codes[i]] * group.scale;
    }
  }
};

}  // namespace

void DequantizeRow(const LinearWeights& weights, int64_t row, float* out) {
  const WeightScheme& scheme = weights.scheme;
  const uint8_t* codes = weights.codes.data() + row * weights.row_bytes();
  if (IsUnquantized(scheme.element)) return CopyUnquantizedRow(scheme.element, codes, weights.cols, out);

  const int bits = ElementBits(scheme.element);
  const int64_t groups = GroupCount(weights.cols, scheme.group.cols);
  const int64_t first = (scheme.group.rows == 0 ? 0 : row / scheme.group.rows) * groups;
  const Values values(scheme.element);
  constexpr int64_t kChunk = 512;
  uint8_t unpacked[kChunk];
  if (scheme.act_order) {
    for (int64_t k = 0; k < weights.cols; ++k) {
      UnpackCodes(codes, bits, k, 1, unpacked);
      values.Scale(unpacked, 1, ValuesOf(weights, first + weights.group_index[k]), out + k);
    }
    return;
  }
  const int64_t size = scheme.group.cols == 0 ? weights.cols : scheme.group.cols;
  for (int64_t group = 0; group < groups; ++group) {
    const GroupValues scaling = ValuesOf(weights, first + group);
    const int64_t end = std::min(weights.cols, (group + 1) * size);
    for (int64_t k = group * size; k < end; k += kChunk) {
      const int64_t count = std::min(kChunk, end - k);
      UnpackCodes(codes, bits, k, count, unpacked);
      values.Scale(unpacked, count, scaling, out + k);
    }
  }
}

}  // namespace moed
