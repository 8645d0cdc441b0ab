#include "engine/gate.h"

#include <cmath>
#include <vector>

#include "kernels/convert.h"

namespace moed {
namespace {

// Sums in 16 interleaved partial sums, which the compiler keeps in vector registers, then pairwise.
float Dot(const float* a, const float* b, int64_t n) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (int i = 0; i < kLanes; ++i) sums[i] += a[k + i] * b[k + i];
  }
  for (int i = 0; k < n; ++k, ++i) sums[i] += a[k] * b[k];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

float Sigmoid(float z) {
  // The exponent is never positive, so nothing overflows; NaN takes the second branch and stays NaN.
  const float e = std::exp(-std::fabs(z));
  return z >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

}  // namespace

void ComputeLogits(const GateWeights& gate, const TensorView& x, WorkerPool& pool, std::span<float> logits) {
  const int64_t hidden = x.cols;
  const int64_t experts = static_cast<int64_t>(gate.weight.size()) / hidden;
  // A few rows a task, so that a gate row is read once for all of them.
  constexpr int64_t kRows = 8;
  pool.ParallelFor((x.rows + kRows - 1) / kRows, [&](int64_t task, int) {
    const int64_t first = task * kRows;
    const int64_t count = x.rows - first < kRows ? x.rows - first : kRows;
    std::vector<float> rows(static_cast<size_t>(count * hidden));
    for (int64_t r = 0; r < count; ++r) RowToFloat(x, first + r, rows.data() + r * hidden);
    for (int64_t e = 0; e < experts; ++e) {
      const float bias = gate.bias.empty() ? 0.0f : gate.bias[e];
      for (int64_t r = 0; r < count; ++r) {
        logits[(first + r) * experts + e] = Dot(rows.data() + r * hidden, gate.weight.data() + e * hidden, hidden) + bias;
      }
    }
  });
}

void ComputeSharedFactors(const GateWeights& gate, const TensorView& x, WorkerPool& pool, std::span<float> factors) {
  pool.ParallelFor(x.rows, [&](int64_t row, int) {
    std::vector<float> values(static_cast<size_t>(x.cols));
    RowToFloat(x, row, values.data());
    factors[row] = Sigmoid(Dot(values.data(), gate.shared_gate.data(), x.cols));
  });
}

}  // namespace moed
