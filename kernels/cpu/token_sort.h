// Token sort: groups the slots of a batch by expert, so that each expert's weights are read once per call.
#ifndef MOED_KERNELS_CPU_TOKEN_SORT_H_
#define MOED_KERNELS_CPU_TOKEN_SORT_H_

#include <cstdint>
#include <span>
#include <vector>

namespace moed::cpu {

// Slots in the order of their experts. A slot is row * top_k + position; slots without an expert (id -1) are left out.
struct SortedSlots {
  std::vector<int32_t> slots;    // [routed], by expert, ascending inside an expert
  std::vector<int32_t> begin;    // [E + 1]: expert e owns slots[begin[e] .. begin[e + 1])
  std::vector<int32_t> position; // [rows * top_k]: index into `slots`, -1 for a slot without an expert
};

// Counting sort, stable. `ids` must already be validated: each in [-1, experts).
inline void SortSlots(std::span<const int32_t> ids, int experts, SortedSlots* sorted) {
  sorted->begin.assign(static_cast<size_t>(experts) + 1, 0);
  for (int32_t id : ids) {
    if (id >= 0) ++sorted->begin[id + 1];
  }
  for (int e = 0; e < experts; ++e) sorted->begin[e + 1] += sorted->begin[e];
  sorted->slots.resize(sorted->begin[experts]);
  sorted->position.resize(ids.size());
  std::vector<int32_t> next(sorted->begin.begin(), sorted->begin.end() - 1);
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int32_t id = ids[slot];
    sorted->position[slot] = id < 0 ? -1 : next[id];
    if (id >= 0) sorted->slots[next[id]++] = static_cast<int32_t>(slot);
  }
}

// The rows of the batched-experts format, where expert e owns slots [e * max_m, e * max_m + counts[e]): they lie sorted already.
// `position` stays empty. `counts` must already be validated: each in [0, max_m].
inline void ListSlots(std::span<const int32_t> counts, int64_t max_m, SortedSlots* sorted) {
  sorted->begin.assign(1, 0);
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    for (int32_t row = 0; row < counts[expert]; ++row) {
      sorted->slots.push_back(static_cast<int32_t>(static_cast<int64_t>(expert) * max_m + row));
    }
    sorted->begin.push_back(static_cast<int32_t>(sorted->slots.size()));
  }
}

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_TOKEN_SORT_H_
