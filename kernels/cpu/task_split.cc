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
  int64_t done = 0;
  const auto close = [&] {
    if (list.parts_.size() > (list.ends_.empty() ? 0 : list.ends_.back())) list.ends_.push_back(list.parts_.size());
  };
  for (int e = 0; e < experts; ++e) {
    const int64_t each = cost(e);
    for (int64_t first = 0; each > 0 && first < pairs;) {
      // The border of the task that `done` lies in, in pairs from here; at least one.
      const int64_t border = (done * tasks / total + 1) * total / tasks;
      const int64_t count = std::clamp<int64_t>((border - done + each / 2) / each, 1, pairs - first);
      list.parts_.push_back({e, first, first + count});
      first += count;
      done += count * each;
      if (done + each / 2 >= border) close();
    }
  }
  close();
  return list;
}

}  // namespace moed::cpu
