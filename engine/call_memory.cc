#include "engine/call_memory.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr size_t kAlignment = 64;                 // a cache line, and the widest vector register
constexpr size_t kSmall = size_t{64} << 10;       // sizes of pinned buffers are multiples: calls of about one size share them
constexpr size_t kLarge = size_t{1} << 20;

size_t RoundUp(size_t bytes, size_t multiple) { return (std::max<size_t>(bytes, 1) + multiple - 1) / multiple * multiple; }

}  // namespace

CallMemory::~CallMemory() {
  if (pinned_ != nullptr) cache_->Give(std::move(pinned_));
}

absl::StatusOr<CallMemory> CallMemory::FromHeap(size_t bytes) {
  CallMemory memory;
  memory.heap_.reset(std::aligned_alloc(kAlignment, RoundUp(bytes, kAlignment)));
  memory.data_ = memory.heap_.get();
  if (memory.data_ != nullptr) return memory;
  return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of a call's hidden states or output"));
}

absl::StatusOr<CallMemory> PinnedCache::Allocate(size_t bytes) {
  std::unique_ptr<PinnedBuffer> buffer = TakeFree(bytes);
  if (buffer == nullptr) buffer = Pin(RoundUp(bytes, bytes < kLarge ? kSmall : kLarge));
  if (buffer == nullptr) return CallMemory::FromHeap(bytes);
  CallMemory memory;
  memory.data_ = buffer->bytes().data();
  memory.pinned_ = std::move(buffer);
  memory.cache_ = shared_from_this();
  return memory;
}

std::unique_ptr<PinnedBuffer> PinnedCache::TakeFree(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const size_t size = (*at)->bytes().size();
    if (size < bytes || size / 2 > std::max(bytes, kSmall)) continue;
    if (best == free_.end() || size < (*best)->bytes().size()) best = at;
  }
  if (best == free_.end()) return nullptr;
  std::unique_ptr<PinnedBuffer> buffer = std::move(*best);
  free_.erase(best);
  return buffer;
}

// Counted before it is pinned, so that calls at once stay within the limit together. Free buffers of other sizes go first.
std::unique_ptr<PinnedBuffer> PinnedCache::Pin(size_t bytes) {
  std::vector<std::unique_ptr<PinnedBuffer>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (pinned_bytes_ + bytes > kMaxBytes && !free_.empty()) {
      dropped.push_back(std::move(free_.back()));
      free_.pop_back();
      pinned_bytes_ -= dropped.back()->bytes().size();
    }
    if (pinned_bytes_ + bytes > kMaxBytes) return nullptr;
    pinned_bytes_ += bytes;
  }
  dropped.clear();
  std::unique_ptr<PinnedBuffer> buffer;
  try {
    absl::StatusOr<std::unique_ptr<PinnedBuffer>> pinned = accelerator_.AllocatePinned(bytes);
    if (pinned.ok() && (*pinned)->bytes().size() == bytes) buffer = *std::move(pinned);
  } catch (const std::bad_alloc&) {  // as if the system had refused
  }
  if (buffer != nullptr) return buffer;
  std::lock_guard<std::mutex> lock(mutex_);
  pinned_bytes_ -= bytes;
  return nullptr;
}

void PinnedCache::Give(std::unique_ptr<PinnedBuffer> buffer) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() < kMaxFree) {
    free_.push_back(std::move(buffer));  // within what was reserved: does not throw
  } else {
    pinned_bytes_ -= buffer->bytes().size();
  }
}

size_t PinnedCache::free_buffers() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return free_.size();
}

}  // namespace moed
