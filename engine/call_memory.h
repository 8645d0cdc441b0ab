// Memory for the hidden states and the outputs of calls: from the heap, or pinned for layers on an accelerator, which then reads
// and writes it without a copy by the processor.
//
// Pinning costs milliseconds and stops the device, so buffers are kept and reused. Threads: a cache may be used from any thread. It
// is held by every buffer that came from it, and so outlives them: a buffer may go on any thread, at any time, also when the engine
// is gone. The accelerator outlives all.
#ifndef MOED_ENGINE_CALL_MEMORY_H_
#define MOED_ENGINE_CALL_MEMORY_H_

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/accelerator.h"

namespace moed {

class PinnedCache;

// Uninitialised memory, aligned to 64 bytes at least. Movable; goes back to where it came from with the object, which never throws.
class CallMemory {
 public:
  CallMemory() = default;
  CallMemory(CallMemory&&) noexcept = default;
  CallMemory& operator=(CallMemory&&) = delete;
  ~CallMemory();

  // From the heap. RESOURCE_EXHAUSTED with the bytes when there is none left.
  static absl::StatusOr<CallMemory> FromHeap(size_t bytes);

  void* data() const { return data_; }

 private:
  friend class PinnedCache;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  void* data_ = nullptr;
  std::unique_ptr<void, Free> heap_;
  std::shared_ptr<PinnedCache> cache_;
  std::unique_ptr<PinnedBuffer> pinned_;
};

class PinnedCache : public std::enable_shared_from_this<PinnedCache> {
 public:
  static constexpr size_t kMaxBytes = size_t{512} << 20;  // pinned, whether in use or free
  static constexpr size_t kMaxFree = 128;                 // buffers: two a call, of calls that wait as well

  explicit PinnedCache(Accelerator& accelerator) : accelerator_(accelerator) { free_.reserve(kMaxFree); }

  // Pinned memory: the smallest free buffer that is large enough and not more than twice what is needed, else a new one. From the
  // heap when the limit or the system refuses; errors as CallMemory::FromHeap.
  absl::StatusOr<CallMemory> Allocate(size_t bytes);

  // Buffers that wait for a call.
  size_t free_buffers() const;

 private:
  friend class CallMemory;
  std::unique_ptr<PinnedBuffer> TakeFree(size_t bytes);
  std::unique_ptr<PinnedBuffer> Pin(size_t bytes);
  void Give(std::unique_ptr<PinnedBuffer> buffer) noexcept;

  Accelerator& accelerator_;
  mutable std::mutex mutex_;
  size_t pinned_bytes_ = 0;                          // guarded by mutex_
  std::vector<std::unique_ptr<PinnedBuffer>> free_;  // guarded by mutex_; never grows beyond what was reserved
};

}  // namespace moed

#endif  // MOED_ENGINE_CALL_MEMORY_H_
