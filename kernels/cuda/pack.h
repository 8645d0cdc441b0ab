// Packing canonical experts into the layout of packed_layout.h, on the host. Pure functions over memory that the caller owns; any
// number of threads may pack different experts at once.
#ifndef MOED_KERNELS_CUDA_PACK_H_
#define MOED_KERNELS_CUDA_PACK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/packed_layout.h"
#include "kernels/expert_weights.h"

namespace moed::cuda {

// Where one expert's part of each array goes: as many bytes as the shape's *_bytes() say; null where that is 0.
struct PackTarget {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* zeros = nullptr;
  float* bias = nullptr;
  int32_t* order = nullptr;        // [depth]
  int32_t* step_groups = nullptr;  // [4 blocks]
  float* globals = nullptr;        // [2]: what the stored scales of half 0 and 1 are multiplied by
};

// The input at each position [depth], -1 for padding, of a shape that is ordered but not by expert: groups that are not a whole
// number of steps, each padded to one.
std::vector<int32_t> CommonOrder(const PackedShape& shape, const WeightScheme& scheme);

// Act-order: the input at each position `order` [depth], -1 for padding, and the group of each step `step_groups` [4 blocks], of an
// expert whose input k has group `group_index[k]` of the shape's groups. The inputs of a group follow each other, ascending, and
// every group is padded to whole steps. UNIMPLEMENTED when the groups do not fit the shape.
absl::Status OrderByGroup(const PackedShape& shape, std::span<const int32_t> group_index, int32_t* order, int32_t* step_groups);

// Packs one projection, or gate and up of a paired shape. `features`: which row of the weights each of the shape's rows is, -1 for
// none; empty: as they come. UNIMPLEMENTED when act-order's groups do not fit the shape (make it with `uneven` then) or the two of
// a pair have orders of their own; INVALID_ARGUMENT for a NaN among FP8 codes.
absl::Status PackMatrix(const PackedShape& shape, const LinearWeights& first, const LinearWeights* second, const PackTarget& target,
                        std::span<const int32_t> features = {});

// The largest magnitude that a scale of the projection has, its global scale included; NaN where one is NaN, 0 where there are
// none.
float LargestScale(const LinearWeights& weights);

// How far the zero points of the projection's codes are from their middle on average, by that middle: 0 without zero points, about
// 0.2 as quantizers leave them, at most 1.
double ZeroPointOffset(const LinearWeights& weights);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_PACK_H_
