// Number formats against their definitions: exhaustively where a format has at most 65,536 codes.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "kernels/number_formats.h"

namespace moed {
namespace {

// binary16 by its definition, in double.
double F16Value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

}  // namespace

TEST_CASE("Every f16 code decodes exactly and encodes back to itself") {
  int wrong = 0;
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint16_t bits = static_cast<uint16_t>(code);
    const float value = F16ToFloat(bits);
    const double want = F16Value(bits);
    if (std::isnan(want)) {
      wrong += !std::isnan(value) || (FloatToF16(value) & 0x7C00) != 0x7C00 || (FloatToF16(value) & 0x3FF) == 0;
    } else {
      wrong += static_cast<double>(value) != want || std::signbit(value) != std::signbit(want) || FloatToF16(value) != bits;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("f16 encoding rounds to nearest even, midpoints and the overflow border included") {
  CHECK(FloatToF16(65504.0f) == 0x7BFF);
  CHECK(FloatToF16(65519.99f) == 0x7BFF);
  CHECK(FloatToF16(65520.0f) == 0x7C00);
  CHECK(FloatToF16(-1e30f) == 0xFC00);
  CHECK(FloatToF16(0x1p-25f) == 0);              // half of the smallest subnormal: to even
  CHECK(FloatToF16(0x1.000002p-25f) == 1);
  CHECK(FloatToF16(0x1.8p-24f) == 2);            // 1.5 steps: to even
  int wrong = 0;
  for (uint32_t code = 0; code < 0x7BFF; ++code) {  // between each pair of neighbours
    const double low = F16Value(static_cast<uint16_t>(code)), high = F16Value(static_cast<uint16_t>(code + 1));
    const float middle = static_cast<float>((low + high) / 2);
    wrong += FloatToF16(middle) != (code % 2 == 0 ? code : code + 1);
    wrong += FloatToF16(std::nextafter(middle, 0.0f)) != code;
    wrong += FloatToF16(std::nextafter(middle, 1e9f)) != code + 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Every bf16 code survives the way to float and back, NaN stays NaN") {
  int wrong = 0;
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(code));
    const uint16_t back = FloatToBf16(value);
    wrong += std::isnan(value) ? !std::isnan(Bf16ToFloat(back)) : back != code;
  }
  CHECK(wrong == 0);
  CHECK(FloatToBf16(1.00390625f) == 0x3F80);  // 1 + 2^-8: the midpoint goes to even
  CHECK(FloatToBf16(1.01171875f) == 0x3F82);
  CHECK(FloatToBf16(std::bit_cast<float>(0x7F800001u)) == 0x7FC0);  // a NaN whose payload is in the lower half
  CHECK(FloatToBf16(3.4e38f) == 0x7F80);
}

TEST_CASE("FP8 E4M3 codes have the values of the format table") {
  const std::pair<int, float> table[] = {{0x00, 0.0f}, {0x01, 0x1p-9f}, {0x07, 7 * 0x1p-9f}, {0x08, 0x1p-6f}, {0x38, 1.0f},
                                         {0x3C, 1.5f}, {0x77, 240.0f}, {0x7E, 448.0f}, {0x81, -0x1p-9f}, {0xFE, -448.0f}};
  for (const auto& [code, value] : table) CHECK(E4m3ToFloat(static_cast<uint8_t>(code)) == value);
  CHECK(std::isnan(E4m3ToFloat(0x7F)));
  CHECK(std::isnan(E4m3ToFloat(0xFF)));
  CHECK(std::signbit(E4m3ToFloat(0x80)));
  for (int code = 1; code < 0x7F; ++code) CHECK(E4m3ToFloat(static_cast<uint8_t>(code)) > E4m3ToFloat(static_cast<uint8_t>(code - 1)));
}

TEST_CASE("FP4, FP6 and E8M0 codes have the values of their formats, subnormals and NaN included") {
  const float fp4[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (uint8_t code = 0; code < 8; ++code) {
    CHECK(E2m1ToFloat(code) == fp4[code]);
    CHECK(E2m1ToFloat(code | 8) == -fp4[code]);
  }
  CHECK(std::signbit(E2m1ToFloat(8)));
  CHECK(E2m3ToFloat(0x1F) == 7.5f);
  CHECK(E2m3ToFloat(0x01) == 0.125f);
  CHECK(E2m3ToFloat(0x20 | 0x08) == -1.0f);
  CHECK(E3m2ToFloat(0x1F) == 28.0f);
  CHECK(E3m2ToFloat(0x01) == 0.0625f);
  CHECK(E3m2ToFloat(0x0C) == 1.0f);
  const std::pair<int, float> e8m0[] = {{0, 0x1p-127f}, {1, 0x1p-126f}, {120, 0x1p-7f}, {127, 1.0f},
                                        {134, 128.0f}, {140, 8192.0f}, {254, 0x1p127f}};
  for (const auto& [byte, value] : e8m0) CHECK(E8m0ToFloat(static_cast<uint8_t>(byte)) == value);
  CHECK(std::bit_cast<uint32_t>(E8m0ToFloat(0)) == 0x00400000u);
  CHECK(std::isnan(E8m0ToFloat(255)));
}

}  // namespace moed
