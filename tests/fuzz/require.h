// What a fuzz target says when the code under test broke its contract: a line and the end of the process, which the fuzzer
// keeps as a finding.
#ifndef MOED_TESTS_FUZZ_REQUIRE_H_
#define MOED_TESTS_FUZZ_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

namespace moed::fuzz {

// Ends the process unless `holds`; `claim` says what should have held.
inline void Require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "BROKEN: %s\n", claim);
  std::abort();
}

}  // namespace moed::fuzz

#endif  // MOED_TESTS_FUZZ_REQUIRE_H_
