// One client process of the measurement of overload: calls of one size, either the next one when the last was answered, or at
// random times of a given rate, whatever comes of them. Prints one line for each window of time, so that a process which is killed
// has told the ones before: "LOAD ok=N refused=N untold=N late=N other=N p50_us=X p99_us=X", latencies those of good answers.
#ifndef MOED_TESTS_SOAK_LOAD_CLIENT_H_
#define MOED_TESTS_SOAK_LOAD_CLIENT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace moed::testing {

struct LoadClientOptions {
  std::string server;
  int32_t layer = 0;
  int64_t rows = 8;
  int64_t hidden = 0;   // H
  int concurrency = 1;  // calls under way, when `rate` is 0
  double rate = 0;      // calls a second, at random times; 0: each when another was answered
  int deadline_ms = 60'000;
  double window_s = 5;
  int windows = 1;
  uint32_t seed = 1;
};

// Errors: what keeps it from starting.
absl::Status RunLoadClient(const LoadClientOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_LOAD_CLIENT_H_
