// How a stage is cut into tasks: contiguous runs of (expert, pair of panels), of equal cost.
#ifndef MOED_KERNELS_CPU_TASK_SPLIT_H_
#define MOED_KERNELS_CPU_TASK_SPLIT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/token_sort.h"

namespace moed::cpu {

// Pairs [first, last) of one expert, for all of its rows.
struct TaskPart {
  int expert = 0;
  int64_t first = 0;
  int64_t last = 0;
};

// Tasks, each of them one or more parts.
class TaskList {
 public:
  int64_t size() const { return static_cast<int64_t>(ends_.size()); }
  std::span<const TaskPart> parts(int64_t task) const {
    const size_t begin = task == 0 ? 0 : ends_[static_cast<size_t>(task) - 1];
    return std::span<const TaskPart>(parts_).subspan(begin, ends_[static_cast<size_t>(task)] - begin);
  }

 private:
  friend TaskList SplitTasks(const SortedSlots& sorted, int experts, int64_t pairs, int64_t pair_bytes, int threads);
  std::vector<TaskPart> parts_;
  std::vector<size_t> ends_;  // of each task in parts_
};

// Cuts the experts that have rows, `pairs` pairs of `pair_bytes` each. A pair costs its bytes and, on top, its rows. A thread
// gets up to eight tasks, for balance, but none shorter than half a MiB: threads that alternate short runs of memory read at half
// of the speed (measured, docs/performance.md).
TaskList SplitTasks(const SortedSlots& sorted, int experts, int64_t pairs, int64_t pair_bytes, int threads);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_TASK_SPLIT_H_
