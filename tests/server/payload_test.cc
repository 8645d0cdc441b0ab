// Hidden states in one byte an element: every code under every kind of scale becomes the bf16 value nearest to the product.
#include "server/payload.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/number_formats.h"

namespace moed {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::span<const char> Bytes(const std::vector<float>& scales) {
  return {reinterpret_cast<const char*>(scales.data()), scales.size() * sizeof(float)};
}

}  // namespace

TEST_CASE("All codes of both kinds become the nearest bf16 value, under scales of every size") {
  const std::vector<float> scales = {1.0f, 0.5f, -2.0f, 0.0f, 1.0f / 3, 0x1p-130f, 0x1.fffffep127f, kInf, std::nanf(""), 3e38f, 7e-5f};
  std::vector<uint8_t> codes;
  for (size_t row = 0; row < scales.size(); ++row) {
    for (int code = 0; code < 256; ++code) codes.push_back(static_cast<uint8_t>(code));
  }
  std::vector<uint16_t> out(codes.size());
  for (const PayloadCode kind : {PayloadCode::kF8E4m3, PayloadCode::kI8}) {
    ExpandPayload(kind, codes.data(), Bytes(scales), 256, out.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      const float value = kind == PayloadCode::kI8 ? static_cast<float>(static_cast<int8_t>(codes[i])) : E4m3ToFloat(codes[i]);
      const float product = value * scales[i / 256];
      CAPTURE(static_cast<int>(kind), static_cast<int>(codes[i]), scales[i / 256]);
      if (std::isnan(product)) {
        REQUIRE(std::isnan(Bf16ToFloat(out[i])));
      } else {
        REQUIRE(out[i] == FloatToBf16(product));
      }
    }
  }
}

TEST_CASE("Rows of any length are taken, with unaligned scales, and nothing beyond them is written") {
  for (const int64_t cols : {0, 1, 7, 33, 300}) {
    std::vector<char> memory(1 + 3 * sizeof(float));
    const float scales[] = {1.0f, 2.0f, 4.0f};
    std::memcpy(memory.data() + 1, scales, sizeof(scales));
    const std::vector<uint8_t> codes(static_cast<size_t>(3 * cols), 3);
    std::vector<uint16_t> out(codes.size() + 1, 0xABCD);
    ExpandPayload(PayloadCode::kI8, codes.data(), std::span<const char>(memory).subspan(1), cols, out.data());
    CHECK(out.back() == 0xABCD);
    for (int64_t i = 0; i < 3 * cols; ++i) REQUIRE(Bf16ToFloat(out[static_cast<size_t>(i)]) == 3.0f * scales[i / cols]);
  }
}

}  // namespace moed
