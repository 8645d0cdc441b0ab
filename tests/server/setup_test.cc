// From options to an engine: how many threads, what is said about them, and what is refused.
#include <catch2/catch.hpp>

#include <string>

#include "kernels/cpu_limits.h"
#include "server/setup.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;

struct OnDisk {
  OnDisk() {
    testing::CheckpointBuilder builder;
    testing::AddModel({.family = testing::ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32}, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
    options.models = {{"m", dir.path()}};
  }
  testing::TempDir dir;
  ServeOptions options;
};

HostStatus Host(int threads, int processors, double quota) {
  HostStatus host;
  host.threads = threads;
  host.processors = processors;
  host.cpu_quota = quota;
  return host;
}

}  // namespace

TEST_CASE("B69: without --threads the engine runs what mask and quota allow, with it exactly what was asked for") {
  OnDisk disk;
  const int processors = static_cast<int>(UsableProcessors().size());
  const ThreadCount fitting = ThreadsFor(processors, CgroupQuota());
  const auto by_default = SetUpEngine(disk.options);
  REQUIRE(by_default.ok());
  CHECK((*by_default)->Host().threads == fitting.threads);
  CHECK((*by_default)->Host().threads_limit == fitting.limit);
  CHECK((*by_default)->Host().processors == processors);
  CHECK_FALSE((*by_default)->Host().pinned);
  disk.options.threads = processors + 3;
  const auto asked = SetUpEngine(disk.options);
  REQUIRE(asked.ok());
  CHECK((*asked)->Host().threads == processors + 3);
  CHECK((*asked)->Host().threads_limit == "operator's choice");
  CHECK(ThreadWarnings((*asked)->Host()).size() >= 1);
}

TEST_CASE("Pinning more threads than there are usable processors is refused with both numbers") {
  OnDisk disk;
  const int processors = static_cast<int>(UsableProcessors().size());
  disk.options.pin_threads = true;
  disk.options.threads = processors;
  const auto fits = SetUpEngine(disk.options);
  REQUIRE(fits.ok());
  CHECK((*fits)->Host().pinned);
  disk.options.threads = processors + 1;
  const auto refused = SetUpEngine(disk.options);
  CHECK(refused.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(refused.status().message()),
             Contains("--pin-threads: wanted at most " + std::to_string(processors) + " threads") &&
                 Contains("got --threads " + std::to_string(processors + 1)));
}

TEST_CASE("Threads beyond the processors or the quota are warned about with both numbers, others are not") {
  CHECK(ThreadWarnings(Host(4, 4, 0)).empty());
  CHECK(ThreadWarnings(Host(2, 4, 2.0)).empty());
  CHECK(ThreadWarnings(Host(1, 4, 0.5)).empty());  // there is no fewer

  const auto many = ThreadWarnings(Host(16, 4, 0));
  REQUIRE(many.size() == 1);
  CHECK_THAT(many[0], Contains("16 threads") && Contains("4 usable processors"));

  const auto over_quota = ThreadWarnings(Host(3, 4, 2.5));
  REQUIRE(over_quota.size() == 1);
  CHECK_THAT(over_quota[0], Contains("3 threads") && Contains("2.5 processors of the cgroup's quota"));

  CHECK(ThreadWarnings(Host(16, 4, 1.5)).size() == 2);
}

}  // namespace moed
