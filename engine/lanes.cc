#include "engine/lanes.h"

#include <algorithm>

namespace moed {

absl::StatusOr<std::unique_ptr<LaneSet>> LaneSet::Make(Accelerator& accelerator, int count) {
  std::unique_ptr<LaneSet> set(new LaneSet(accelerator));
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<Lane>> lane = accelerator.NewLane();
    if (!lane.ok()) return lane.status();
    set->lanes_.push_back(*std::move(lane));
    set->scratches_.push_back(std::make_unique<Scratch>());
    set->scratches_.back()->lane = set->lanes_.back().get();
  }
  set->taken_.assign(set->lanes_.size(), false);
  return set;
}

LaneSet::Use LaneSet::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<bool>::iterator free;
  given_.wait(lock, [&] { return (free = std::find(taken_.begin(), taken_.end(), false)) != taken_.end(); });
  *free = true;
  return Use(this, static_cast<size_t>(free - taken_.begin()));
}

LaneSet::Use LaneSet::Take(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  given_.wait(lock, [&] { return !taken_[index]; });
  taken_[index] = true;
  return Use(this, index);
}

void LaneSet::Give(size_t index) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_[index] = false;
  }
  given_.notify_all();  // who waits for one lane may not be the one that a single wake-up reaches
}

}  // namespace moed
