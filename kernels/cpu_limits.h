// How many threads can run at once here: the affinity mask, and the CPU quota of the control groups (cgroups).
//
// A process sees every processor of its mask also when its cgroup may only use the time of a few: with a thread for each it is
// stopped for the rest of every period. Pure functions of files and the mask; safe from any thread. Nothing here fails:
// what cannot be read or is no number limits nothing.
#ifndef MOED_KERNELS_CPU_LIMITS_H_
#define MOED_KERNELS_CPU_LIMITS_H_

#include <string>
#include <vector>

namespace moed {

// The processors of the calling thread's affinity mask, ascending; those that are online where there is no mask to read. Never
// empty.
std::vector<int> UsableProcessors();

// The smallest CPU quota, in processors (1.5: three halves of one's time), of the cgroups that a process is in and all of
// their parents; 0: none. `root` is the folder with the cgroup file systems (/sys/fs/cgroup), `membership` the contents of
// /proc/self/cgroup. Version 2 is looked for in `root` and `root`/unified (cpu.max), version 1 in the folder of the cpu
// controller (cpu.cfs_quota_us, cpu.cfs_period_us). A path that is not below `root`, as in a container that sees its own cgroup
// only, counts as far as it exists.
double CgroupQuota(const std::string& root, const std::string& membership);
// Of this process.
double CgroupQuota();

// "2.0", "7.65": a quota for people.
std::string QuotaText(double quota);

struct ThreadCount {
  int threads = 1;
  std::string limit;  // what keeps it from being more: "affinity", "cgroup quota 2.0"
};
// As many threads as `processors` and `quota` (0: none) keep busy: whole processors of the quota, since a thread more would
// be stopped with all others when the time is used up; at least one.
ThreadCount ThreadsFor(int processors, double quota);

}  // namespace moed

#endif  // MOED_KERNELS_CPU_LIMITS_H_
