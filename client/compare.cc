#include "client/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moed::client {
namespace {

// flags[row] for each row of `skip`.
std::vector<bool> Flags(int64_t rows, std::span<const int64_t> skip) {
  std::vector<bool> flags(static_cast<size_t>(rows), false);
  for (int64_t row : skip) {
    if (row >= 0 && row < rows) flags[static_cast<size_t>(row)] = true;
  }
  return flags;
}

std::vector<int32_t> Sorted(std::span<const int32_t> ids) {
  std::vector<int32_t> sorted(ids.begin(), ids.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

}  // namespace

double RelativeError(std::span<const float> y, std::span<const float> ref) {
  // Squares of floats neither overflow nor vanish in double.
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double d = static_cast<double>(y[i]) - ref[i];
    difference += d * d;
    norm += static_cast<double>(ref[i]) * ref[i];
  }
  if (!std::isfinite(difference) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
  if (norm == 0) return difference == 0 ? 0 : std::numeric_limits<double>::infinity();
  return std::sqrt(difference / norm);
}

Comparison CompareRows(std::span<const float> y, std::span<const float> ref, int64_t rows, int64_t columns,
                       std::span<const int64_t> skip) {
  const std::vector<bool> exempt = Flags(rows, skip);
  Comparison result;
  for (int64_t row = 0; row < rows; ++row) {
    if (exempt[static_cast<size_t>(row)]) {
      ++result.exempt;
      continue;
    }
    ++result.compared;
    const size_t begin = static_cast<size_t>(row * columns);
    const size_t count = static_cast<size_t>(columns);
    const double rel = RelativeError(y.subspan(begin, count), ref.subspan(begin, count));
    if (result.worst_row < 0 || rel > result.max_rel) {
      result.max_rel = rel;
      result.worst_row = row;
    }
  }
  return result;
}

RoutingComparison CompareRouting(std::span<const int32_t> ids, std::span<const int32_t> ref, int64_t rows, int64_t k,
                                 std::span<const int64_t> skip) {
  const std::vector<bool> exempt = Flags(rows, skip);
  RoutingComparison result;
  for (int64_t row = 0; row < rows; ++row) {
    if (exempt[static_cast<size_t>(row)]) {
      ++result.exempt;
      continue;
    }
    ++result.compared;
    const size_t begin = static_cast<size_t>(row * k);
    const size_t count = static_cast<size_t>(k);
    if (Sorted(ids.subspan(begin, count)) != Sorted(ref.subspan(begin, count))) result.different.push_back(row);
  }
  return result;
}

}  // namespace moed::client
