// The life of a soak: a server on two models, client processes of which one is killed every few seconds, changes of the models'
// weights in between, and the kernel's numbers of the server before, during and after. Prints what it does, and a table of what
// came of it.
#ifndef MOED_TESTS_SOAK_SOAK_LIFE_H_
#define MOED_TESTS_SOAK_SOAK_LIFE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace moed::testing {

struct SoakOptions {
  std::string program;  // this one, which is started again as the clients
  std::string moed;
  std::string data;  // the folder of checkpoints, tests/data
  double seconds = 600;
  int processes = 3;
  int threads = 4;  // of each process
  uint32_t seed = 1;
};

// Whether all went well: no wrong answer and no unexpected error, memory as flat and descriptors and mappings as few as before, and
// an end with exit code 0. Errors: what keeps the soak from running.
absl::StatusOr<bool> RunSoak(const SoakOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_LIFE_H_
