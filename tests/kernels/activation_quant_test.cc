// The rules of activation quantization against values worked out by hand.
#include <catch2/catch.hpp>

#include <cmath>

#include "kernels/activation_quant.h"

namespace moed {
namespace {

ActivationScheme Dynamic(ElementType element, ScaleType scale, int32_t group, ScaleRule rule = ScaleRule::kAbsMax) {
  ActivationScheme scheme;
  scheme.mode = ActivationMode::kDynamic;
  scheme.element = element;
  scheme.scale = scale;
  scheme.group = {1, group};
  scheme.rule = rule;
  return scheme;
}

std::vector<float> Quantized(const ActivationScheme& scheme, std::vector<float> x, float stored = 1.0f, float absmax = 0.0f) {
  QuantizeRow(scheme, stored, absmax, x.data(), static_cast<int64_t>(x.size()));
  return x;
}

}  // namespace

TEST_CASE("B19: int8 per token rounds to steps of absmax / 127, ties to even") {
  const ActivationScheme int8 = Dynamic(ElementType::kInt8, ScaleType::kF32, 0);
  CHECK(Quantized(int8, {127.0f, 0.4f, 0.5f, 1.5f, -2.5f, -127.0f}) == std::vector<float>{127, 0, 0, 2, -2, -127});
  CHECK(Quantized(int8, {0.0f, 0.0f}) == std::vector<float>{0, 0});
  const std::vector<float> grouped = Quantized(Dynamic(ElementType::kInt8, ScaleType::kF32, 2), {127.0f, 1.2f, 1.27f, 0.012f, 254.0f});
  CHECK(grouped[1] == 1.0f);
  CHECK(grouped[3] == Approx(0.01f));  // its own group, its own scale
  CHECK(grouped[4] == 254.0f);         // a short last group
}

TEST_CASE("B21: static scales clamp before they cast, on both sides") {
  ActivationScheme fp8 = Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 0);
  fp8.mode = ActivationMode::kStatic;
  CHECK(Quantized(fp8, {3.0f, -3.0f, 1.0f}, 1.0f / 448.0f) == std::vector<float>{1.0f, -1.0f, 1.0f});
  ActivationScheme int8 = fp8;
  int8.element = ElementType::kInt8;
  CHECK(Quantized(int8, {300.0f, -300.0f, 2.5f}, 1.0f) == std::vector<float>{127.0f, -128.0f, 2.0f});
}

TEST_CASE("MX rules differ where they should: floor, even at 1.75, ceil of the largest code") {
  const auto scale_of = [](ScaleRule rule, float absmax) {
    // 6 scale is the largest value: with x = absmax and a tiny second value the scale shows in what absmax becomes.
    std::vector<float> x = Quantized(Dynamic(ElementType::kFp4E2m1, ScaleType::kE8m0, 32, rule), {absmax, 0.0f});
    return x[0];
  };
  CHECK(scale_of(ScaleRule::kMxFloor, 7.0f) == 6.0f);   // 2^(2-2) = 1: saturates
  CHECK(scale_of(ScaleRule::kMxEven, 7.0f) == 8.0f);    // 7 = 1.75 x 4: scale 2, 3.5 rounds to 4
  CHECK(scale_of(ScaleRule::kMxEven, 6.9f) == 6.0f);    // below 1.75: scale 1
  CHECK(scale_of(ScaleRule::kMxCeil, 6.0f) == 6.0f);    // 6 / 6 = 1: scale 1
  CHECK(scale_of(ScaleRule::kMxCeil, 6.1f) == 6.0f);    // scale 2: 3.05 rounds to 3
  const ActivationScheme fp8 = Dynamic(ElementType::kFp8E4m3, ScaleType::kE8m0, 32, ScaleRule::kMxFloor);
  CHECK(Quantized(fp8, {500.0f})[0] == 448.0f);         // 2^(8-8) = 1: saturates
  CHECK(Quantized(fp8, {1.0f, 0.0f})[0] == 1.0f);
}

TEST_CASE("A power-of-two rule rounds the scale up") {
  const ActivationScheme pow2 = Dynamic(ElementType::kFp8E4m3, ScaleType::kF32, 128, ScaleRule::kAbsMaxPow2Up);
  CHECK(Quantized(pow2, {448.0f, 17.0f}) == std::vector<float>{448.0f, 16.0f});  // scale 1: 17 lies between 16 and 18, to even
  CHECK(Quantized(pow2, {449.0f, 17.0f}) == std::vector<float>{448.0f, 16.0f});  // scale 2: 224.5 rounds to 224
}

TEST_CASE("NVFP4 keeps an E4M3 scale a block under the stored global scale") {
  ActivationScheme nv = Dynamic(ElementType::kFp4E2m1, ScaleType::kE4m3, 16);
  nv.global_scale = true;
  // block scale = E4M3(1 * 6 / 6) = 1; codes of 6, 2.5 (tie to 2), 0.3 (to 0.5), -5 (tie to -4)
  CHECK(Quantized(nv, {6.0f, 2.5f, 0.3f, -5.0f}, 1.0f) == std::vector<float>{6.0f, 2.0f, 0.5f, -4.0f});
  CHECK(Quantized(nv, {6.0f, 2.5f, 0.3f, -5.0f}, 2.0f) == std::vector<float>{6.0f, 2.0f, 0.5f, -4.0f});
  CHECK(Quantized(nv, {0.0f, 0.0f}, 2.0f) == std::vector<float>{0.0f, 0.0f});
}

TEST_CASE("NaN and infinity make their own group NaN and no other") {
  const ActivationScheme grouped = Dynamic(ElementType::kInt8, ScaleType::kF32, 2);
  for (float bad : {NAN, INFINITY}) {
    const std::vector<float> x = Quantized(grouped, {bad, 1.0f, 127.0f, 1.0f});
    CHECK(std::isnan(x[0]));
    CHECK(std::isnan(x[1]));
    CHECK(x[2] == 127.0f);
  }
}

TEST_CASE("A scale that spans the request is the caller's, not the row's") {
  ActivationScheme tensor = Dynamic(ElementType::kInt8, ScaleType::kF32, 0);
  tensor.group = {0, 0};
  CHECK(SpansRows(tensor));
  CHECK(Quantized(tensor, {1.0f, 0.4f}, 1.0f, 127.0f) == std::vector<float>{1.0f, 0.0f});
  CHECK_FALSE(SpansRows(Dynamic(ElementType::kInt8, ScaleType::kF32, 0)));
}

TEST_CASE("Rules that do not exist are not claimed") {
  CHECK(CanQuantize(ActivationScheme()));
  CHECK_FALSE(CanQuantize(Dynamic(ElementType::kFp4E2m1, ScaleType::kF32, 32)));
  CHECK_FALSE(CanQuantize(Dynamic(ElementType::kInt8, ScaleType::kE8m0, 32)));
  CHECK_FALSE(CanQuantize(Dynamic(ElementType::kFp6E2m3, ScaleType::kE8m0, 32)));
  CHECK_FALSE(CanQuantize(Dynamic(ElementType::kFp4E2m1, ScaleType::kE4m3, 16)));  // no global scale
  ActivationScheme asymmetric = Dynamic(ElementType::kInt8, ScaleType::kF32, 0);
  asymmetric.zero_points = true;
  CHECK_FALSE(CanQuantize(asymmetric));
}

}  // namespace moed
