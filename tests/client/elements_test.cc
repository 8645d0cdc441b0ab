// Conversions of the public header, exhaustively where the type has 65,536 values.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "client/moed_client.h"

namespace moed::client {
namespace {

uint16_t Bits(DType dtype, float value) {
  const std::vector<float> values = {value};
  const std::vector<uint8_t> bytes = FromFloats(dtype, values);
  return static_cast<uint16_t>(bytes[0] | bytes[1] << 8);
}

std::vector<uint8_t> All16BitValues() {
  std::vector<uint8_t> bytes;
  for (int i = 0; i < 65536; ++i) bytes.insert(bytes.end(), {static_cast<uint8_t>(i), static_cast<uint8_t>(i >> 8)});
  return bytes;
}

}  // namespace

TEST_CASE("Every 16-bit value survives the way through float") {
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    const std::vector<uint8_t> all = All16BitValues();
    const std::vector<float> floats = ToFloats(dtype, all);
    const std::vector<uint8_t> back = FromFloats(dtype, floats);
    int wrong = 0;
    for (size_t i = 0; i < floats.size(); ++i) {
      const bool same = back[2 * i] == all[2 * i] && back[2 * i + 1] == all[2 * i + 1];
      const bool both_nan = std::isnan(floats[i]) && std::isnan(ToFloats(dtype, {&back[2 * i], 2})[0]);
      if (!same && !both_nan) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("Known values have their known bits") {
  CHECK(Bits(DType::kBf16, 1.0f) == 0x3F80);
  CHECK(Bits(DType::kF16, 1.0f) == 0x3C00);
  CHECK(Bits(DType::kF16, -2.0f) == 0xC000);
  CHECK(Bits(DType::kF16, 65504.0f) == 0x7BFF);
  CHECK(Bits(DType::kF16, 65519.0f) == 0x7BFF);
  CHECK(Bits(DType::kF16, 65520.0f) == 0x7C00);
  CHECK(Bits(DType::kF16, 0x1p-24f) == 0x0001);
  CHECK(Bits(DType::kF16, 0x1p-25f) == 0x0000);
  CHECK(Bits(DType::kF16, 0x1.8p-25f) == 0x0001);
  CHECK(Bits(DType::kF16, std::numeric_limits<float>::infinity()) == 0x7C00);
}

TEST_CASE("Rounding goes to the nearest, ties to even, and NaN stays NaN") {
  CHECK(Bits(DType::kBf16, std::bit_cast<float>(0x3F808000u)) == 0x3F80);
  CHECK(Bits(DType::kBf16, std::bit_cast<float>(0x3F818000u)) == 0x3F82);
  CHECK(Bits(DType::kBf16, std::bit_cast<float>(0x3F808001u)) == 0x3F81);
  CHECK(Bits(DType::kF16, 1.0f + 0x1p-11f) == 0x3C00);
  CHECK(Bits(DType::kF16, 1.0f + 3 * 0x1p-11f) == 0x3C02);
  CHECK(Bits(DType::kF16, 1.9999f) == 0x4000);
  const float nan = std::bit_cast<float>(0x7F800001u);
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    const std::vector<float> values = {nan};
    CHECK(std::isnan(ToFloats(dtype, FromFloats(dtype, values))[0]));
  }
}

}  // namespace moed::client
