// What a change of weights costs the calls beside it: callers of every transport at a steady rate, while the weights of a model of
// some hundred MB are swapped every two seconds. Every answer is held against that of the generation which it names, and that
// generation must have been one that was served during the call. Prints how long calls took that a swap was beside, and others.
//
// Threads: RunSwapLoad starts and joins its own.
#ifndef MOED_TESTS_SOAK_SWAP_LOAD_H_
#define MOED_TESTS_SOAK_SWAP_LOAD_H_

#include <string>

#include "absl/status/statusor.h"

namespace moed::testing {

struct SwapLoadOptions {
  std::string moed;
  double seconds = 60;
};

// Whether no call failed and every answer was right, all swaps took place, and the server ended with exit code 0. Errors: what
// keeps it from running.
absl::StatusOr<bool> RunSwapLoad(const SwapLoadOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SWAP_LOAD_H_
