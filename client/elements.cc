// Element types of the public header: names, sizes and conversions from and to float. No state; callable from any thread.
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

uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

size_t ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kF16: return "f16";
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

}  // namespace moed::client
