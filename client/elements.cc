// Element types of the public header: names, sizes and conversions from and to float. No state; callable from any thread.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "client/moed_client.h"

namespace moed::client {
namespace {

uint16_t LoadU16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

float FloatFromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1F;
  const uint32_t mantissa = half & 0x3FF;
  if (exponent == 0) {  // zero or subnormal: mantissa x 2^-24
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t widened = exponent == 0x1F ? 0xFF : exponent + (127 - 15);
  return std::bit_cast<float>(sign | widened << 23 | mantissa << 13);
}

uint16_t HalfFromFloat(float value) {
  const uint16_t sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0f) return sign | 0x7C00;  // halfway between the largest half and the next power of two
  // One unit of the last place is 2^(exponent - 10), and 2^-24 for subnormals; nearbyint rounds ties to even.
  int exponent = -14;
  if (magnitude >= 0x1p-14f) exponent = std::ilogb(magnitude);
  const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // A normal number has 1024 to 2048 units: adding them to the exponent field carries the rounded-up mantissa over.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + units));
}

// The nearest E4M3 code of |value| <= 448, ties to even: units of the last place, which are 2^-9 for subnormals.
uint8_t E4m3FromFloat(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7F;
  const float magnitude = std::fabs(value);
  const int exponent = magnitude >= 0x1p-6f ? std::ilogb(magnitude) : -6;
  const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  // A normal number has 8 to 16 units: adding them to the exponent field carries the rounded-up mantissa over.
  return static_cast<uint8_t>(sign | ((static_cast<uint32_t>(exponent + 6) << 3) + units));
}

uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

size_t ElementBytes(DType dtype) {
  if (dtype == DType::kF8E4m3 || dtype == DType::kI8) return 1;
  return dtype == DType::kF32 ? 4 : 2;
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF8E4m3: return "f8e4m3";
    case DType::kI8: return "i8";
  }
  return "unknown";
}

std::vector<float> ToFloats(DType dtype, std::span<const uint8_t> bytes) {
  std::vector<float> values(bytes.size() / ElementBytes(dtype));
  if (dtype == DType::kF32) {
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = LoadU16(bytes.data() + 2 * i);
    values[i] = dtype == DType::kBf16 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16) : FloatFromHalf(bits);
  }
  return values;
}

std::vector<uint8_t> FromFloats(DType dtype, std::span<const float> values) {
  std::vector<uint8_t> bytes(values.size() * ElementBytes(dtype));
  if (dtype == DType::kF32) {
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = dtype == DType::kBf16 ? Bf16FromFloat(values[i]) : HalfFromFloat(values[i]);
    bytes[2 * i] = static_cast<uint8_t>(bits);
    bytes[2 * i + 1] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

PackedRows PackRows(DType dtype, std::span<const float> values, int64_t columns) {
  PackedRows packed;
  packed.codes.resize(values.size());
  const float largest_code = dtype == DType::kI8 ? 127.0f : 448.0f;
  for (size_t begin = 0; columns > 0 && begin < values.size(); begin += static_cast<size_t>(columns)) {
    const std::span<const float> row = values.subspan(begin, std::min(values.size() - begin, static_cast<size_t>(columns)));
    float largest = 0;
    for (const float value : row) largest = std::max(largest, std::fabs(value));
    const float scale = largest > 0 ? largest / largest_code : 1.0f;
    packed.scales.push_back(scale);
    for (size_t i = 0; i < row.size(); ++i) {
      const float code = std::clamp(row[i] / scale, -largest_code, largest_code);  // the quotient may be rounded beyond it
      packed.codes[begin + i] = dtype == DType::kI8 ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(code))) : E4m3FromFloat(code);
    }
  }
  return packed;
}

}  // namespace moed::client
