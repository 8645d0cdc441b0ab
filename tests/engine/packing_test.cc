// Packed containers against words written by hand (the golden vectors of the format specification).
#include <catch2/catch.hpp>

#include <cstring>
#include <string>

#include "engine/packing.h"

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
  UnpackGptqInt4(Words({0x87654321u}), 1, 8, &codes);
  CHECK(Row(Weights(1, 8, codes, 0.5f), 0) == std::vector<float>{-3.5f, -3.0f, -2.5f, -2.0f, -1.5f, -1.0f, -0.5f, 0.0f});
}

TEST_CASE("GPTQ words run along K, one column of words per output feature") {
  // K = 16, N = 3: word (r, n) holds k = 8r .. 8r + 7 of feature n
  std::vector<uint8_t> codes;
  UnpackGptqInt4(Words({0x11111111u, 0x22222222u, 0x33333333u, 0x44444444u, 0x55555555u, 0x76543210u}), 3, 16, &codes);
  const LinearWeights w = Weights(3, 16, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{-7, -7, -7, -7, -7, -7, -7, -7, -4, -4, -4, -4, -4, -4, -4, -4});
  CHECK(Row(w, 2) == std::vector<float>{-5, -5, -5, -5, -5, -5, -5, -5, -8, -7, -6, -5, -4, -3, -2, -1});
}

TEST_CASE("GPTQ with K no multiple of 8 is cut to K") {
  std::vector<uint8_t> codes;
  UnpackGptqInt4(Words({0x99999999u, 0xAAAAAAAAu, 0xFFFFF001u, 0xFFFFF002u}), 2, 11, &codes);
  const LinearWeights w = Weights(2, 11, codes, 1.0f);
  CHECK(codes.size() == 12);
  CHECK(Row(w, 0) == std::vector<float>{1, 1, 1, 1, 1, 1, 1, 1, -7, -8, -8});
  CHECK(Row(w, 1) == std::vector<float>{2, 2, 2, 2, 2, 2, 2, 2, -6, -8, -8});
}

TEST_CASE("compressed-tensors word 0xFEA98710 is -8 -7 -1 0 1 2 6 7, and 0x88888888 is zero") {
  std::vector<uint8_t> codes;
  UnpackRowsInt4(Words({0xFEA98710u, 0x88888888u}), 2, 8, &codes);
  const LinearWeights w = Weights(2, 8, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{-8, -7, -1, 0, 1, 2, 6, 7});
  CHECK(Row(w, 1) == std::vector<float>(8, 0.0f));
}

TEST_CASE("compressed-tensors rows with padding words are cut to K") {
  std::vector<uint8_t> codes;
  UnpackRowsInt4(Words({0x99999999u, 0xFFFFFF9Au, 0xBBBBBBBBu, 0xFFFFFFCDu}), 2, 10, &codes);
  const LinearWeights w = Weights(2, 10, codes, 1.0f);
  CHECK(Row(w, 0) == std::vector<float>{1, 1, 1, 1, 1, 1, 1, 1, 2, 1});
  CHECK(Row(w, 1) == std::vector<float>{3, 3, 3, 3, 3, 3, 3, 3, 5, 4});
}

TEST_CASE("Scales of [G, N] become [N, G]") {
  std::vector<uint8_t> out;
  TransposeElements(Words({1, 2, 3, 4, 5, 6}), 2, 3, 4, &out);
  CHECK(out == Words({1, 4, 2, 5, 3, 6}));
}

TEST_CASE("B15: the zero points of a symmetric file must be 8 under the declared version") {
  const std::vector<uint8_t> v1 = Words({0x77777777u, 0x77777777u}), v2 = Words({0x88888888u, 0x88888888u});
  CHECK(CheckGptqSymmetricZeros(v1, 1, 16, false).ok());
  CHECK(CheckGptqSymmetricZeros(v2, 1, 16, true).ok());
  const absl::Status mislabelled = CheckGptqSymmetricZeros(v2, 1, 16, false);
  CHECK(mislabelled.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(mislabelled.message()).find("is 9, want 8") != std::string::npos);
  CHECK_FALSE(CheckGptqSymmetricZeros(v1, 1, 16, true).ok());
  // one wrong zero: group 1, column 10
  const absl::Status one = CheckGptqSymmetricZeros(Words({0x77777777u, 0x77777777u, 0x77777777u, 0x77777677u}), 2, 16, false);
  CHECK(std::string(one.message()).find("group 1, column 10") != std::string::npos);
  // columns beyond N are padding and do not count
  CHECK(CheckGptqSymmetricZeros(Words({0x00007777u}), 1, 4, false).ok());
}

TEST_CASE("A group index other than k / g is seen, with its place") {
  CHECK(CheckTrivialGroupIndex(Words({0, 0, 1, 1, 2}), 2).ok());
  const absl::Status status = CheckTrivialGroupIndex(Words({0, 1, 0, 1}), 2);
  CHECK(std::string(status.message()).find("entry 1 is 1, want 0") != std::string::npos);
  CHECK_FALSE(CheckTrivialGroupIndex(Words({0, 0, 0xFFFFFFFFu}), 2).ok());
}

}  // namespace moed
