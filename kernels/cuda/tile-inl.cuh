// What the products on mma.sync share: a tile's rows, and where an expert's weights and scales lie. A thread block of 4 warps owns
// one tile of rows of an expert and one row tile of 128 features: warp w the features 16 w to 16 w + 15 of both halves, lane
// 4 g + t the features g and g + 8 of them.
#ifndef MOED_KERNELS_CUDA_TILE_INL_CUH_
#define MOED_KERNELS_CUDA_TILE_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/launch_after-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// Copies the arguments and finds the rows of x of the thread block's tile, -1 beyond its end, both into shared memory. False where
// the grid is larger than the call.
template <int kTokens>
__device__ inline bool BeginTile(const GemmArgs* args, const SortArgs* sort, uint64_t* words, int* rows, Tile* tile) {
  BeginAfterEarlier();
  if (static_cast<int>(blockIdx.x) >= sort->totals[1]) return false;
  *tile = sort->tiles[blockIdx.x];
  static_assert(sizeof(GemmArgs) % 8 == 0 && alignof(GemmArgs) == 8);
  for (int at = threadIdx.x; at < static_cast<int>(sizeof(GemmArgs) / 8); at += kTileThreads) {
    words[at] = reinterpret_cast<const uint64_t*>(args)[at];
  }
  if (threadIdx.x < kTokens) {
    const int sorted = tile->begin + threadIdx.x;
    const bool valid = static_cast<int>(threadIdx.x) < tile->count;
    rows[threadIdx.x] = !valid ? -1 : args->x.by_sorted_row ? sorted : sort->source[sorted];
  }
  __syncthreads();
  return true;
}

// step / steps of a group, without a division: exact below 2^22 steps, of which there are fewer in 2^26 inputs.
__device__ inline int DividedStep(int step, float per_group) {
  return static_cast<int>((static_cast<float>(step) + 0.5f) * per_group);
}

// Where the scale of a feature lies that the thread has in `half`: of g, or of g + 8 with `second`.
__device__ inline int ScaleInTile(int half, int second) {
  return (threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4) * 4 + half * 2 + second;
}

// One row tile of one expert's packed matrix.
struct WeightTile {
  template <Codes kCodes>
  __device__ void Find(const MatrixArgs& weights, int64_t expert, int row_tile) {
    type = weights.scale;
    shift = type == ScaleType::kF32 ? 2 : type == ScaleType::kE8m0 || type == ScaleType::kE4m3 ? 0 : 1;
    codes = weights.codes + expert * weights.codes_stride + static_cast<int64_t>(row_tile) * weights.blocks * BlockBytes(kCodes);
    const int64_t before = static_cast<int64_t>(row_tile) * weights.groups * kTileRows;
    if (weights.groups > 0) scales = weights.scales + expert * weights.scales_stride + (before << shift);
    if (weights.zeros != nullptr) zeros = weights.zeros + expert * weights.zeros_stride + before;
    if (weights.step_groups != nullptr) step_groups = weights.step_groups + expert * weights.step_groups_stride;
    for (int second = 0; second < 2; ++second) global[second] = weights.globals[expert * 2 + second];
    per_group = 1.0f / static_cast<float>(weights.group_steps);
    last_group = weights.groups - 1;
  }

  __device__ int GroupOf(int step) const {
    if (step_groups != nullptr) return step_groups[step];
    return min(DividedStep(step, per_group), last_group);
  }

  // Scales of the thread's four features, from a slot's 128 in `at`; by one branch on their type. Times the global one.
  __device__ void Scales(const uint8_t* at, float (&scale)[2][2]) const {
    WithScale(type, [&](const auto& decode) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int second = 0; second < 2; ++second) scale[half][second] = global[second] * decode(at, ScaleInTile(half, second));
      }
    });
  }

  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* zeros = nullptr;
  const int32_t* step_groups = nullptr;
  ScaleType type = ScaleType::kNone;
  int shift = 0;  // log2 of a scale's bytes
  float per_group = 0.0f;
  int last_group = 0;
  float global[2] = {1.0f, 1.0f};  // of g and g + 8, gate's and up's in a paired matrix
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_TILE_INL_CUH_
