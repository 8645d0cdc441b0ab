// What the death of a client costs the others: three clients at a steady rate, one of which is killed in the middle of its calls
// over and over. In turns with windows in which that client ends by itself and is started as often, which is what it is judged by,
// since starting a process takes processor time that is not what a death costs; and with windows in which nobody ends.
#ifndef MOED_TESTS_SOAK_KILL_LOAD_H_
#define MOED_TESTS_SOAK_KILL_LOAD_H_

#include <string>

#include "absl/status/statusor.h"

namespace moed::testing {

struct KillLoadOptions {
  std::string program;  // this one, which is started again as the clients
  std::string moed;
  std::string data;       // the folder of checkpoints, tests/data
  double window_s = 2.5;  // of each measurement
  int rounds = 4;
};

// Prints the figures; whether the others lost nothing, their p99 was at most 1.5 times that without any end and that of ends
// without a kill, and the server kept nothing of the dead. Errors: what keeps it from running.
absl::StatusOr<bool> RunKillLoad(const KillLoadOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_KILL_LOAD_H_
