// Packed containers against words written by hand (the golden vectors of the format specification).
#include <catch2/catch.hpp>

#include <array>
#include <cstring>
#include <string>

#include "engine/packing.h"
#include "kernels/expert_weights.h"

namespace moed {
namespace {

std::vector<uint8_t> Words(std::initializer_list<uint32_t> words) {
  std::vector<uint8_t> bytes(words.size() * 4);
  std::memcpy(bytes.data(), std::data(words), bytes.size());
  return bytes;
}

LinearWeights Weights(int64_t rows, int64_t cols, std::vector<uint8_t> codes, float scale) {
  LinearWeights w;
  w.scheme = {ElementType::kInt4, ScaleType::kF32, {1, 0}};
  w.rows = rows;
  w.cols = cols;
  w.codes = std::move(codes);
  w.scales.resize(static_cast<size_t>(rows) * 4);
  for (int64_t n = 0; n < rows; ++n) std::memcpy(w.scales.data() + 4 * n, &scale, 4);
  return w;
}

std::vector<float> Row(const LinearWeights& w, int64_t row) {
  std::vector<float> out(static_cast<size_t>(w.cols));
  DequantizeRow(w, row, out.data());
  return out;
}

}  // namespace

TEST_CASE("GPTQ word 0x87654321 with zero 8 and scale 0.5 is -3.5 to 0") {
  std::vector<uint8_t> codes;
  UnpackAlongK(Words({0x87654321u}), 1, 8, 4, &codes);
  CHECK(Row(Weights(1, 8, codes, 0.5f), 0) == std::vector<float>{-3.5f, -3.0f, -2.5f, -2.0f, -1.5f, -1.0f, -0.5f, 0.0f});
}

TEST_CASE("B17: GPTQ words run along K, 0x76543210 being rows 0 to 7, one column of words per output feature") {
  // K = 16, N = 3: word (r, n) holds k = 8r .. 8r + 7 of feature n
  std::vector<uint8_t> codes;
  UnpackAlongK(Words({0x11111111u, 0x22222222u, 0x33333333u, 0x44444444u, 0x55555555u, 0x76543210u}), 3, 16, 4, &codes);
  const LinearWeights w = Weights(3, 16, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{-7, -7, -7, -7, -7, -7, -7, -7, -4, -4, -4, -4, -4, -4, -4, -4});
  CHECK(Row(w, 2) == std::vector<float>{-5, -5, -5, -5, -5, -5, -5, -5, -8, -7, -6, -5, -4, -3, -2, -1});
}

TEST_CASE("GPTQ with K no multiple of 8 is cut to K") {
  std::vector<uint8_t> codes;
  UnpackAlongK(Words({0x99999999u, 0xAAAAAAAAu, 0xFFFFF001u, 0xFFFFF002u}), 2, 11, 4, &codes);
  const LinearWeights w = Weights(2, 11, codes, 1.0f);
  CHECK(codes.size() == 12);
  CHECK(Row(w, 0) == std::vector<float>{1, 1, 1, 1, 1, 1, 1, 1, -7, -8, -8});
  CHECK(Row(w, 1) == std::vector<float>{2, 2, 2, 2, 2, 2, 2, 2, -6, -8, -8});
}

TEST_CASE("compressed-tensors word 0xFEA98710 is -8 -7 -1 0 1 2 6 7, and 0x88888888 is zero") {
  std::vector<uint8_t> codes;
  UnpackRows(Words({0xFEA98710u, 0x88888888u}), 2, 8, 4, &codes);
  const LinearWeights w = Weights(2, 8, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{-8, -7, -1, 0, 1, 2, 6, 7});
  CHECK(Row(w, 1) == std::vector<float>(8, 0.0f));
}

TEST_CASE("compressed-tensors rows with padding words are cut to K") {
  std::vector<uint8_t> codes;
  UnpackRows(Words({0x99999999u, 0xFFFFFF9Au, 0xBBBBBBBBu, 0xFFFFFFCDu}), 2, 10, 4, &codes);
  const LinearWeights w = Weights(2, 10, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{1, 1, 1, 1, 1, 1, 1, 1, 2, 1});
  CHECK(Row(w, 1) == std::vector<float>{3, 3, 3, 3, 3, 3, 3, 3, 5, 4});
}

TEST_CASE("Scales of [G, N] become [N, G]") {
  std::vector<uint8_t> out;
  TransposeElements(Words({1, 2, 3, 4, 5, 6}), 2, 3, 4, &out);
  CHECK(out == Words({1, 4, 2, 5, 3, 6}));
}

TEST_CASE("GPTQ version 1: a stored zero minus one borrows across the word, and adding to the whole word undoes it") {
  std::vector<uint8_t> zeros;
  UnpackZeros(Words({0x95DF4DF9u}), 1, 8, 4, GptqV1Offset(4), NibbleOrder::kNatural, &zeros);
  CHECK(zeros == std::vector<uint8_t>{10, 0, 15, 5, 0, 15, 6, 10});
  UnpackZeros(Words({0xA6F05F0Au}), 1, 8, 4, 0, NibbleOrder::kNatural, &zeros);
  CHECK(zeros == std::vector<uint8_t>{10, 0, 15, 5, 0, 15, 6, 10});
  // zeros 0 and 7 of 8 bits: 0x00000700 - 0x01010101
  UnpackZeros(Words({0xFEFF05FFu}), 1, 4, 8, GptqV1Offset(8), NibbleOrder::kNatural, &zeros);
  CHECK(zeros == std::vector<uint8_t>{0, 7, 0, 0});
}

TEST_CASE("B15: the zero points of a symmetric file must be 8 under the declared version") {
  const auto check = [](std::initializer_list<uint32_t> words, int64_t groups, int64_t rows, bool version2) {
    std::vector<uint8_t> zeros;
    UnpackZeros(Words(words), groups, rows, 4, version2 ? 0 : GptqV1Offset(4), NibbleOrder::kNatural, &zeros);
    return CheckZerosAre(zeros, groups, 8);
  };
  CHECK(check({0x77777777u, 0x77777777u}, 1, 16, false).ok());
  CHECK(check({0x88888888u, 0x88888888u}, 1, 16, true).ok());
  const absl::Status mislabelled = check({0x88888888u, 0x88888888u}, 1, 16, false);
  CHECK(mislabelled.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(mislabelled.message()).find("is 9, want 8") != std::string::npos);
  CHECK_FALSE(check({0x77777777u, 0x77777777u}, 1, 16, true).ok());
  // one wrong zero: group 1, column 10
  const absl::Status one = check({0x77777777u, 0x77777777u, 0x77777777u, 0x77777677u}, 2, 16, false);
  CHECK(std::string(one.message()).find("group 1, column 10") != std::string::npos);
  // columns beyond N are padding and do not count
  CHECK(check({0x00007777u}, 1, 4, false).ok());
}

TEST_CASE("B17: word 0x76543210 along N in AWQ order is columns 0 4 1 5 2 6 3 7, as weights and as zeros") {
  const std::vector<uint8_t> order = {0, 4, 1, 5, 2, 6, 3, 7};
  std::vector<uint8_t> codes, zeros;
  UnpackAlongN(Words({0x76543210u}), 8, 1, NibbleOrder::kAwq, false, &codes);
  CHECK(codes == order);
  UnpackZeros(Words({0x76543210u}), 1, 8, 4, 0, NibbleOrder::kAwq, &zeros);
  CHECK(zeros == order);
  UnpackAlongN(Words({0x76543210u}), 8, 1, NibbleOrder::kNatural, false, &codes);
  CHECK(codes == std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7});
}

TEST_CASE("AWQ word 0x86427531 with zero 8 and scale 0.5 is -3.5 to 0 over columns") {
  std::vector<uint8_t> codes;
  UnpackAlongN(Words({0x86427531u}), 8, 1, NibbleOrder::kAwq, false, &codes);
  const LinearWeights w = Weights(8, 1, codes, 0.5f);
  for (int n = 0; n < 8; ++n) CHECK(Row(w, n) == std::vector<float>{-3.5f + 0.5f * static_cast<float>(n)});
}

TEST_CASE("Words along N are a transpose for any K, and the last odd column leaves a clean nibble") {
  // K = 11, N = 16: the code of (n, k) is (3 n + 5 k) mod 16, in natural order
  std::vector<uint8_t> words(11 * 2 * 4);
  for (uint32_t k = 0; k < 11; ++k) {
    for (uint32_t n = 0; n < 16; ++n) words[(k * 2 + n / 8) * 4 + n % 8 / 2] |= ((3 * n + 5 * k) % 16) << (4 * (n % 2));
  }
  std::vector<uint8_t> codes;
  UnpackAlongN(words, 16, 11, NibbleOrder::kNatural, false, &codes);
  REQUIRE(codes.size() == 16 * 6);
  for (uint32_t n = 0; n < 16; ++n) {
    for (uint32_t k = 0; k < 11; ++k) CHECK(((codes[n * 6 + k / 2] >> (4 * (k % 2))) & 0xF) == (3 * n + 5 * k) % 16);
    CHECK(codes[n * 6 + 5] < 16);
  }
}

TEST_CASE("Two's complement nibbles 0x76210F98 are -8 -7 -1 0 1 2 6 7") {
  std::vector<uint8_t> words = Words({0x76210F98u});
  ReorderNibbles(NibbleOrder::kNatural, true, words);
  CHECK(Row(Weights(1, 8, words, 1.0f), 0) == std::vector<float>{-8, -7, -1, 0, 1, 2, 6, 7});
  words = Words({0x76543210u});
  ReorderNibbles(NibbleOrder::kAwq, false, words);
  CHECK(words == Words({0x73625140u}));
}

TEST_CASE("Int4 one a byte packs with the even column low; 8 is refused with row and column") {
  std::vector<uint8_t> codes;
  CHECK(PackSignedInt4(std::vector<uint8_t>{0xF8, 0x07, 0xFF, 0, 1, 2}, 2, 3, &codes).ok());
  CHECK(codes == std::vector<uint8_t>{0xF0, 0x07, 0x98, 0x0A});
  const absl::Status status = PackSignedInt4(std::vector<uint8_t>{0, 0, 0, 0, 0, 8}, 2, 3, &codes);
  CHECK(std::string(status.message()).find("element 5 (row 1, column 2) is 8") != std::string::npos);
}

TEST_CASE("compressed-tensors zero points run along N in each column of words") {
  std::vector<uint8_t> zeros;
  UnpackZerosByColumn(Words({0x76543210u, 0xFEDCBA98u}), 2, 8, 4, &zeros);
  CHECK(zeros == std::vector<uint8_t>{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15});
}

TEST_CASE("A group index other than k / g, or out of range, is seen, with its place") {
  CHECK(CheckTrivialGroupIndex(std::array<int32_t, 5>{0, 0, 1, 1, 2}, 2).ok());
  const absl::Status status = CheckTrivialGroupIndex(std::array<int32_t, 4>{0, 1, 0, 1}, 2);
  CHECK(std::string(status.message()).find("entry 1 is 1, want 0") != std::string::npos);
  CHECK_FALSE(CheckTrivialGroupIndex(std::array<int32_t, 3>{0, 0, -1}, 2).ok());
  CHECK(CheckGroupRange(std::array<int32_t, 4>{3, 0, 2, 3}, 4).ok());
  CHECK_FALSE(CheckGroupRange(std::array<int32_t, 2>{0, 4}, 4).ok());
  CHECK_FALSE(CheckGroupRange(std::array<int32_t, 2>{0, -1}, 4).ok());
}

}  // namespace moed
