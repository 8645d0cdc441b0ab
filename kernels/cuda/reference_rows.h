// Which rows the reference's kernels work on: the slots of a call by expert, cut into tiles that one block of threads computes.
#ifndef MOED_KERNELS_CUDA_REFERENCE_ROWS_H_
#define MOED_KERNELS_CUDA_REFERENCE_ROWS_H_

#include <cstdint>
#include <span>
#include <vector>

namespace moed::cuda {

// Rows of a tile, at most.
inline constexpr int kTileRows = 64;

// Sorted rows [first, first + rows), all of them of `expert`.
struct RowTile {
  int32_t expert, first, rows;
};

// The copies of a call's rows that experts see, ordered by expert and inside an expert by slot; "no expert" has none.
struct SortedRows {
  std::vector<int32_t> sources;    // [routed] row of the call
  std::vector<int32_t> experts;    // [routed]
  std::vector<float> weights;      // [routed] of the slot
  std::vector<int32_t> positions;  // [rows * top_k]: index of the slot's copy, -1 without an expert
  std::vector<RowTile> tiles;
};

// `ids` and `weights` are [rows, top_k]; ids must already be validated: each in [-1, experts).
SortedRows SortRows(std::span<const int32_t> ids, std::span<const float> weights, int top_k, int experts);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_REFERENCE_ROWS_H_
