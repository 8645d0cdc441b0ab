// What a client of load_client.h printed, as numbers. Pure functions.
#ifndef MOED_TESTS_SOAK_LOAD_FIGURES_H_
#define MOED_TESTS_SOAK_LOAD_FIGURES_H_

#include <string>
#include <vector>

namespace moed::testing {

// One window of one client, or of several.
struct Figures {
  double ok = 0, refused = 0, untold = 0, late = 0, other = 0;
  double p50_us = 0, p99_us = 0;  // the largest of them
};

// The windows that the output tells, in order; a line that was cut short is none.
std::vector<Figures> WindowsOf(const std::string& output);

// All together: counts are added, latencies are the largest.
Figures Sum(const std::vector<Figures>& all);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_LOAD_FIGURES_H_
