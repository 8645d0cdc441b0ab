// The description of the machine that the test runs on, against what the operating system says about it.
#include <catch2/catch.hpp>

#include <sched.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "kernels/device_info.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

// The flags of the first processor in /proc/cpuinfo, underscores removed; empty when there is no such line.
std::set<std::string> CpuinfoFlags() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) {
      std::string name;
      for (const char c : word) {
        if (c != '_') name += c;
      }
      flags.insert(name);
    }
    break;
  }
  return flags;
}

TEST_CASE("Every flag has one name, and the names reach every flag once") {
  IsaFlags all;
  std::set<std::string> names;
  for (const IsaFlagName& flag : IsaFlagNames()) {
    CHECK(names.insert(flag.name).second);
    CHECK_FALSE(all.*(flag.flag));
    all.*(flag.flag) = true;
  }
  CHECK(names.size() == sizeof(IsaFlags));
  CHECK(names.count("avx512vnni") == 1);
  CHECK(names.count("amx_bf16") == 1);
}

TEST_CASE("The flags found are among those that the kernel lists, and AVX flags are found when listed") {
  const std::set<std::string> listed = CpuinfoFlags();
  if (listed.empty()) return testing::Skip("/proc/cpuinfo lists no flags");
  const IsaFlags isa = ThisDevice().isa;
  for (const IsaFlagName& flag : IsaFlagNames()) {
    std::string name;
    for (const char c : std::string(flag.name)) {
      if (c != '_') name += c;
    }
    INFO(flag.name);
    const bool in_list = listed.count(name) > 0;
    if (isa.*(flag.flag)) CHECK(in_list);
    // Tiles also need the process's permission, which the kernel may deny.
    if (name.rfind("amx", 0) != 0) CHECK((isa.*(flag.flag)) == in_list);
  }
}

TEST_CASE("No flag is set without the one that it builds on") {
  const IsaFlags isa = ThisDevice().isa;
  CHECK((isa.avx512f || !(isa.avx512bw || isa.avx512vl || isa.avx512dq || isa.avx512vnni || isa.avx512bf16)));
  CHECK((isa.amx_tile || !(isa.amx_int8 || isa.amx_bf16)));
}

TEST_CASE("This device has cores, memory and a name, and is the same when asked again") {
  const DeviceInfo device = ThisDevice();
  CHECK(device.name == "this");
  CHECK(device.cores >= 1);
  CHECK(device.memory_bytes > (uint64_t{16} << 20));
  const DeviceInfo again = ThisDevice();
  CHECK(again.isa == device.isa);
  CHECK(again.memory_bytes == device.memory_bytes);
}

TEST_CASE("Cores are counted from the affinity mask, not from the machine") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  const int cores = ThisDevice().cores;
  REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
  CHECK(cores == 1);
  CHECK(ThisDevice().cores == CPU_COUNT(&before));
}

}  // namespace
}  // namespace moed
