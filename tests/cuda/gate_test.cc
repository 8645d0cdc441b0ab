// The server's own gate on the device against sums in double. Without a GPU every case is skipped.
#include <catch2/catch.hpp>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/cuda/router.h"
#include "kernels/number_formats.h"
#include "tests/cuda/router_device.h"
#include "tests/support/skip.h"

namespace moed::cuda {
namespace {

using namespace moed::testing;

constexpr DType kDtypes[] = {DType::kF32, DType::kBf16, DType::kF16};

struct Gate {
  int experts = 1;
  int64_t hidden = 1;
  std::vector<float> weights, bias, shared;  // bias and shared may be empty
};

// Rows in their dtype, and the floats that they mean.
struct Rows {
  DType dtype = DType::kF32;
  std::vector<std::byte> bytes;
  std::vector<float> values;
};

struct Results {
  std::vector<float> logits, factors;
};

std::vector<float> Normal(size_t count, std::mt19937* random) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(count);
  for (float& v : values) v = normal(*random);
  return values;
}

Gate MakeGate(int experts, int64_t hidden, bool extras, std::mt19937* random) {
  return {experts, hidden, Normal(experts * hidden, random), Normal(extras ? experts : 0, random),
          Normal(extras ? hidden : 0, random)};
}

void Append(float value, DType dtype, Rows* rows) {
  const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  const void* from = dtype == DType::kF32 ? static_cast<const void*>(&value) : &half;
  const size_t at = rows->bytes.size();
  rows->bytes.resize(at + DTypeBytes(dtype));
  std::memcpy(rows->bytes.data() + at, from, DTypeBytes(dtype));
  rows->values.push_back(dtype == DType::kF32 ? value : dtype == DType::kBf16 ? Bf16ToFloat(half) : F16ToFloat(half));
}

Rows MakeRows(const std::vector<float>& values, DType dtype) {
  Rows rows;
  rows.dtype = dtype;
  for (const float v : values) Append(v, dtype, &rows);
  return rows;
}

// Rows [first, first + count) of x, placed `offset` bytes behind an aligned address.
Results RunGate(const Gate& gate, const Rows& x, int first, int count, int capacity, size_t offset) {
  const size_t row_bytes = gate.hidden * DTypeBytes(x.dtype);
  DeviceArray<std::byte> device_x(std::span(x.bytes).subspan(first * row_bytes, count * row_bytes), offset);
  DeviceArray<float> weights(gate.weights), bias(gate.bias), shared(gate.shared);
  DeviceArray<float> logits(static_cast<size_t>(capacity) * gate.experts), factors(capacity);
  RouterArgs args;
  args.rows = count;
  args.experts = gate.experts;
  args.top_k = 1;
  args.hidden = gate.hidden;
  args.x = device_x.data();
  args.x_dtype = x.dtype;
  args.gate = weights.data();
  args.gate_bias = gate.bias.empty() ? nullptr : bias.data();
  args.shared_gate = gate.shared.empty() ? nullptr : shared.data();
  args.logits = logits.data();
  args.shared_factor = factors.data();
  DeviceArray<RouterArgs> device_args(std::span<const RouterArgs>(&args, 1));
  REQUIRE(LaunchGate(device_args.data(), capacity, gate.experts, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return {logits.Read(static_cast<size_t>(count) * gate.experts), factors.Read(count)};
}

// A dot product in double and how far a float32 sum in the gate's order may be from it: every element passes at most 4 additions
// for each 1,024 elements, 5 between lanes, 7 between warps and one of the bias.
struct Dot {
  double value = 0.0;
  double bound = 0.0;
};

Dot DotInDouble(const float* w, const float* x, int64_t hidden, float bias) {
  Dot dot{bias, std::fabs(static_cast<double>(bias))};
  for (int64_t h = 0; h < hidden; ++h) {
    const double product = static_cast<double>(w[h]) * x[h];
    dot.value += product;
    dot.bound += std::fabs(product);
  }
  dot.bound *= 0x1p-24 * 1.001 * (4 * ((hidden + 1023) / 1024) + 5 + 7 + 1);
  return dot;
}

void CompareWithDouble(const Gate& gate, const Rows& x, int rows, const Results& got) {
  for (int t = 0; t < rows; ++t) {
    const float* row = x.values.data() + t * gate.hidden;
    for (int e = 0; e < gate.experts; ++e) {
      const float bias = gate.bias.empty() ? 0.0f : gate.bias[e];
      const Dot want = DotInDouble(gate.weights.data() + e * gate.hidden, row, gate.hidden, bias);
      INFO("row " << t << ", expert " << e);
      REQUIRE(std::fabs(got.logits[static_cast<size_t>(t) * gate.experts + e] - want.value) <= want.bound);
    }
    INFO("shared factor of row " << t);
    if (gate.shared.empty()) {
      REQUIRE(got.factors[t] == 1.0f);
    } else {
      const Dot want = DotInDouble(gate.shared.data(), row, gate.hidden, 0.0f);
      const double factor = 1.0 / (1.0 + std::exp(-want.value));
      // The slope of a sigmoid is at most its value.
      REQUIRE(std::fabs(got.factors[t] - factor) <= factor * (1.1 * want.bound + 1e-6) + 1e-37);
    }
  }
}

void RequireSameBits(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    INFO("element " << i << ": " << a[i] << " and " << b[i]);
    REQUIRE(std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i]));
  }
}

TEST_CASE("Logits and shared factors are the sums in double, within the bound of float32, for any H, dtype and alignment") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(7);
  int turn = 0;
  for (const int64_t hidden : {1, 3, 7, 64, 130, 1000, 1023, 2880, 7168}) {
    for (const int experts : {1, 6, 60, 256}) {
      for (const int rows : {0, 1, 3, 33}) {
        const DType dtype = kDtypes[++turn % 3];
        const size_t offset = std::vector<size_t>{0, 2, 8, 16, 4}[turn % 5];
        const Gate gate = MakeGate(experts, hidden, turn % 2 == 0, &random);
        const Rows x = MakeRows(Normal(rows * hidden, &random), dtype);
        INFO("H=" << hidden << ", E=" << experts << ", M=" << rows << ", " << DTypeName(dtype) << " at offset " << offset);
        CompareWithDouble(gate, x, rows, RunGate(gate, x, 0, rows, rows + 3, offset));
      }
    }
  }
}

TEST_CASE("A row's logits are the same bits alone, in any batch, at any capacity and at any address") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(8);
  for (const DType dtype : kDtypes) {
    for (const int64_t hidden : {60, 1030, 2880, 7168}) {
      const Gate gate = MakeGate(61, hidden, true, &random);
      const Rows x = MakeRows(Normal(33 * hidden, &random), dtype);
      INFO("H=" << hidden << ", " << DTypeName(dtype));
      const Results batch = RunGate(gate, x, 0, 33, 33, 0);
      for (const int first : {0, 5, 30}) {
        for (const int count : {1, 2, 3}) {
          // The capacities take the narrow and the wide tiles, the offset the way for any alignment.
          for (const int capacity : {3, 9, 2000}) {
            for (const size_t offset : {0, 2, 16}) {
              const Results some = RunGate(gate, x, first, count, capacity, offset);
              RequireSameBits(some.logits, std::span(batch.logits).subspan(first * 61, count * 61));
              RequireSameBits(some.factors, std::span(batch.factors).subspan(first, count));
            }
          }
        }
      }
      RequireSameBits(RunGate(gate, x, 0, 33, 2000, 0).logits, batch.logits);
    }
  }
}

TEST_CASE("NaN in a hidden row is in that row's logits and factor only") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(9);
  const Gate gate = MakeGate(20, 256, true, &random);
  std::vector<float> values = Normal(6 * 256, &random);
  const Results clean = RunGate(gate, MakeRows(values, DType::kBf16), 0, 6, 6, 0);
  values[2 * 256 + 255] = std::numeric_limits<float>::quiet_NaN();
  const Results got = RunGate(gate, MakeRows(values, DType::kBf16), 0, 6, 6, 0);
  for (int t = 0; t < 6; ++t) {
    const auto row = std::span(got.logits).subspan(t * 20, 20);
    if (t == 2) {
      for (const float logit : row) CHECK(std::isnan(logit));
      CHECK(std::isnan(got.factors[t]));
    } else {
      RequireSameBits(row, std::span(clean.logits).subspan(t * 20, 20));
      CHECK(got.factors[t] == clean.factors[t]);
    }
  }
}

TEST_CASE("Without a gate only the factors are written, and neither where none are wanted") {
  if (!HaveGpu()) return Skip("no GPU");
  DeviceArray<uint16_t> x(std::vector<uint16_t>(3 * 64, 0x3F80));  // bfloat16 1
  DeviceArray<float> shared(std::vector<float>(64, 0.125f)), logits(3 * 4), factors(3);
  RouterArgs args;
  args.rows = 3;
  args.experts = 4;
  args.top_k = 1;
  args.hidden = 64;
  args.x = x.data();
  args.shared_gate = shared.data();
  args.logits = logits.data();
  for (const bool wanted : {false, true}) {
    args.shared_factor = wanted ? factors.data() : nullptr;
    DeviceArray<RouterArgs> device_args(std::span<const RouterArgs>(&args, 1));
    REQUIRE(LaunchGate(device_args.data(), 3, 4, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    logits.Read(0);
    if (!wanted) factors.Read(0);
  }
  for (const float factor : factors.Read(3)) CHECK(factor == Approx(1.0 / (1.0 + std::exp(-8.0))).epsilon(1e-6));
}

}  // namespace
}  // namespace moed::cuda
