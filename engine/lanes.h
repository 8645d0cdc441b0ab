// The lanes of an accelerator: as many calls of its layers as there are lanes run at once, each with buffers of its own.
//
// Threads: all methods may be called from any thread. Whoever takes a lane has it alone until the Use goes. A thread that holds one
// lane must not take another.
#ifndef MOED_ENGINE_LANES_H_
#define MOED_ENGINE_LANES_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/forward.h"
#include "kernels/accelerator.h"

namespace moed {

class LaneSet {
 public:
  // A lane and the host buffers of the call that uses it: scratch().lane is the lane.
  class Use {
   public:
    Use(Use&& other) noexcept : set_(std::exchange(other.set_, nullptr)), index_(other.index_) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (set_ != nullptr) set_->Give(index_);
    }
    Scratch& scratch() const { return *set_->scratches_[index_]; }

   private:
    friend class LaneSet;
    Use(LaneSet* set, size_t index) : set_(set), index_(index) {}
    LaneSet* set_;
    size_t index_;
  };

  // `count` >= 1 lanes of `accelerator`, which must outlive them. Errors as Accelerator::NewLane.
  static absl::StatusOr<std::unique_ptr<LaneSet>> Make(Accelerator& accelerator, int count);

  Accelerator& accelerator() const { return accelerator_; }
  size_t count() const { return lanes_.size(); }

  // Waits until a lane is free.
  Use Take();
  // Waits until lane `index` < count() is free.
  Use Take(size_t index);

 private:
  explicit LaneSet(Accelerator& accelerator) : accelerator_(accelerator) {}
  void Give(size_t index);

  Accelerator& accelerator_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Scratch>> scratches_;  // of lanes_[i]
  std::mutex mutex_;
  std::condition_variable given_;
  std::vector<bool> taken_;  // guarded by mutex_
};

}  // namespace moed

#endif  // MOED_ENGINE_LANES_H_
