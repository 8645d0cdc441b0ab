#include "kernels/cuda/reference_rows.h"

#include <algorithm>

namespace moed::cuda {

SortedRows SortRows(std::span<const int32_t> ids, std::span<const float> weights, int top_k, int experts) {
  std::vector<int32_t> begin(static_cast<size_t>(experts) + 1, 0);
  for (int32_t id : ids) {
    if (id >= 0) ++begin[id + 1];
  }
  SortedRows sorted;
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t end = begin[e] + begin[e + 1];
    for (int32_t first = begin[e]; first < end; first += kTileRows) {
      sorted.tiles.push_back({e, first, std::min<int32_t>(kTileRows, end - first)});
    }
    begin[e + 1] = end;
  }
  const size_t routed = static_cast<size_t>(begin[experts]);
  sorted.sources.resize(routed);
  sorted.experts.resize(routed);
  sorted.weights.resize(routed);
  sorted.positions.resize(ids.size());
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int32_t id = ids[slot];
    sorted.positions[slot] = id < 0 ? -1 : begin[id];
    if (id < 0) continue;
    const int32_t at = begin[id]++;
    sorted.sources[at] = static_cast<int32_t>(slot / static_cast<size_t>(top_k));
    sorted.experts[at] = id;
    sorted.weights[at] = weights[slot];
  }
  return sorted;
}

}  // namespace moed::cuda
