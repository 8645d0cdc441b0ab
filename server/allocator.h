// How the process uses glibc's heap: large messages must not cost page faults while calls come, and must not stay in
// memory when they stop.
#ifndef MOED_SERVER_ALLOCATOR_H_
#define MOED_SERVER_ALLOCATOR_H_

#include <cstdint>

namespace moed {

// Call first thing in main.
void SetUpAllocator();

// Gives free memory back to the system when the server is idle. Not thread-safe; Tick it at intervals of seconds.
class IdleTrimmer {
 public:
  // `work` is any number that grows with the work done. Trims once per quiet time (neither work nor resident size changed
  // since the last tick) in which the resident size is noticeably above the lowest that a trim ever reached.
  void Tick(uint64_t work);

 private:
  uint64_t last_work_ = 0;
  uint64_t last_resident_ = 0;
  uint64_t lowest_ = 0;  // 0: no trim yet
  bool trimmed_ = false; // in this quiet time
};

}  // namespace moed

#endif  // MOED_SERVER_ALLOCATOR_H_
