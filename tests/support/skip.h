// Skipping a test case with a reason. Catch2 v2 has no skip: this prints `SKIP name: reason`, counts it for the closing
// line of the run, and the test case returns.
#ifndef MOED_TESTS_SUPPORT_SKIP_H_
#define MOED_TESTS_SUPPORT_SKIP_H_

#include <string>

namespace moed::testing {

// Marks the running test case as skipped. Use: `if (!can) return Skip("needs AVX-512");`
void Skip(const std::string& reason);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_SKIP_H_
