// A copy of a checkpoint with other weights of the same shapes: the packed codes of its experts are changed, all else is the same.
#ifndef MOED_TESTS_SOAK_OTHER_WEIGHTS_H_
#define MOED_TESTS_SOAK_OTHER_WEIGHTS_H_

#include <string>

#include "absl/status/status.h"

namespace moed::testing {

// Copies the folder `from`, with one file of weights, to the new folder `to`. INVALID_ARGUMENT when it has no tensors
// "*.weight_packed".
absl::Status CopyWithOtherWeights(const std::string& from, const std::string& to);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_OTHER_WEIGHTS_H_
