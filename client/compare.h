// The judge of moectl: compares an output with a reference by relative error per row, and routings as sets per row. Pure
// functions, no state.
#ifndef MOED_CLIENT_COMPARE_H_
#define MOED_CLIENT_COMPARE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace moed::client {

// ||y - ref||2 / ||ref||2 in double. A reference row of zeros demands exact zeros: 0 when y is zero, else infinity. Infinity
// as well when either row holds a NaN or an Inf, so that such a row passes no bound. The spans have one length; empty rows
// are equal.
double RelativeError(std::span<const float> y, std::span<const float> ref);

struct Comparison {
  double max_rel = 0;      // over the rows that count; 0 when there is none
  int64_t worst_row = -1;  // the first one with max_rel; -1 when no row counts
  int64_t compared = 0;    // rows that counted
  int64_t exempt = 0;      // rows left out by `skip`
};

// Rows of `columns` elements each. `skip` holds row numbers, in any order; numbers that are no row are ignored.
Comparison CompareRows(std::span<const float> y, std::span<const float> ref, int64_t rows, int64_t columns,
                       std::span<const int64_t> skip);

struct RoutingComparison {
  std::vector<int64_t> different;  // rows whose ids differ, ascending
  int64_t compared = 0;
  int64_t exempt = 0;
};

// Ids [rows, k] compared as multisets per row: the order of the slots does not count, the number of times each id occurs
// does.
RoutingComparison CompareRouting(std::span<const int32_t> ids, std::span<const int32_t> ref, int64_t rows, int64_t k,
                                 std::span<const int64_t> skip);

}  // namespace moed::client

#endif  // MOED_CLIENT_COMPARE_H_
