#include "server/allocator.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace moed {
namespace {

constexpr int kMiB = 1 << 20;
constexpr uint64_t kNoticeable = 64 * kMiB;  // below that a trim costs more in later page faults than it gives back

// Bytes of this process in memory; 0 when the system does not say.
uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0, resident = 0;
  statm >> total >> resident;
  return statm ? resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
}

}  // namespace

// With glibc's defaults every large message is mapped, faulted in page by page and unmapped again, which costs many times
// the transport itself. So blocks come from the heap up to the largest threshold that glibc accepts, and the heap shrinks
// only when its free top exceeds the largest message several times over. One arena for all threads: a buffer that the
// compute thread frees is the next one that a transport thread gets, already faulted in, and a trim reaches all of it.
void SetUpAllocator() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 * kMiB);
  mallopt(M_TRIM_THRESHOLD, 1024 * kMiB);
  mallopt(M_TOP_PAD, 16 * kMiB);
}

void IdleTrimmer::Tick(uint64_t work) {
  const uint64_t resident = ResidentBytes();
  const bool quiet = work == last_work_ && resident == last_resident_;
  trimmed_ = trimmed_ && quiet;
  last_work_ = work;
  last_resident_ = resident;
  if (!quiet || trimmed_ || resident < lowest_ + kNoticeable) return;
  malloc_trim(0);
  trimmed_ = true;
  last_resident_ = ResidentBytes();
  lowest_ = lowest_ == 0 ? last_resident_ : std::min(lowest_, last_resident_);
}

}  // namespace moed
