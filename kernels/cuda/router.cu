// The gate and the router on the device. See router.h; the router's rule itself is in router_rules.h.
//
// The gate: a block of 256 threads sums a tile of logits, some experts by some rows. The elements of a dot product are taken in
// quads of four; thread i sums quads i, i + 256, ... in ascending order by fused multiply-adds, the lanes of a warp are added as a
// butterfly (16, 8, 4, 2, 1) and the warps in ascending order. Every tile shape does exactly that for each of its logits, which is
// why they give the same bits. One row is read at the memory's speed since a whole block shares each expert's weights; with more
// rows a tile uses what it loads several times.
//
// The router: a block a row, with the row in shared memory or, for many experts, in the caller's scratch.
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/router.h"
#include "kernels/cuda/router_rules.h"
#include "kernels/number_formats.h"

namespace moed::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / kWarp;
constexpr int kTileExperts = 4;       // of the wide gate kernel
constexpr int kTileRows = 8;          // at most, of both
constexpr int kMaxBlocks = 2048;      // more would only wait for their turn
constexpr int kSharedExperts = 4096;  // a row of so many fits the shared memory that needs no permission
constexpr int kRouterThreads = 1024;  // at most

// ---------------------------------------------------------------------------------------------------------------- the gate

template <DType kDtype>
__device__ float HalfToFloat(uint32_t bits) {
  if constexpr (kDtype == DType::kBf16) return Bf16ToFloat(static_cast<uint16_t>(bits));
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// Quad `at` of a row whose start is aligned to a quad.
template <DType kDtype>
__device__ float4 LoadQuad(const char* row, int64_t at) {
  if constexpr (kDtype == DType::kF32) {
    return __ldg(reinterpret_cast<const float4*>(row) + at);
  } else {
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(row) + at);
    return make_float4(HalfToFloat<kDtype>(bits.x & 0xFFFF), HalfToFloat<kDtype>(bits.x >> 16),
                       HalfToFloat<kDtype>(bits.y & 0xFFFF), HalfToFloat<kDtype>(bits.y >> 16));
  }
}

// Element `at` of a row that is aligned to two bytes only.
template <DType kDtype>
__device__ float LoadElement(const char* row, int64_t at) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
  if constexpr (kDtype == DType::kF32) {
    return __uint_as_float(__ldg(halves + 2 * at) | static_cast<uint32_t>(__ldg(halves + 2 * at + 1)) << 16);
  } else {
    return HalfToFloat<kDtype>(__ldg(halves + at));
  }
}

// A tile of the gate: the experts (or the shared gate, as the only one) and rows that one block works on.
struct GateTile {
  const float* weights;  // of the tile's first expert; consecutive ones are `hidden` apart
  const char* x;         // of the tile's first row; consecutive ones are `row_bytes` apart
  int64_t hidden;
  int64_t row_bytes;
  int experts;  // 1..kExperts of the kernel that are there
  int rows;     // 1..kTileRows that are there
};

// This thread's part of the sums of a kExperts x kRows tile, sums[e * kRows + r]. Experts and rows that are not there repeat the
// last one. Weights and rows must be aligned to quads, and H be a multiple of four.
template <DType kDtype, int kExperts, int kRows>
__device__ void SumQuads(const GateTile& tile, float (&sums)[kExperts * kRows]) {
  constexpr int kWidest = kExperts > kRows ? kExperts : kRows;
  constexpr int kDepth = kWidest >= 8 ? 1 : 8 / kWidest;  // quads in flight
  const float4* weights[kExperts];
  const char* x[kRows];
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    weights[e] = reinterpret_cast<const float4*>(tile.weights + min(e, tile.experts - 1) * tile.hidden);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = tile.x + min(r, tile.rows - 1) * tile.row_bytes;
#pragma unroll
  for (int i = 0; i < kExperts * kRows; ++i) sums[i] = 0.0f;

  const int64_t quads = tile.hidden / 4;
#pragma unroll 1
  for (int64_t first = threadIdx.x; first < quads; first += kDepth * kGateThreads) {
    float4 w[kDepth][kExperts];
    float4 v[kDepth][kRows];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      // Past the end the last quad is loaded and left unused: without a branch all loads are under way at once.
      const int64_t wanted = first + d * kGateThreads;
      const int64_t at = wanted < quads ? wanted : quads - 1;
#pragma unroll
      for (int e = 0; e < kExperts; ++e) w[d][e] = __ldg(weights[e] + at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[d][r] = LoadQuad<kDtype>(x[r], at);
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * kGateThreads >= quads) break;
#pragma unroll
      for (int e = 0; e < kExperts; ++e) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float sum = sums[e * kRows + r];
          sum = __fmaf_rn(v[d][r].x, w[d][e].x, sum);
          sum = __fmaf_rn(v[d][r].y, w[d][e].y, sum);
          sum = __fmaf_rn(v[d][r].z, w[d][e].z, sum);
          sums[e * kRows + r] = __fmaf_rn(v[d][r].w, w[d][e].w, sum);
        }
      }
    }
  }
}

// The same for one logit, any alignment and any H: the elements of a last short quad are taken as far as they go.
template <DType kDtype>
__device__ float SumElements(const float* weights, const char* x, int64_t hidden) {
  float sum = 0.0f;
  for (int64_t first = 4 * threadIdx.x; first < hidden; first += 4 * kGateThreads) {
    const int64_t end = first + 4 < hidden ? first + 4 : hidden;
    for (int64_t h = first; h < end; ++h) sum = __fmaf_rn(LoadElement<kDtype>(x, h), __ldg(weights + h), sum);
  }
  return sum;
}

// One step of a butterfly over kCount values a lane: each lane of a pair keeps and completes one half of the values, so that the
// values spread over the lanes. With one value left both lanes hold the same sum. The sums are those of a plain butterfly.
template <int kCount, int kOffset>
__device__ void AddLanes(float* values) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], kOffset);
  } else {
    const bool upper = (lane & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float sent = upper ? values[i] : values[i + kCount / 2];
      const float kept = upper ? values[i + kCount / 2] : values[i];
      values[i] = kept + __shfl_xor_sync(kAllLanes, sent, kOffset);
    }
  }
  if constexpr (kOffset > 1) AddLanes<(kCount > 1 ? kCount / 2 : 1), kOffset / 2>(values);
}

// Adds the threads' parts. Thread i < kCount returns sum i of the block, the others nothing of use. All threads must come.
template <int kCount>
__device__ float AddThreads(float (&sums)[kCount]) {
  static_assert(kCount <= kWarp && (kCount & (kCount - 1)) == 0);
  __shared__ float parts[kGateWarps][kCount];
  AddLanes<kCount, kWarp / 2>(sums);
  // The first step parted the values by the highest bit of the lane, and so on.
  constexpr int kLanesEach = kWarp / kCount;
  const int lane = threadIdx.x % kWarp;
  if (lane % kLanesEach == 0) parts[threadIdx.x / kWarp][lane / kLanesEach] = sums[0];
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x < kCount) {
    total = parts[0][threadIdx.x];
    for (int warp = 1; warp < kGateWarps; ++warp) total += parts[warp][threadIdx.x];
  }
  __syncthreads();  // the parts may be overwritten now
  return total;
}

// Where a tile's results go: logits, or shared factors when `shared`.
struct GateOutput {
  const float* bias;  // of the tile's first expert, or null
  float* out;         // the first row's first result; rows are `stride` apart
  int64_t stride;
  bool shared;

  __device__ void Store(int e, int r, float sum) const {
    out[r * stride + e] = shared ? Sigmoid(sum) : sum + (bias ? bias[e] : 0.0f);
  }
};

template <DType kDtype, int kExperts, int kRows>
__device__ void RunTile(const GateTile& tile, const GateOutput& output) {
  float sums[kExperts * kRows];
  SumQuads<kDtype, kExperts, kRows>(tile, sums);
  const float sum = AddThreads(sums);
  const int e = threadIdx.x / kRows;
  const int r = threadIdx.x % kRows;
  if (e < tile.experts && r < tile.rows) output.Store(e, r, sum);
}

template <DType kDtype>
__device__ void RunUnalignedTile(const GateTile& tile, const GateOutput& output) {
  for (int e = 0; e < tile.experts; ++e) {
    for (int r = 0; r < tile.rows; ++r) {
      float sums[1] = {SumElements<kDtype>(tile.weights + e * tile.hidden, tile.x + r * tile.row_bytes, tile.hidden)};
      const float sum = AddThreads(sums);
      if (threadIdx.x == 0) output.Store(e, r, sum);
    }
  }
}

template <DType kDtype, int kExperts>
__device__ void RunAnyTile(const GateTile& tile, const GateOutput& output) {
  constexpr uintptr_t kQuadMask = 4 * DTypeBytes(kDtype) - 1;
  const bool aligned = tile.hidden % 4 == 0 && (reinterpret_cast<uintptr_t>(tile.x) & kQuadMask) == 0 &&
                       (reinterpret_cast<uintptr_t>(tile.weights) & 15) == 0;
  if (!aligned) {
    RunUnalignedTile<kDtype>(tile, output);
  } else if (tile.rows == 1) {
    RunTile<kDtype, kExperts, 1>(tile, output);
  } else if (tile.rows <= 4) {
    RunTile<kDtype, kExperts, 4>(tile, output);
  } else {
    RunTile<kDtype, kExperts, 8>(tile, output);
  }
}

template <int kExperts>
__device__ void RunTileOfDtype(DType dtype, const GateTile& tile, const GateOutput& output) {
  switch (dtype) {
    case DType::kF32: return RunAnyTile<DType::kF32, kExperts>(tile, output);
    case DType::kBf16: return RunAnyTile<DType::kBf16, kExperts>(tile, output);
    case DType::kF16: return RunAnyTile<DType::kF16, kExperts>(tile, output);
  }
}

// Blocks x: tiles of kExperts experts, then one for the shared factor. Blocks y: tiles of rows, taken in strides.
template <int kExperts>
__global__ void __launch_bounds__(kGateThreads, 2) GateKernel(const RouterArgs* args, int32_t capacity, int32_t experts) {
  const int rows = min(args->rows, capacity);
  const int first_expert = blockIdx.x * kExperts;
  const bool shared = blockIdx.x == gridDim.x - 1;
  const float* weights = shared ? args->shared_gate : args->gate;
  float* out = shared ? args->shared_factor : args->logits;
  if (out == nullptr || (!shared && weights == nullptr)) return;
  const int64_t hidden = args->hidden;
  const DType dtype = args->x_dtype;
  const int64_t row_bytes = hidden * static_cast<int64_t>(DTypeBytes(dtype));
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kTileRows; first < rows; first += gridDim.y * kTileRows) {
    const int tile_rows = static_cast<int>(min(static_cast<int64_t>(kTileRows), rows - first));
    if (weights == nullptr) {  // a shared expert without a gate
      if (threadIdx.x < tile_rows) out[first + threadIdx.x] = 1.0f;
      continue;
    }
    const char* x = static_cast<const char*>(args->x) + first * row_bytes;
    if (shared) {
      RunTileOfDtype<kExperts>(dtype, {weights, x, hidden, row_bytes, 1, tile_rows}, {nullptr, out + first, 1, true});
      continue;
    }
    const float* bias = args->gate_bias ? args->gate_bias + first_expert : nullptr;
    RunTileOfDtype<kExperts>(
        dtype, {weights + first_expert * hidden, x, hidden, row_bytes, min(kExperts, experts - first_expert), tile_rows},
        {bias, out + first * experts + first_expert, experts, false});
  }
}

// -------------------------------------------------------------------------------------------------------------- the router

// A block as a team (router_rules.h). The block's size is a multiple of a warp.
class BlockTeam {
 public:
  using Slots = uint64_t[2][kWarp];  // in shared memory

  __device__ explicit BlockTeam(Slots& slots) : slots_(slots) {}
  __device__ int Rank() const { return threadIdx.x; }
  __device__ int Size() const { return blockDim.x; }
  __device__ void Sync() const { __syncthreads(); }

  __device__ uint32_t Max(uint32_t value) {
    value = __reduce_max_sync(kAllLanes, value);
    return blockDim.x == kWarp ? value : __reduce_max_sync(kAllLanes, static_cast<uint32_t>(OfWarps(value)));
  }

  __device__ uint64_t Max(uint64_t value) {
    value = WarpMax(value);
    return blockDim.x == kWarp ? value : WarpMax(OfWarps(value));
  }

  __device__ float Sum(float value) {
    value = WarpSum(value);
    return blockDim.x == kWarp ? value : WarpSum(__uint_as_float(static_cast<uint32_t>(OfWarps(__float_as_uint(value)))));
  }

 private:
  __device__ static uint64_t WarpMax(uint64_t value) {
    const uint32_t high = static_cast<uint32_t>(value >> 32);
    const uint32_t best = __reduce_max_sync(kAllLanes, high);
    const uint32_t low = __reduce_max_sync(kAllLanes, high == best ? static_cast<uint32_t>(value) : 0u);
    return static_cast<uint64_t>(best) << 32 | low;
  }

  __device__ static float WarpSum(float value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
    return value;
  }

  // Lane i of each warp gets the value of warp i, 0 where there is none. The slots of a turn are written again two turns later: the
  // barrier of the turn between comes after every thread has read them.
  __device__ uint64_t OfWarps(uint64_t value) {
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) slots_[turn_][warp] = value;
    __syncthreads();
    const uint64_t other = lane < blockDim.x / kWarp ? slots_[turn_][lane] : 0;
    turn_ ^= 1;
    return other;
  }

  Slots& slots_;
  int turn_ = 0;
};

__device__ int32_t LocalId(const RouterArgs& args, int32_t id) {
  const int64_t local = static_cast<int64_t>(id) - args.first_expert;
  return local >= 0 && local < args.held ? static_cast<int32_t>(local) : -1;
}

// Ids that a caller sent, by all threads of the grid.
__device__ void MapSentIds(const RouterArgs& args, int rows, int experts) {
  const int64_t slots = static_cast<int64_t>(rows) * args.top_k;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < slots; i += step) {
    const int32_t id = args.ids[i];
    const bool known = id >= -1 && id < experts;
    if (!known) atomicMin(args.error_row, static_cast<int32_t>(i / args.top_k));
    args.local_ids[i] = known && id >= 0 ? LocalId(args, id) : -1;
  }
}

__device__ void StoreRow(const RouterArgs& args, const RouterRow& row, int64_t t, RowOutcome outcome) {
  int32_t* ids = args.ids + t * row.top_k;
  int32_t* local_ids = args.local_ids + t * row.top_k;
  for (int j = threadIdx.x; j < row.top_k; j += blockDim.x) {
    int32_t id = -1;
    if (outcome == RowOutcome::kRouted) {
      id = static_cast<int32_t>(row.order[j]);
    } else if (outcome == RowOutcome::kNotFinite) {
      id = j;
      row.weights[j] = std::numeric_limits<float>::quiet_NaN();
    } else {
      row.weights[j] = 0.0f;
    }
    ids[j] = id;
    local_ids[j] = id < 0 ? -1 : LocalId(args, id);
  }
  if (outcome == RowOutcome::kRefused && threadIdx.x == 0) atomicMin(args.error_row, static_cast<int32_t>(t));
}

// kShared: keys and order of a row lie in shared memory (8 E bytes), else in args->scratch.
template <bool kShared>
__global__ void __launch_bounds__(kRouterThreads, 1) RouterKernel(const RouterArgs* args, int32_t capacity, int32_t experts) {
  extern __shared__ uint32_t row_memory[];
  __shared__ BlockTeam::Slots slots;
  const int rows = min(args->rows, capacity);
  if (!args->route) return MapSentIds(*args, rows, experts);
  BlockTeam team(slots);
  RouterRow row;
  row.rule = args->rule;
  row.experts = experts;
  row.top_k = args->top_k;
  row.own_gate = args->own_gate;
  row.correction_bias = row.rule.correction_bias ? args->correction_bias : nullptr;
  for (int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
    row.keys = kShared ? row_memory : reinterpret_cast<uint32_t*>(args->scratch) + 2 * t * experts;
    row.order = row.keys + experts;
    row.logits = args->logits + t * experts;
    row.weights = args->weights + t * row.top_k;
    StoreRow(*args, row, t, RouteRow(team, row));
    team.Sync();
  }
}

int CeilDiv(int a, int b) { return a / b + (a % b != 0); }

}  // namespace

cudaError_t LaunchGate(const RouterArgs* args, int32_t capacity, int32_t experts, cudaStream_t stream) {
  if (capacity <= 0 || experts <= 0) return cudaSuccess;
  const int row_tiles = CeilDiv(capacity, kTileRows);
  // Wide tiles where they are enough to occupy the device.
  const bool wide = static_cast<int64_t>(CeilDiv(experts, kTileExperts)) * row_tiles >= 128;
  const int expert_tiles = CeilDiv(experts, wide ? kTileExperts : 1) + 1;
  const dim3 grid(expert_tiles, std::clamp(kMaxBlocks / expert_tiles, 1, row_tiles));
  if (wide) {
    GateKernel<kTileExperts><<<grid, kGateThreads, 0, stream>>>(args, capacity, experts);
  } else {
    GateKernel<1><<<grid, kGateThreads, 0, stream>>>(args, capacity, experts);
  }
  return cudaGetLastError();
}

cudaError_t LaunchRouter(const RouterArgs* args, int32_t capacity, int32_t experts, cudaStream_t stream) {
  if (capacity <= 0 || experts <= 0) return cudaSuccess;
  const int blocks = std::min(capacity, kMaxBlocks);
  // Depends on E only: a row's sums are those of any other call.
  const int threads = std::clamp(CeilDiv(CeilDiv(experts, 4), kWarp) * kWarp, kWarp, kRouterThreads);
  if (experts <= kSharedExperts) {
    RouterKernel<true><<<blocks, threads, 8 * experts, stream>>>(args, capacity, experts);
  } else {
    RouterKernel<false><<<blocks, threads, 0, stream>>>(args, capacity, experts);
  }
  return cudaGetLastError();
}

}  // namespace moed::cuda
