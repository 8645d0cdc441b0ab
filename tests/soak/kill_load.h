// What the death of a client costs the others: three clients at a steady rate, one of which is killed in the middle of its calls
// over and over. In turns with windows in which nobody ends; in which that client ends by itself as often; and in which as many
// processes of its size are killed that are clients of another server, which is the machine's own share. Whoever is to end was
// started and connected before, since starting a process takes more time of the processors than its death.
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
  std::string filter;     // only the kinds of calls whose names contain it
};

// Prints the figures; whether the others lost nothing, their p99 was at most 1.5 times that without any end, that of ends without
// a kill and that of the deaths of strangers, and the server kept nothing of the dead. Errors: what keeps it from running.
absl::StatusOr<bool> RunKillLoad(const KillLoadOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_KILL_LOAD_H_
