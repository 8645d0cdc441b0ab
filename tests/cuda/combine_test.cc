// The sum over slots on the device, bit for bit against float32 on the host. Without a GPU every case is skipped.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "kernels/cuda/launch.h"
#include "kernels/number_formats.h"
#include "tests/cuda/router_device.h"
#include "tests/support/skip.h"

namespace moed::cuda {
namespace {

using namespace moed::testing;

struct CombineCall {
  int32_t rows = 1, top_k = 1;
  int64_t cols = 1, spare = 0;  // a row of y and of shared has cols + spare elements
  bool weighted = true, shared = false, factor = false;
  int none = 0;                 // of 100 slots
  DType dtype = DType::kF32;
  size_t offset = 0;            // bytes of the output behind an aligned address
  int32_t spare_rows = 0;       // of the launch
  bool bf16 = false;            // the elements of y and of shared
};

struct CombineData {
  std::vector<float> y, weights, shared, factor;
  std::vector<int32_t> position;
};

// Slots lie in y in a random order, among rows that no slot has, which are NaN. So are the weights of slots without a row.
CombineData MakeData(const CombineCall& c, std::mt19937* random) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const size_t slots = static_cast<size_t>(c.rows) * static_cast<size_t>(c.top_k), stride = static_cast<size_t>(c.cols + c.spare);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CombineData data;
  std::vector<int32_t> order(slots + 3);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), *random);
  data.y.assign(order.size() * stride, nan);
  for (size_t i = 0; i < slots; ++i) {
    const bool absent = static_cast<int>((*random)() % 100) < c.none;
    data.position.push_back(absent ? -1 : order[i]);
    data.weights.push_back(absent ? nan : normal(*random));
    for (size_t k = 0; !absent && k < static_cast<size_t>(c.cols); ++k) {
      data.y[static_cast<size_t>(order[i]) * stride + k] = normal(*random);
    }
  }
  data.shared.assign(static_cast<size_t>(c.rows) * stride, nan);
  for (size_t i = 0; i < data.shared.size(); ++i) {
    if (i % stride < static_cast<size_t>(c.cols)) data.shared[i] = normal(*random);
  }
  for (int32_t t = 0; t < c.rows; ++t) data.factor.push_back(normal(*random));
  for (std::vector<float>* sums : {&data.y, &data.shared}) {
    for (float& sum : *sums) sum = c.bf16 ? Bf16ToFloat(FloatToBf16(sum)) : sum;
  }
  return data;
}

void Append(float value, DType dtype, std::vector<std::byte>* bytes) {
  const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  const void* from = dtype == DType::kF32 ? static_cast<const void*>(&value) : &half;
  bytes->resize(bytes->size() + DTypeBytes(dtype));
  std::memcpy(bytes->data() + bytes->size() - DTypeBytes(dtype), from, DTypeBytes(dtype));
}

std::vector<std::byte> HostCombine(const CombineCall& c, const CombineData& data) {
  std::vector<std::byte> out;
  const size_t stride = static_cast<size_t>(c.cols + c.spare);
  for (size_t t = 0; t < static_cast<size_t>(c.rows); ++t) {
    for (size_t k = 0; k < static_cast<size_t>(c.cols); ++k) {
      float sum = 0.0f;
      for (size_t slot = t * static_cast<size_t>(c.top_k); slot < (t + 1) * static_cast<size_t>(c.top_k); ++slot) {
        if (data.position[slot] < 0) continue;
        const float y = data.y[static_cast<size_t>(data.position[slot]) * stride + k];
        sum = c.weighted ? std::fma(data.weights[slot], y, sum) : sum + y;
      }
      if (c.shared) sum = std::fma(c.factor ? data.factor[t] : 1.0f, data.shared[t * stride + k], sum);
      Append(sum, c.dtype, &out);
    }
  }
  return out;
}

std::vector<std::byte> SumBytes(const CombineCall& c, const std::vector<float>& sums) {
  std::vector<std::byte> bytes;
  for (const float sum : sums) Append(sum, c.bf16 ? DType::kBf16 : DType::kF32, &bytes);
  return bytes;
}

std::vector<std::byte> DeviceCombine(const CombineCall& c, const CombineData& data) {
  DeviceArray<float> weights(data.weights), factor(data.factor);
  DeviceArray<std::byte> y(SumBytes(c, data.y)), shared(SumBytes(c, data.shared));
  DeviceArray<int32_t> position(data.position);
  const size_t bytes = static_cast<size_t>(c.rows) * static_cast<size_t>(c.cols) * DTypeBytes(c.dtype);
  DeviceArray<std::byte> out(bytes, c.offset);
  CombineArgs args;
  args.rows = c.rows;
  args.top_k = c.top_k;
  args.cols = c.cols;
  args.y = {y.data(), c.cols + c.spare, c.bf16};
  args.position = position.data();
  if (c.weighted) args.weights = weights.data();
  if (c.shared) args.shared = {shared.data(), c.cols + c.spare, c.bf16};
  if (c.factor) args.factor = factor.data();
  args.out = out.data();
  args.dtype = c.dtype;
  DeviceArray<CombineArgs> device_args(std::span<const CombineArgs>(&args, 1));
  REQUIRE(LaunchCombine(device_args.data(), c.rows + c.spare_rows, c.cols, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return out.Read(bytes);
}

TEST_CASE("combine: sums have the bits of float32 in slot order for every width, number of slots, alignment and types") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(1);
  int round = 0;
  for (const int64_t cols : {1, 7, 12, 256, 516, 2048}) {
    for (const int32_t top_k : {1, 2, 6, 8, 9, 16, 21}) {
      for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
        CombineCall c;
        c.rows = ++round % 4 * 3;
        c.top_k = top_k;
        c.cols = cols;
        c.spare = std::vector<int64_t>{0, 4, 1}[static_cast<size_t>(round / 2 % 3)];
        c.weighted = round % 5 != 0;
        c.shared = round % 5 > 1;
        c.factor = c.shared && round % 2 == 0;
        c.none = round % 7 < 3 ? 0 : round % 7 * 15;
        c.dtype = dtype;
        c.offset = round % 8 == 1 ? DTypeBytes(dtype) : 0;
        c.spare_rows = round % 3;
        c.bf16 = round % 4 < 2;
        const CombineData data = MakeData(c, &random);
        INFO("round " << round << ": " << c.rows << " rows of " << cols << ", " << top_k << " slots, spare " << c.spare);
        if (c.rows + c.spare_rows > 0) CHECK(DeviceCombine(c, data) == HostCombine(c, data));
      }
    }
  }
}

TEST_CASE("combine: many rows, whose blocks have all of their columns, give the same bits") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(2);
  for (const int32_t rows : {100, 513, 1500}) {
    CombineCall c;
    c.rows = rows;
    c.top_k = 8;
    c.cols = 1028;
    c.shared = rows == 513;
    c.none = rows == 1500 ? 20 : 0;
    c.dtype = rows == 100 ? DType::kF32 : DType::kBf16;
    c.bf16 = rows != 100;
    const CombineData data = MakeData(c, &random);
    INFO(rows << " rows");
    CHECK(DeviceCombine(c, data) == HostCombine(c, data));
  }
}

TEST_CASE("combine: rows of batched experts go where they came from, signs of zeros included") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const int64_t cols : {5, 516}) {
    const std::vector<int32_t> source = {7, 2, 3}, totals = {3, 1};
    std::vector<float> y(static_cast<size_t>(4 * cols));
    for (size_t i = 0; i < y.size(); ++i) y[i] = i % 3 == 0 ? -0.0f : static_cast<float>(i);
    DeviceArray<float> device_y(y), out(static_cast<size_t>(8 * cols));
    DeviceArray<int32_t> device_source(source), device_totals(totals);
    CombineArgs args;
    args.cols = cols;
    args.y = {device_y.data(), cols};
    args.source = device_source.data();
    args.totals = device_totals.data();
    args.out = out.data();
    args.dtype = DType::kF32;
    DeviceArray<CombineArgs> device_args(std::span<const CombineArgs>(&args, 1));
    REQUIRE(LaunchCombine(device_args.data(), 4, cols, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    const std::vector<float> got = out.Read(static_cast<size_t>(8 * cols));
    std::vector<float> want(got.size());
    std::memset(static_cast<void*>(want.data()), 0xFF, want.size() * sizeof(float));
    for (size_t r = 0; r < source.size(); ++r) {
      std::memcpy(&want[static_cast<size_t>(source[r] * cols)], &y[r * static_cast<size_t>(cols)],
                  static_cast<size_t>(cols) * sizeof(float));
    }
    CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0);
  }
}

}  // namespace
}  // namespace moed::cuda
