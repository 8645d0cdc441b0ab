// On which memory nodes (NUMA) memory lies and processors are: reports, nothing is moved.
//
// By system calls and /sys; "unknown" where the kernel has neither. Safe from any thread.
#ifndef MOED_KERNELS_NUMA_H_
#define MOED_KERNELS_NUMA_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace moed {

// The nodes on which pages of `ranges` lie, ascending. Of a large range about 500 pages are asked for, evenly spread; pages that
// were never touched lie nowhere. Empty: unknown, or nothing touched.
std::vector<int> NodesOfMemory(std::span<const std::span<const std::byte>> ranges);

// The nodes of `processors`, ascending. Empty: unknown. `folder` has nodeN/cpulist, as /sys/devices/system/node.
std::vector<int> NodesOfProcessors(const std::vector<int>& processors,
                                   const std::string& folder = "/sys/devices/system/node");

}  // namespace moed

#endif  // MOED_KERNELS_NUMA_H_
