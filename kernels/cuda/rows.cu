// Kernels over the rows of a call: token sort, operands, combine. Their arguments and contracts are in call_block.h.
//
// Nothing here depends on the order in which threads run: ranks within an expert are handed out by atomics, but a row's result does
// not depend on its rank, and largest magnitudes are merged as integers, where NaN is the largest of all.
#include <cuda_runtime.h>

#include "kernels/activation.h"
#include "kernels/activation_quant_rules.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/launch.h"

namespace moed::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kRowThreads = 256;
constexpr int kWarp = 32;

// Exclusive sums over the threads of a block; `total` gets the sum of all. Needs kSortThreads threads.
__device__ int BlockScan(int value, int* total) {
  __shared__ int warps[kSortThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // of an earlier scan
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kSortThreads / kWarp; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  *total = all;
  return before + sum - value;
}

__device__ void CountRows(const SortArgs& a, int32_t* count) {
  for (int e = threadIdx.x; e < a.experts; e += kSortThreads) count[e] = a.counts != nullptr ? a.counts[e] : 0;
  __syncthreads();
  if (a.counts != nullptr) return;
  if (a.ids == nullptr) {
    if (threadIdx.x == 0) count[0] = a.rows;
  } else {
    for (int slot = threadIdx.x; slot < a.rows * a.top_k; slot += kSortThreads) {
      const int id = a.ids[slot];
      if (id >= 0) atomicAdd(&count[id], 1);
    }
  }
  __syncthreads();
}

// Begins of the experts' sorted rows replace their counts, and the tiles are listed.
__device__ void ListTiles(const SortArgs& a, int32_t* count) {
  int rows_before = 0, tiles_before = 0;
  for (int first = 0; first < a.experts; first += kSortThreads) {
    const int e = first + threadIdx.x;
    const int rows = e < a.experts ? count[e] : 0;
    const int tiles = (rows + a.tile_rows - 1) / a.tile_rows;
    int total_rows, total_tiles;
    const int begin = rows_before + BlockScan(rows, &total_rows);
    const int tile = tiles_before + BlockScan(tiles, &total_tiles);
    for (int i = 0; i < tiles; ++i) a.tiles[tile + i] = {e, begin + i * a.tile_rows, min(a.tile_rows, rows - i * a.tile_rows), 0};
    if (e < a.experts) count[e] = begin;
    rows_before += total_rows;
    tiles_before += total_tiles;
  }
  if (threadIdx.x == 0) a.totals[0] = rows_before, a.totals[1] = tiles_before;
  __syncthreads();
}

__device__ void PlaceRow(const SortArgs& a, int at, int source, int slot, int expert) {
  a.source[at] = source;
  a.slot[at] = slot;
  a.expert[at] = expert;
}

__device__ void PlaceRows(const SortArgs& a, int32_t* begin) {
  if (a.counts != nullptr) {
    for (int e = threadIdx.x / kWarp; e < a.experts; e += kSortThreads / kWarp) {
      for (int r = threadIdx.x % kWarp; r < a.counts[e]; r += kWarp) PlaceRow(a, begin[e] + r, e * a.max_m + r, e * a.max_m + r, e);
    }
  } else if (a.ids == nullptr) {
    for (int row = threadIdx.x; row < a.rows; row += kSortThreads) {
      PlaceRow(a, row, row, row, 0);
      a.position[row] = row;
    }
  } else {
    for (int slot = threadIdx.x; slot < a.rows * a.top_k; slot += kSortThreads) {
      const int id = a.ids[slot];
      const int at = id >= 0 ? atomicAdd(&begin[id], 1) : -1;
      a.position[slot] = at;
      if (at >= 0) PlaceRow(a, at, slot / a.top_k, slot, id);
    }
  }
}

constexpr int kSharedExperts = 8192;  // above, counters lie in global memory

__global__ void __launch_bounds__(kSortThreads) Sort(const SortArgs* args) {
  extern __shared__ int32_t shared_count[];
  const SortArgs a = *args;
  int32_t* count = a.experts <= kSharedExperts ? shared_count : a.count;
  if (threadIdx.x < 2) a.absmax[threadIdx.x] = 0;
  static_assert(kFewRowsBlocks <= kSortThreads);
  if (a.finished != nullptr && threadIdx.x < kFewRowsBlocks) a.finished[threadIdx.x] = 0;
  CountRows(a, count);
  ListTiles(a, count);
  PlaceRows(a, count);
}

// The largest of `bits` over the block, in every thread. Magnitudes as integers: NaN is above all.
__device__ uint32_t BlockMax(uint32_t bits) {
  __shared__ uint32_t warps[kRowThreads / kWarp];
  bits = __reduce_max_sync(~0u, bits);
  __syncthreads();  // of an earlier use
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = bits;
  __syncthreads();
  uint32_t most = warps[0];
#pragma unroll
  for (int w = 1; w < kRowThreads / kWarp; ++w) most = max(most, warps[w]);
  return most;
}

__device__ uint32_t Magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__global__ void __launch_bounds__(kRowThreads) AbsMax(const AbsMaxArgs* args, const SortArgs* sort) {
  const AbsMaxArgs a = *args;
  const int row = blockIdx.x;
  if (row >= (a.sorted ? sort->totals[0] : a.rows)) return;
  const float weight = a.weights != nullptr ? a.weights[sort->slot[row]] : 1.0f;
  const int64_t from = (a.from_source ? sort->source[row] : row) * a.stride;
  uint32_t most = 0;
  for (int64_t k = threadIdx.x; k < a.cols; k += kRowThreads)
    most = max(most, Magnitude(LoadElement(a.x, a.dtype, from + k) * weight));
  most = BlockMax(most);
  if (threadIdx.x == 0) atomicMax(a.absmax, most);
}

// One operand row in the making.
struct StagedRow {
  const StageArgs& a;
  int64_t from;        // element of x where the row starts
  float weight;
  float stored;
  float* scales;       // of its groups
  const int32_t* order;

  __device__ float Value(int64_t k) const { return LoadElement(a.x, a.dtype, from + k) * weight; }

  // The scale of a group whose largest magnitude is `absmax`; NaN where the group becomes NaN, 0 where it becomes zeros.
  __device__ float ScaleOf(float absmax) const {
    if (a.scheme.mode == ActivationMode::kStatic) return stored;
    if (!isfinite(absmax)) return __int_as_float(0x7FC00000);
    if (a.scheme.scale == ScaleType::kE4m3) return quant::NvBlockScale(stored, absmax);
    return absmax == 0.0f ? 0.0f : quant::DynamicScale(a.scheme, absmax);
  }

  // The code's value, and what it is multiplied by.
  __device__ float Code(float x, float scale) const {
    if (scale == 0.0f) return 0.0f;
    const bool full_range = a.scheme.mode == ActivationMode::kStatic;
    if (a.scheme.scale == ScaleType::kE4m3 && a.scheme.mode == ActivationMode::kDynamic) x *= stored;
    return quant::RoundToElement(a.scheme.element, full_range, x / scale);
  }
  __device__ float Factor(float scale) const {
    return a.scheme.scale == ScaleType::kE4m3 && a.scheme.mode == ActivationMode::kDynamic ? scale / stored : scale;
  }
};

// Scales of all groups, by warps where there are several groups, else by the block.
__device__ void MakeScales(const StagedRow& row) {
  const StageArgs& a = row.a;
  const bool by_row = a.group == 0;
  if (by_row || a.scheme.mode == ActivationMode::kStatic || a.absmax != nullptr) {
    uint32_t most = 0;
    if (a.absmax != nullptr) {
      most = *a.absmax;
    } else if (a.scheme.mode == ActivationMode::kDynamic) {
      for (int64_t k = threadIdx.x; k < a.cols; k += kRowThreads) most = max(most, Magnitude(row.Value(k)));
      most = BlockMax(most);
    }
    if (threadIdx.x == 0) row.scales[0] = row.ScaleOf(Bits(most));
  } else {
    const int64_t groups = (a.cols + a.group - 1) / a.group;
    for (int64_t g = threadIdx.x / kWarp; g < groups; g += kRowThreads / kWarp) {
      uint32_t most = 0;
      for (int64_t k = g * a.group + threadIdx.x % kWarp; k < min(a.cols, (g + 1) * a.group); k += kWarp) {
        most = max(most, Magnitude(row.Value(k)));
      }
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % kWarp == 0) row.scales[g] = row.ScaleOf(Bits(most));
    }
  }
  __syncthreads();
}

// Positions `at` and the next as the operand holds them: [term] pairs.
__device__ float StagedValue(const StagedRow& row, int64_t at) {
  const StageArgs& a = row.a;
  const int64_t k = row.order != nullptr ? row.order[at] : at < a.cols ? at : -1;
  if (k < 0) return 0.0f;
  const float x = row.Value(k);
  if (a.scheme.mode == ActivationMode::kNone) return x;
  const float scale = row.scales[a.group == 0 || a.absmax != nullptr || a.scheme.mode == ActivationMode::kStatic ? 0 : k / a.group];
  const float code = row.Code(x, scale);
  return a.scaled_values ? code * row.Factor(scale) : code;
}

__device__ void StorePair(const Operand& out, int64_t row, int64_t at, float low, float high) {
  for (int term = 0; term < out.terms; ++term) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    *reinterpret_cast<__nv_bfloat162*>(out.data + term * out.term_stride + row * out.row_stride + at) = pair;
    low -= __low2float(pair);
    high -= __high2float(pair);
  }
}

__global__ void __launch_bounds__(kRowThreads) StageRows(const StageArgs* args, const SortArgs* sort) {
  const StageArgs a = *args;
  const int64_t row = blockIdx.x;
  if (a.skip || row >= (a.out.by_sorted_row ? sort->totals[0] : a.rows)) return;
  const int64_t source = a.from_source ? sort->source[row] : row;
  const int expert = a.out.by_sorted_row ? sort->expert[row] : 0;
  const int64_t groups = a.group == 0 ? 1 : (a.cols + a.group - 1) / a.group;
  const StagedRow staged = {a, source * a.x_stride, a.weights != nullptr ? a.weights[sort->slot[row]] : 1.0f,
                            a.stored != nullptr ? a.stored[expert] : 1.0f, a.scratch + row * groups,
                            a.order != nullptr ? a.order + expert * a.order_stride : nullptr};
  if (a.scheme.mode != ActivationMode::kNone) MakeScales(staged);
  for (int64_t at = 2 * threadIdx.x; at < a.depth; at += 2 * kRowThreads) {
    StorePair(a.out, row, at, StagedValue(staged, at), StagedValue(staged, at + 1));
  }
  if (a.out.scales == nullptr) return;
  // Scales as the product wants them: of every group, also where one covers the row.
  __syncthreads();
  for (int64_t g = threadIdx.x; g < a.out.scale_stride; g += kRowThreads) {
    const float factor =
        staged.Factor(staged.scales[groups == 1 || a.absmax != nullptr || a.scheme.mode == ActivationMode::kStatic ? 0 : g]);
    a.out.scales[row * a.out.scale_stride + g] = factor;
  }
}

__global__ void __launch_bounds__(kRowThreads) ActivateRows(const ActivateArgs* args, const SortArgs* sort) {
  const ActivateArgs a = *args;
  const int64_t row = blockIdx.x;
  if (row >= sort->totals[0]) return;
  const float* gate = a.gate + row * a.stride;
  const float* up = a.up != nullptr ? a.up + row * a.stride : gate + kHalfRows;
  for (int64_t f = threadIdx.x; f < a.out_stride; f += kRowThreads) {
    const int64_t at = a.up != nullptr ? f : f / kHalfRows * kTileRows + f % kHalfRows;
    const float h = f < a.cols ? Activate<float>(a.activation, gate[at], up[at]) : 0.0f;
    if (a.out != nullptr) {
      a.out[row * a.out_stride + f] = h;
    } else {
      a.out_bf16[row * a.out_stride + f] = __bfloat16_as_ushort(__float2bfloat16_rn(h));
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) Combine(const CombineArgs* args) {
  const CombineArgs a = *args;
  const int64_t row = blockIdx.x;
  const bool batched = a.source != nullptr;
  if (row >= (batched ? a.totals[0] : a.rows)) return;
  const int64_t to = (batched ? a.source[row] : row) * a.cols;
  for (int64_t c = static_cast<int64_t>(blockIdx.y) * kRowThreads + threadIdx.x; c < a.cols;
       c += static_cast<int64_t>(gridDim.y) * kRowThreads) {
    float sum = 0.0f;
    if (batched) {
      sum = a.y[row * a.y_stride + c];
    } else {
      for (int j = 0; j < a.top_k; ++j) {
        const int at = a.position[row * a.top_k + j];
        if (at < 0) continue;
        const float y = a.y[at * a.y_stride + c];
        sum = a.weights != nullptr ? __fmaf_rn(a.weights[row * a.top_k + j], y, sum) : sum + y;
      }
      if (a.shared != nullptr) {
        const float factor = a.factor != nullptr ? a.factor[row] : 1.0f;
        sum = __fmaf_rn(factor, a.shared[row * a.shared_stride + c], sum);
      }
    }
    StoreElement(a.out, a.dtype, to + c, sum);
  }
}

}  // namespace

cudaError_t LaunchSort(const SortArgs* args, int32_t experts, cudaStream_t stream) {
  Sort<<<1, kSortThreads, experts <= kSharedExperts ? experts * sizeof(int32_t) : 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchAbsMax(const AbsMaxArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream) {
  AbsMax<<<capacity, kRowThreads, 0, stream>>>(args, sort);
  return cudaGetLastError();
}

cudaError_t LaunchStage(const StageArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream) {
  StageRows<<<capacity, kRowThreads, 0, stream>>>(args, sort);
  return cudaGetLastError();
}

cudaError_t LaunchActivate(const ActivateArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream) {
  ActivateRows<<<capacity, kRowThreads, 0, stream>>>(args, sort);
  return cudaGetLastError();
}

cudaError_t LaunchCombine(const CombineArgs* args, int32_t capacity, int64_t cols, cudaStream_t stream) {
  // Few rows share their columns among blocks.
  const int64_t pieces = (cols + kRowThreads - 1) / kRowThreads;
  const int64_t wanted = (512 + capacity - 1) / capacity;
  Combine<<<dim3(capacity, static_cast<unsigned>(pieces < wanted ? pieces : wanted)), kRowThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moed::cuda
