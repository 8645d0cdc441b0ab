#include "tests/support/judge.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace moed::testing {
namespace {

// Relative error of one row; infinity for what no bound may pass.
double RowError(const float* y, const float* ref, int64_t cols) {
  double difference = 0.0, norm = 0.0;
  bool ref_nan = false, y_nan = false;
  for (int64_t c = 0; c < cols; ++c) {
    ref_nan |= std::isnan(ref[c]);
    y_nan |= !std::isfinite(y[c]);
    const double d = static_cast<double>(y[c]) - ref[c];
    difference += d * d;
    norm += static_cast<double>(ref[c]) * ref[c];
  }
  if (ref_nan || y_nan) return ref_nan && y_nan ? 0.0 : HUGE_VAL;
  if (norm == 0.0) return difference == 0.0 ? 0.0 : HUGE_VAL;
  return std::sqrt(difference / norm);
}

}  // namespace

Judgement Judge(std::span<const float> y, std::span<const float> ref, int64_t cols, double bound) {
  Judgement judgement;
  if (y.size() != ref.size() || cols <= 0 || ref.size() % static_cast<size_t>(cols) != 0) {
    return {false, HUGE_VAL, -1, absl::StrCat("sizes: y ", y.size(), ", ref ", ref.size(), ", cols ", cols)};
  }
  const int64_t rows = static_cast<int64_t>(ref.size()) / cols;
  for (int64_t row = 0; row < rows; ++row) {
    const double error = RowError(y.data() + row * cols, ref.data() + row * cols, cols);
    if (judgement.worst_row >= 0 && !(error > judgement.worst)) continue;
    judgement.worst = error;
    judgement.worst_row = row;
  }
  judgement.passed = judgement.worst <= bound;
  if (!judgement.passed) {
    judgement.reason = absl::StrCat("row ", judgement.worst_row, " is off by ", judgement.worst, ", bound ", bound);
  }
  return judgement;
}

}  // namespace moed::testing
