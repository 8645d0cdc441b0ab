#include "kernels/expert_weights.h"

#include <algorithm>
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

// Value of a code before scaling; `zero` applies to integers only.
float CodeValue(ElementType element, uint32_t code, int zero) {
  switch (element) {
    case ElementType::kInt4:
    case ElementType::kInt8: return static_cast<float>(static_cast<int>(code) - zero);
    case ElementType::kFp8E4m3: return E4m3ToFloat(static_cast<uint8_t>(code));
    case ElementType::kFp4E2m1: return E2m1ToFloat(static_cast<uint8_t>(code));
    case ElementType::kFp6E2m3: return E2m3ToFloat(static_cast<uint8_t>(code));
    case ElementType::kFp6E3m2: return E3m2ToFloat(static_cast<uint8_t>(code));
    default: return 0.0f;  // unquantized elements never come here
  }
}

void CopyUnquantizedRow(ElementType element, const uint8_t* row, int64_t cols, float* out) {
  for (int64_t k = 0; k < cols; ++k) {
    if (element == ElementType::kF32) out[k] = LoadAs<float>(row + 4 * k);
    if (element == ElementType::kBf16) out[k] = Bf16ToFloat(LoadAs<uint16_t>(row + 2 * k));
    if (element == ElementType::kF16) out[k] = F16ToFloat(LoadAs<uint16_t>(row + 2 * k));
  }
}

}  // namespace

namespace {

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

}  // namespace

void DequantizeRow(const LinearWeights& weights, int64_t row, float* out) {
  const WeightScheme& scheme = weights.scheme;
  const uint8_t* codes = weights.codes.data() + row * weights.row_bytes();
  if (IsUnquantized(scheme.element)) return CopyUnquantizedRow(scheme.element, codes, weights.cols, out);

  const int bits = ElementBits(scheme.element);
  const int64_t groups = GroupCount(weights.cols, scheme.group.cols);
  const int64_t first = (scheme.group.rows == 0 ? 0 : row / scheme.group.rows) * groups;
  const auto value = [&](int64_t k, const GroupValues& group) {
    return CodeValue(scheme.element, CodeAt(codes, bits, k), group.zero) * group.scale;
  };
  if (scheme.act_order) {
    for (int64_t k = 0; k < weights.cols; ++k) out[k] = value(k, ValuesOf(weights, first + weights.group_index[k]));
    return;
  }
  const int64_t size = scheme.group.cols == 0 ? weights.cols : scheme.group.cols;
  for (int64_t group = 0; group < groups; ++group) {
    const GroupValues values = ValuesOf(weights, first + group);
    const int64_t end = std::min(weights.cols, (group + 1) * size);
    for (int64_t k = group * size; k < end; ++k) out[k] = value(k, values);
  }
}

}  // namespace moed
