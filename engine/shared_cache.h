// Device memory of other processes, kept open from call to call: opening it takes longer than a small call.
//
// Threads: any. Who uses memory holds it by its pointer, so that it stays open when the cache lets go of it.
#ifndef MOED_ENGINE_SHARED_CACHE_H_
#define MOED_ENGINE_SHARED_CACHE_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/accelerator.h"

namespace moed {

class SharedCache {
 public:
  // Beside what calls use. The one that was not used for longest goes first, of those that no call uses.
  static constexpr size_t kMaxOpen = 64;

  explicit SharedCache(Accelerator& accelerator) : accelerator_(accelerator) {}

  // The memory of `handle`. What is only kept for later calls makes way for it; INVALID_ARGUMENT when what stands in its way is in
  // use by a call, whose memory was freed too early then. Other errors as Accelerator::OpenShared.
  absl::StatusOr<std::shared_ptr<const SharedMemory>> Open(const SharedHandle& handle);

 private:
  using Entry = std::pair<SharedHandle, std::shared_ptr<const SharedMemory>>;

  // Whether no call uses it: then none can without the lock.
  static bool IsIdle(const Entry& entry);
  // Closes what no call uses. Needs the lock.
  void CloseIdle();

  Accelerator& accelerator_;
  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_; the last one was used last
};

}  // namespace moed

#endif  // MOED_ENGINE_SHARED_CACHE_H_
