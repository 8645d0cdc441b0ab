// One client process of a soak: threads that make random calls in random ways until their time is over, hold each answer against
// the known one, and break rules in between. What they saw is printed as lines, the counts so far once a second, so that a process
// which is killed has told nearly all.
//
// Lines: "COUNTS NAME=N ..." and, for each thing that should not have happened, "PROBLEM text".
// Threads: RunSoakClient starts and joins its own.
#ifndef MOED_TESTS_SOAK_SOAK_CLIENT_H_
#define MOED_TESTS_SOAK_SOAK_CLIENT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace moed::testing {

// What is counted. The first four are right answers by the way that they came.
enum class Seen { kRpc, kStream, kSharedMemory, kRing, kLate, kCancelled, kFull, kBad, kBroken, kWrong, kError };
inline constexpr std::array<const char*, 11> kSeenNames = {"rpc",     "stream", "shared-memory", "ring",  "late", "cancelled",
                                                           "refused", "bad",    "broken",        "wrong", "error"};

struct SoakClientOptions {
  std::string tcp, unix_socket;  // addresses of the server
  std::string answers;           // file of SoakAnswers
  uint32_t seed = 1;
  int threads = 4;
  double seconds = 10;
};

// Errors: what keeps it from starting. Problems of calls are printed.
absl::Status RunSoakClient(const SoakClientOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_CLIENT_H_
