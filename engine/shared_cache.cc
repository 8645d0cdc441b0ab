#include "engine/shared_cache.h"

#include <algorithm>

namespace moed {

absl::StatusOr<std::shared_ptr<const SharedMemory>> SharedCache::Open(const SharedHandle& handle) {
  std::lock_guard<std::mutex> lock(mutex_);  // also while opening and closing: nothing is opened twice or while it is being closed
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.first == handle; });
  if (at != entries_.end()) {
    std::rotate(at, at + 1, entries_.end());
    return entries_.back().second;
  }
  absl::StatusOr<std::unique_ptr<SharedMemory>> opened = accelerator_.OpenShared(handle);
  if (absl::IsAlreadyExists(opened.status())) {
    CloseIdle();  // which one stands in the way, nobody tells
    opened = accelerator_.OpenShared(handle);
  }
  if (absl::IsAlreadyExists(opened.status())) return absl::InvalidArgumentError(opened.status().message());
  if (!opened.ok()) return opened.status();
  if (entries_.size() >= kMaxOpen) {
    const auto idle = std::find_if(entries_.begin(), entries_.end(), IsIdle);
    if (idle != entries_.end()) entries_.erase(idle);
  }
  entries_.emplace_back(handle, *std::move(opened));
  return entries_.back().second;
}

bool SharedCache::IsIdle(const Entry& entry) { return entry.second.use_count() == 1; }

void SharedCache::CloseIdle() { std::erase_if(entries_, IsIdle); }

}  // namespace moed
