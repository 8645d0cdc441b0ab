#include "kernels/cpu/task_split.h"

#include <algorithm>

namespace moed::cpu {
namespace {

constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kRunBytes = int64_t{512} << 10;

// Rows whose arithmetic takes as long as reading a pair's weights, about.
constexpr int64_t kRowsPerRead = 4;

}  // namespace

TaskList SplitTasks(const SortedSlots& sorted, int experts, int64_t pairs, int64_t pair_bytes, int threads) {
  const auto cost = [&](int e) {
    const int64_t rows = sorted.begin[e + 1] - sorted.begin[e];
    return rows == 0 ? 0 : kRowsPerRead + rows;
  };
  int64_t total = 0, bytes = 0;
  for (int e = 0; e < experts; ++e) {
    total += cost(e) * pairs;
    bytes += cost(e) > 0 ? pairs * pair_bytes : 0;
  }
  const int64_t tasks = threads * std::clamp<int64_t>(bytes / threads / kRunBytes, 1, kTasksPerThread);
  TaskList list;
  // In `done` pairs' costs, the task that is open ends at `border`: at the pair whose middle is the first beyond it. The next
  // border is the first beyond that middle again, so that what is left before it is never a task of its own.
  int64_t done = 0, border = (total + tasks - 1) / tasks;
  for (int e = 0; e < experts; ++e) {
    const int64_t each = cost(e);
    for (int64_t first = 0; each > 0 && first < pairs;) {
      if (const int64_t middle = done + each / 2; middle >= border) {
        if (!list.parts_.empty()) list.ends_.push_back(list.parts_.size());
        border = ((middle * tasks / total + 1) * total + tasks - 1) / tasks;
      }
      const int64_t count = std::clamp<int64_t>((border - done + each / 2) / each, 1, pairs - first);
      list.parts_.push_back({e, first, first + count});
      first += count;
      done += count * each;
    }
  }
  if (!list.parts_.empty()) list.ends_.push_back(list.parts_.size());
  return list;
}

}  // namespace moed::cpu
