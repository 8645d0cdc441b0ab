// The judge: compares a result with a reference by relative error per row, ||y - ref|| / ||ref||, in double.
#ifndef MOED_TESTS_SUPPORT_JUDGE_H_
#define MOED_TESTS_SUPPORT_JUDGE_H_

#include <cstdint>
#include <span>
#include <string>

namespace moed::testing {

struct Judgement {
  bool passed = true;
  double worst = 0.0;      // largest relative error of a row
  int64_t worst_row = -1;
  std::string reason;      // when not passed
};

// y and ref are [rows, cols]. A zero reference row demands exact zeros; NaN or Inf in y where ref is finite fails whatever
// the bound; a row that holds NaN in ref must hold NaN in y.
Judgement Judge(std::span<const float> y, std::span<const float> ref, int64_t cols, double bound);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_JUDGE_H_
