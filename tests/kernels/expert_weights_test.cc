// The exact weight of every scheme, against values worked out by hand.
#include <catch2/catch.hpp>

#include <bit>
#include <cstring>

#include "kernels/expert_weights.h"
#include "kernels/quant.h"

namespace moed {
namespace {

std::vector<uint8_t> Floats(std::initializer_list<float> values) {
  std::vector<uint8_t> bytes(values.size() * 4);
  std::memcpy(bytes.data(), std::data(values), bytes.size());
  return bytes;
}

std::vector<float> Row(const LinearWeights& weights, int64_t row) {
  std::vector<float> out(static_cast<size_t>(weights.cols));
  DequantizeRow(weights, row, out.data());
  return out;
}

LinearWeights Int4(int64_t rows, int64_t cols, int32_t group) {
  LinearWeights w;
  w.scheme.element = ElementType::kInt4;
  w.scheme.scale = ScaleType::kF32;
  w.scheme.group = {1, group};
  w.rows = rows;
  w.cols = cols;
  return w;
}

}  // namespace

TEST_CASE("Symmetric int4 subtracts 8, low nibble first, each group with its own scale") {
  LinearWeights w = Int4(2, 4, 2);
  w.codes = {0x10, 0xF8, 0x98, 0x07};
  w.scales = Floats({0.5f, 2.0f, 1.0f, -1.0f});
  CHECK(Row(w, 0) == std::vector<float>{-4.0f, -3.5f, 0.0f, 14.0f});
  CHECK(Row(w, 1) == std::vector<float>{0.0f, 1.0f, 1.0f, 8.0f});  // -1 * (7 - 8) and -1 * (0 - 8)
}

TEST_CASE("A short last group and an odd number of columns use the last scale and half a byte") {
  LinearWeights w = Int4(1, 5, 4);
  w.codes = {0x99, 0x99, 0x0A};
  w.scales = Floats({1.0f, 3.0f});
  CHECK(Row(w, 0) == std::vector<float>{1.0f, 1.0f, 1.0f, 1.0f, 6.0f});
}

TEST_CASE("Zero points and scattered groups are looked up per group") {
  LinearWeights w = Int4(1, 4, 2);
  w.scheme.zero_points = w.scheme.act_order = true;
  w.codes = {0x31, 0x75};
  w.scales = Floats({1.0f, 10.0f});
  w.zero_points = {1, 3};
  w.group_index = {1, 0, 0, 1};
  CHECK(Row(w, 0) == std::vector<float>{-20.0f, 2.0f, 4.0f, 40.0f});
}

TEST_CASE("FP4 with E4M3 block scales folds the global scale into the scale first") {
  LinearWeights w;
  w.scheme = {ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}, GlobalScale::kMultiplier};
  w.rows = 1;
  w.cols = 2;
  w.codes = {0x95};
  w.scales = {0x38};
  w.global_scale = 0.002f;
  CHECK(Row(w, 0) == std::vector<float>{3.0f * 0.002f, -0.5f * 0.002f});
  w.scheme.global_scale = GlobalScale::kDivisor;
  w.global_scale = 500.0f;
  CHECK(Row(w, 0) == std::vector<float>{3.0f * (1.0f / 500.0f), -0.5f * (1.0f / 500.0f)});
}

TEST_CASE("MXFP4 reaches float subnormals") {
  LinearWeights w;
  w.scheme = {ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}};
  w.rows = 2;
  w.cols = 2;
  w.codes = {0x21, 0xF9};
  w.scales = {0x00, 0x80};
  CHECK(std::bit_cast<uint32_t>(Row(w, 0)[0]) == 0x00200000u);
  CHECK(std::bit_cast<uint32_t>(Row(w, 0)[1]) == 0x00400000u);
  CHECK(Row(w, 1) == std::vector<float>{-1.0f, -12.0f});
}

TEST_CASE("FP8 blocks share a scale over rows and columns, per tensor over everything") {
  LinearWeights w;
  w.scheme = {ElementType::kFp8E4m3, ScaleType::kF32, {2, 2}};
  w.rows = 3;
  w.cols = 3;
  w.codes.assign(9, 0x38);  // 1.0
  w.scales = Floats({1.0f, 2.0f, 3.0f, 4.0f});
  CHECK(Row(w, 1) == std::vector<float>{1.0f, 1.0f, 2.0f});
  CHECK(Row(w, 2) == std::vector<float>{3.0f, 3.0f, 4.0f});
  w.scheme.group = {0, 0};
  w.scales = Floats({5.0f});
  CHECK(Row(w, 2) == std::vector<float>{5.0f, 5.0f, 5.0f});
}

TEST_CASE("Six-bit codes are read across byte borders") {
  LinearWeights w;
  w.scheme = {ElementType::kFp6E2m3, ScaleType::kE8m0, {1, 32}};
  w.rows = 1;
  w.cols = 4;
  // codes 0x08 (1.0), 0x1F (7.5), 0x28 (-1.0), 0x01 (0.125) as a stream of 6-bit fields, least significant first
  const uint32_t stream = 0x08u | 0x1Fu << 6 | 0x28u << 12 | 0x01u << 18;
  w.codes = {static_cast<uint8_t>(stream), static_cast<uint8_t>(stream >> 8), static_cast<uint8_t>(stream >> 16)};
  w.scales = {128};
  CHECK(Row(w, 0) == std::vector<float>{2.0f, 15.0f, -2.0f, 0.25f});
}

TEST_CASE("Unquantized rows are copied as they are") {
  LinearWeights w;
  w.scheme.element = ElementType::kBf16;
  w.rows = 1;
  w.cols = 2;
  w.codes = {0x80, 0x3F, 0x00, 0xC0};
  CHECK(Row(w, 0) == std::vector<float>{1.0f, -2.0f});
  w.scheme.element = ElementType::kF16;
  w.codes = {0x00, 0x3C, 0x01, 0x00};
  CHECK(Row(w, 0) == std::vector<float>{1.0f, 0x1p-24f});
  w.scheme.element = ElementType::kF32;
  w.codes = Floats({0.1f, -0.0f});
  CHECK(Row(w, 0) == std::vector<float>{0.1f, -0.0f});
}

TEST_CASE("Schemes that behave alike compare equal and others do not") {
  LinearScheme a, b;
  a.input.element = ElementType::kFp8E4m3;  // no activation quantization: what it would be does not matter
  CHECK(a == b);
  a.input.mode = ActivationMode::kDynamic;
  CHECK_FALSE(a == b);
  b.input.mode = ActivationMode::kDynamic;
  CHECK_FALSE(a == b);
  WeightScheme c{ElementType::kInt4, ScaleType::kF16, {1, 32}}, d = c;
  d.group.cols = 64;
  CHECK_FALSE(c == d);
}

TEST_CASE("Descriptions name element, group, symmetry and scales") {
  CHECK(Describe(WeightScheme{ElementType::kInt4, ScaleType::kF16, {1, 32}}) == "int4 g32 symmetric, f16 scales");
  CHECK(Describe(WeightScheme{ElementType::kInt4, ScaleType::kBf16, {1, 0}}) == "int4 channel symmetric, bf16 scales");
  CHECK(Describe(WeightScheme{ElementType::kFp8E4m3, ScaleType::kF32, {128, 128}}) == "fp8 block 128x128, f32 scales");
  CHECK(Describe(UniformScheme({})) == "bf16, 16-bit activations");
}

}  // namespace moed
