// The closing line of a program that runs apart from `./dev test`: "N passed, N failed"; cases that were skipped
// count as passed here.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>

#include <cstdio>

namespace moed::testing {
namespace {

class Summary : public Catch::TestEventListenerBase {
 public:
  using TestEventListenerBase::TestEventListenerBase;
  void testRunEnded(const Catch::TestRunStats& stats) override {
    const Catch::Counts& cases = stats.totals.testCases;
    std::printf("%zu passed, %zu failed\n", static_cast<size_t>(cases.passed), static_cast<size_t>(cases.failed));
    std::fflush(stdout);
  }
};

CATCH_REGISTER_LISTENER(Summary)

}  // namespace
}  // namespace moed::testing
