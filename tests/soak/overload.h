// What a server does with more calls than it can compute: goodput at saturation, then at five times as many calls with deadlines,
// how long accepted calls take, how the others are refused, and whether the death of one client is felt by the others. For calls
// that take time to compute; floods of tiny ones are flood.h's.
#ifndef MOED_TESTS_SOAK_OVERLOAD_H_
#define MOED_TESTS_SOAK_OVERLOAD_H_

#include <string>

#include "absl/status/statusor.h"

namespace moed::testing {

struct OverloadOptions {
  std::string program;  // this one, which is started again as the clients
  std::string moed;
  std::string data;     // the folder of checkpoints, tests/data
  double window_s = 5;  // of each measurement, of which there are some ten
  std::string filter;   // only the kinds of calls whose names contain it
};

// Prints the figures; whether all are as wanted. Errors: what keeps it from running.
absl::StatusOr<bool> RunOverload(const OverloadOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_OVERLOAD_H_
