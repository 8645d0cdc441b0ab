// How many threads may run: quotas of made-up cgroup folders, and the affinity mask of the test itself.
#include <catch2/catch.hpp>

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/cpu_limits.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

// A made-up /sys/fs/cgroup.
class CgroupRoot {
 public:
  // Writes `text` into the file `name` of the cgroup `folder` ("", "unified/a", "cpu/a/b").
  void Add(const std::string& folder, const std::string& name, const std::string& text) {
    const std::string path = dir_.File(folder);
    std::filesystem::create_directories(path);
    testing::WriteFile(path + "/" + name, text);
  }
  void AddVersion1(const std::string& folder, const std::string& quota, const std::string& period) {
    Add(folder, "cpu.cfs_quota_us", quota);
    Add(folder, "cpu.cfs_period_us", period);
  }
  double Quota(const std::string& membership) const { return CgroupQuota(dir_.path(), membership); }

 private:
  testing::TempDir dir_;
};

// Threads on 16 processors for a process in the cgroup /a of version 2 with this cpu.max.
int ThreadsOf16(const std::string& cpu_max) {
  CgroupRoot root;
  root.Add("a", "cpu.max", cpu_max);
  return ThreadsFor(16, root.Quota("0::/a\n")).threads;
}

constexpr char kVersion1Lines[] = "9:name=systemd:/x\n5:memory:/m\n4:cpu,cpuacct:/a/b\n3:cpuset:/c\n0::/\n";

}  // namespace

TEST_CASE("B69: threads are counted from the quota of the cgroup, and from the affinity mask without one") {
  CHECK(ThreadsOf16("200000 100000\n") == 2);
  CHECK(ThreadsOf16("765000 100000\n") == 7);
  CHECK(ThreadsOf16("max 100000\n") == 16);
  CHECK(ThreadsOf16("50000 100000\n") == 1);

  CgroupRoot nested;
  nested.Add("a", "cpu.max", "400000 100000\n");
  nested.Add("a/b", "cpu.max", "max 100000\n");
  CHECK(ThreadsFor(16, nested.Quota("0::/a/b\n")).threads == 4);

  CgroupRoot version1;
  version1.AddVersion1("cpu,cpuacct/a/b", "200000\n", "100000\n");
  CHECK(ThreadsFor(16, version1.Quota(kVersion1Lines)).threads == 2);

  CHECK(ThreadsFor(4, 0.0).threads == 4);  // affinity 0-3
}

TEST_CASE("What limits the threads is named, the quota with its size") {
  CHECK(ThreadsFor(16, 2.0).limit == "cgroup quota 2.0");
  CHECK(ThreadsFor(16, 7.65).limit == "cgroup quota 7.65");
  CHECK(ThreadsFor(16, 0.5).limit == "cgroup quota 0.5");
  CHECK(ThreadsFor(2, 2.0).limit == "affinity");
  CHECK(ThreadsFor(2, 64.0).limit == "affinity");
  CHECK(ThreadsFor(3, 0.0).limit == "affinity");
}

TEST_CASE("The smallest quota of a cgroup and all its parents counts, in version 2 and 1") {
  for (const char* below : {"", "unified/"}) {
    CgroupRoot root;
    root.Add(below + std::string("a"), "cpu.max", "300000 100000\n");
    root.Add(below + std::string("a/b"), "cpu.max", "800000 100000\n");
    root.Add(below + std::string("a/b/c"), "cpu.max", "max 100000\n");
    root.Add(below + std::string("z"), "cpu.max", "100000 100000\n");  // somebody else's
    CHECK(root.Quota("0::/a/b/c\n") == 3.0);
    CHECK(root.Quota("0::/z/b\n") == 1.0);
    CHECK(root.Quota("0::/\n") == 0.0);
  }
  for (const char* top : {"cpu", "cpu,cpuacct"}) {
    CgroupRoot root;
    root.AddVersion1(top, "-1\n", "100000\n");
    root.AddVersion1(top + std::string("/a"), "150000\n", "50000\n");
    root.AddVersion1(top + std::string("/a/b"), "900000\n", "100000\n");
    CHECK(root.Quota(kVersion1Lines) == 3.0);
  }
}

TEST_CASE("A process that sees its own cgroup as the root, or whose path is not below the root, finds the root's quota") {
  CgroupRoot container;
  container.Add("", "cpu.max", "250000 100000\n");
  CHECK(container.Quota("0::/\n") == 2.5);
  CHECK(container.Quota("0::/../../other\n") == 2.5);

  CgroupRoot mounted;  // version 1 without a namespace: the path is the host's, the mount the container's
  mounted.AddVersion1("cpu,cpuacct", "400000\n", "100000\n");
  CHECK(mounted.Quota("4:cpu,cpuacct:/docker/0123456789abcdef\n") == 4.0);
}

TEST_CASE("A path cannot lead out of the root") {
  CgroupRoot root;
  root.Add("inside", "cpu.max", "max 100000\n");
  root.Add("outside", "cpu.max", "100000 100000\n");
  CHECK(root.Quota("0::/inside/../outside\n") == 0.0);
}

TEST_CASE("Files and lines that are broken limit nothing and never give zero threads") {
  const std::vector<std::string> broken = {
      "", "\n", "x", "max", "-5 100000", "0 100000", "200000 0", "200000 -1", "200000 x", "1e5 100000", "2.5 100000",
      "200000 100000 7", "99999999999999999999999999 100000", "200000 99999999999999999999999999", std::string(100000, '9'),
      std::string("\0\0\0", 3), "200000,100000", "\xff\xfe"};
  for (const std::string& text : broken) {
    INFO("cpu.max: " << text.substr(0, 40));
    CHECK(ThreadsOf16(text) == 16);
    CgroupRoot version1;
    version1.AddVersion1("cpu/a", text, "100000\n");
    version1.AddVersion1("cpu/b", "200000\n", text);
    CHECK(version1.Quota("4:cpu:/a\n") == 0.0);
    CHECK(version1.Quota("4:cpu:/b\n") == 0.0);
    CHECK(version1.Quota(text) == 0.0);
  }
  CHECK(ThreadsOf16("200000") == 2);                          // the period has a default
  CHECK(ThreadsOf16("9223372036854775807 1\n") == 16);        // more than there is
  CHECK(ThreadsOf16("1 9223372036854775807\n") == 1);         // next to nothing
  CHECK(ThreadsFor(0, 0.0).threads == 1);
  CHECK(ThreadsFor(-3, 0.5).threads == 1);
}

TEST_CASE("A broken child does not hide the quota of its parent, nor a missing file that of its child") {
  CgroupRoot root;
  root.Add("a", "cpu.max", "200000 100000\n");
  root.Add("a/b", "cpu.max", "garbage\n");
  CHECK(root.Quota("0::/a/b\n") == 2.0);
  CHECK(root.Quota("0::/a/b/missing/missing\n") == 2.0);
  CgroupRoot child;
  child.Add("a/b", "cpu.max", "200000 100000\n");
  CHECK(child.Quota("0::/a/b\n") == 2.0);
  CgroupRoot half;  // version 1 with only one of its two files
  half.Add("cpu/a", "cpu.cfs_quota_us", "200000\n");
  CHECK(half.Quota("4:cpu:/a\n") == 0.0);
}

TEST_CASE("Without cgroups there is no quota") {
  CHECK(CgroupQuota("/nonexistent", kVersion1Lines) == 0.0);
  CHECK(CgroupRoot().Quota(kVersion1Lines) == 0.0);
  CHECK(CgroupRoot().Quota("") == 0.0);
  CHECK(CgroupRoot().Quota("no colons\n:\n::\n:::\n") == 0.0);
  CHECK(CgroupRoot().Quota("5:cpuset,cpuacct:/a\n") == 0.0);
}

TEST_CASE("The usable processors are those of the affinity mask, in order") {
  const std::vector<int> all = UsableProcessors();
  REQUIRE_FALSE(all.empty());
  cpu_set_t before, last;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  CPU_ZERO(&last);
  CPU_SET(static_cast<size_t>(all.back()), &last);
  REQUIRE(sched_setaffinity(0, sizeof(last), &last) == 0);
  const std::vector<int> one = UsableProcessors();
  REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
  CHECK(one == std::vector<int>{all.back()});
  CHECK(UsableProcessors() == all);
  CHECK(std::is_sorted(all.begin(), all.end()));
}

}  // namespace moed
