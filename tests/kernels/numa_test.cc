// Nodes of memory and processors, against made-up folders and what this machine can say.
#include <catch2/catch.hpp>

#include <sys/mman.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/cpu_limits.h"
#include "kernels/numa.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

// A made-up /sys/devices/system/node.
class NodeFolder {
 public:
  void Add(const std::string& name, const std::string& cpulist) {
    testing::WriteFile(dir_.MakeDir(name) + "/cpulist", cpulist);
  }
  std::vector<int> Of(const std::vector<int>& processors) const { return NodesOfProcessors(processors, dir_.path()); }

 private:
  testing::TempDir dir_;
};

std::vector<int> NodesOf(const void* data, size_t bytes) {
  const std::span<const std::byte> range(static_cast<const std::byte*>(data), bytes);
  return NodesOfMemory(std::span(&range, 1));
}

}  // namespace

TEST_CASE("Processors lie on the nodes that list them") {
  NodeFolder folder;
  folder.Add("node0", "0-3,8-11\n");
  folder.Add("node1", "4-7,12\n");
  folder.Add("node10", "13\n");
  folder.Add("node2", "\n");  // memory only
  CHECK(folder.Of({0, 1, 9}) == std::vector<int>{0});
  CHECK(folder.Of({4}) == std::vector<int>{1});
  CHECK(folder.Of({3, 12, 13}) == std::vector<int>{0, 1, 10});
  CHECK(folder.Of({99}).empty());
  CHECK(folder.Of({}).empty());
}

TEST_CASE("Folders that are missing or say nothing sensible leave the nodes unknown") {
  CHECK(NodesOfProcessors({0}, "/nonexistent").empty());
  NodeFolder folder;
  folder.Add("node", "0\n");
  folder.Add("nodes0", "0\n");
  folder.Add("node0x", "0\n");
  folder.Add("node-1", "0\n");
  folder.Add("node99999999999999999999", "0\n");
  folder.Add("node3", "x,-,99999999999999999999,-4,0-x\n");
  CHECK(folder.Of({0, 1}).empty());
}

TEST_CASE("Memory that was written lies on a node of this machine, memory that was never touched on none") {
  constexpr size_t kBytes = size_t{8} << 20;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  CHECK(NodesOf(memory, kBytes).empty());
  std::memset(memory, 1, kBytes);
  const std::vector<int> nodes = NodesOf(memory, kBytes);
  const std::vector<int> last_byte = NodesOf(static_cast<char*>(memory) + kBytes - 1, 1);
  const std::vector<int> none = NodesOf(memory, 0);
  munmap(memory, kBytes);
  if (nodes.empty()) return testing::Skip("the kernel does not tell where memory lies");
  for (const int node : nodes) CHECK(std::filesystem::exists("/sys/devices/system/node/node" + std::to_string(node)));
  CHECK(last_byte.size() == 1);
  CHECK(none.empty());
}

TEST_CASE("This process's processors lie on a node where the machine has nodes") {
  if (!std::filesystem::exists("/sys/devices/system/node/node0")) return testing::Skip("the kernel lists no nodes");
  CHECK_FALSE(NodesOfProcessors(UsableProcessors()).empty());
}

}  // namespace moed
