#include "tests/soak/load_figures.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace moed::testing {

std::vector<Figures> WindowsOf(const std::string& output) {
  std::vector<Figures> windows;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    if (line.rfind("LOAD ", 0) != 0 || line.find("p99_us=") == absl::string_view::npos) continue;
    std::map<absl::string_view, double> values;
    for (const absl::string_view word : absl::StrSplit(line, ' ')) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
      double value = 0;
      if (absl::SimpleAtod(parts.second, &value)) values[parts.first] = value;
    }
    windows.push_back(
        {values["ok"], values["refused"], values["untold"], values["late"], values["other"], values["p50_us"], values["p99_us"]});
  }
  return windows;
}

Figures Sum(const std::vector<Figures>& all) {
  Figures sum;
  for (const Figures& one : all) {
    sum.ok += one.ok, sum.refused += one.refused, sum.untold += one.untold, sum.late += one.late, sum.other += one.other;
    sum.p50_us = std::max(sum.p50_us, one.p50_us), sum.p99_us = std::max(sum.p99_us, one.p99_us);
  }
  return sum;
}

}  // namespace moed::testing
