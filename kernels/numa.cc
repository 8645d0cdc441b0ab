#include "kernels/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

namespace moed {
namespace {

// Odd and prime, so that the pages asked for do not fall in step with memory that is interleaved over nodes.
constexpr size_t kSamples = 509;
constexpr int kMaxNodes = 1024;  // of Linux

// Adds the nodes of pages of `range`. False when the kernel does not tell.
bool AddNodes(std::span<const std::byte> range, size_t page_bytes, std::set<int>* nodes) {
  if (range.empty()) return true;
  const uintptr_t first = reinterpret_cast<uintptr_t>(range.data()) / page_bytes;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(range.data()) + range.size() - 1) / page_bytes;
  const size_t pages = last - first + 1;
  const size_t count = std::min(pages, kSamples);
  std::vector<void*> addresses(count);
  for (size_t i = 0; i < count; ++i) {
    addresses[i] = reinterpret_cast<void*>((first + pages * i / count) * page_bytes);
  }
  std::vector<int> where(count, -1);
  // Without a list of nodes move_pages moves nothing and answers where each page is, or a negative error for one that is nowhere.
  if (syscall(SYS_move_pages, 0, count, addresses.data(), nullptr, where.data(), 0) != 0) return false;
  for (const int node : where) {
    if (node >= 0) nodes->insert(node);
  }
  return true;
}

// "0-3,8": whether one of `processors` is in it.
bool ListHasAny(const std::string& list, const std::vector<int>& processors) {
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    int low = -1, high = -1;
    const char* const end = item.data() + item.size();
    auto read = std::from_chars(item.data(), end, low);
    if (read.ec != std::errc()) continue;
    high = low;
    if (read.ptr != end && *read.ptr == '-' && std::from_chars(read.ptr + 1, end, high).ec != std::errc()) continue;
    if (std::any_of(processors.begin(), processors.end(), [&](int p) { return p >= low && p <= high; })) return true;
  }
  return false;
}

// N of "nodeN"; -1 for another name.
int NodeNumber(const std::string& name) {
  constexpr std::string_view kPrefix = "node";
  int number = -1;
  const char* const end = name.data() + name.size();
  if (name.rfind(kPrefix, 0) != 0) return -1;
  const auto read = std::from_chars(name.data() + kPrefix.size(), end, number);
  return read.ec == std::errc() && read.ptr == end && number < kMaxNodes ? number : -1;
}

}  // namespace

std::vector<int> NodesOfMemory(std::span<const std::span<const std::byte>> ranges) {
  const long page_bytes = sysconf(_SC_PAGESIZE);
  if (page_bytes <= 0) return {};
  std::set<int> nodes;
  for (const std::span<const std::byte> range : ranges) {
    if (!AddNodes(range, static_cast<size_t>(page_bytes), &nodes)) return {};
  }
  return {nodes.begin(), nodes.end()};
}

std::vector<int> NodesOfProcessors(const std::vector<int>& processors, const std::string& folder) {
  std::set<int> nodes;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const int node = NodeNumber(at->path().filename().string());
    std::string list;
    if (node < 0 || !std::getline(std::ifstream(at->path() / "cpulist"), list)) continue;
    if (ListHasAny(list, processors)) nodes.insert(node);
  }
  return {nodes.begin(), nodes.end()};
}

}  // namespace moed
