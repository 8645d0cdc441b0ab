// The main function of every test program: Catch2's, plus one closing line per program that `./dev test` adds up:
//   MOED-TEST-RESULT passed=N failed=N skipped=N
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <cstdio>
#include <string>

#include "tests/support/skip.h"

namespace moed::testing {
namespace {

struct Counts {
  std::string current;
  bool current_skipped = false;
  int passed = 0;
  int failed = 0;
  int skipped = 0;
};

Counts& TheCounts() {
  static Counts counts;
  return counts;
}

class Listener : public Catch::TestEventListenerBase {
 public:
  using TestEventListenerBase::TestEventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    TheCounts().current = info.name;
    TheCounts().current_skipped = false;
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    Counts& counts = TheCounts();
    if (stats.totals.assertions.failed > 0 || stats.totals.testCases.failed > 0) {
      ++counts.failed;
    } else if (counts.current_skipped) {
      ++counts.skipped;
    } else {
      ++counts.passed;
    }
  }

  void testRunEnded(const Catch::TestRunStats&) override {
    const Counts& counts = TheCounts();
    std::printf("MOED-TEST-RESULT passed=%d failed=%d skipped=%d\n", counts.passed, counts.failed, counts.skipped);
    std::fflush(stdout);
  }
};

CATCH_REGISTER_LISTENER(Listener)

}  // namespace

void Skip(const std::string& reason) {
  TheCounts().current_skipped = true;
  std::printf("SKIP %s: %s\n", TheCounts().current.c_str(), reason.c_str());
}

}  // namespace moed::testing
