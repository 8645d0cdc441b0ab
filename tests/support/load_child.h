// Loading a checkpoint in a process of its own, for tests in which a crash, a hang or the memory that it takes is the point.
#ifndef MOED_TESTS_SUPPORT_LOAD_CHILD_H_
#define MOED_TESTS_SUPPORT_LOAD_CHILD_H_

#include <cstdint>
#include <string>
#include <vector>

namespace moed::testing {

struct LoadOutcome {
  bool finished = false;  // the child ended by itself, within the hang guard, without a crash
  std::string trouble;    // what it printed, when not finished
  bool ok = false;        // the checkpoint was loaded
  std::string error;      // the message of the refusal
  int64_t peak = 0;       // bytes: largest resident size over that at the start; the program's own pages are a few MiB of it
  int64_t held = 0;       // bytes: anonymous memory after the load over that at the start
};

// Runs load_probe (see there for `more`) on the checkpoint directory `path`; killed after `limit_seconds`. A test that calls
// this has //tests/support:load_probe among its data.
LoadOutcome LoadInChild(const std::string& path, const std::vector<std::string>& more = {}, int limit_seconds = 20);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_LOAD_CHILD_H_
