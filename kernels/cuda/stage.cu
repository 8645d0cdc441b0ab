// Kernels that make the operands of products out of rows of x and h: copies, quantized activations, several terms. Their arguments
// and contracts are in call_block.h.
//
// Nothing here depends on the order in which threads run: largest magnitudes are merged as integers, where NaN is the largest of
// all.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/activation_quant_rules.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {
namespace {

constexpr int kRowThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarpGroup = kStagedGroup;

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
  BeginAfterEarlier();
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

  // The code's value before it is rounded, the code's value, and what it is multiplied by.
  __device__ float Scaled(float x, float scale) const {
    if (scale == 0.0f) return 0.0f;
    if (a.scheme.scale == ScaleType::kE4m3 && a.scheme.mode == ActivationMode::kDynamic) x *= stored;
    return x / scale;
  }
  __device__ float Code(float scaled) const {
    return quant::RoundToElement(a.scheme.element, a.scheme.mode == ActivationMode::kStatic, scaled);
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

// The value at position `at` that becomes a code, or is staged as it is; `scale` gets that of its group.
__device__ float ScaledValue(const StagedRow& row, int64_t at, float* scale) {
  const StageArgs& a = row.a;
  const int64_t k = row.order != nullptr ? row.order[at] : at < a.cols ? at : -1;
  if (k < 0) return 0.0f;
  const float x = row.Value(k);
  if (a.scheme.mode == ActivationMode::kNone) return x;
  const bool one = a.group == 0 || a.absmax != nullptr || a.scheme.mode == ActivationMode::kStatic;
  // In 32 bits: a division of 64 costs more than all the rest.
  *scale = row.scales[one ? 0 : static_cast<uint32_t>(k) / static_cast<uint32_t>(a.group)];
  return row.Scaled(x, *scale);
}

// Position `at` as the operand of bf16 terms holds it.
__device__ float StagedValue(const StagedRow& row, int64_t at) {
  float scale = 0.0f;
  const float scaled = ScaledValue(row, at, &scale);
  if (row.a.scheme.mode == ActivationMode::kNone) return scaled;
  const float code = row.Code(scaled);
  return row.a.scaled_values ? code * row.Factor(scale) : code;
}

// Two codes as E4M3: the hardware's rounding is that of FloatToE4m3.
__device__ uint32_t E4m3Pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return FloatToE4m3(low) | static_cast<uint32_t>(FloatToE4m3(high)) << 8;
#endif
}

// The codes of `low` and `high` at an even position and the next, which are neighbours among the bytes too.
__device__ void StoreBytePair(const StagedRow& row, int64_t out_row, int64_t at, float low, float high) {
  const StageArgs& a = row.a;
  uint32_t pair;
  if (a.scheme.element == ElementType::kInt8) {
    pair = (__float2int_rn(row.Code(low)) & 0xFF) | (__float2int_rn(row.Code(high)) & 0xFF) << 8;
  } else {
    pair = E4m3Pair(low, high);
  }
  const int in_step = static_cast<int>(at % kStepDepth);
  const int64_t to = out_row * a.out.row_stride + at - in_step + BytePosition(in_step);
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(a.out.data) + to) = static_cast<uint16_t>(pair);
}

// The same of what the row holds there. Whether one is NaN, which int8 does not have.
__device__ bool StoreBytes(const StagedRow& row, int64_t out_row, int64_t at) {
  float scale = 0.0f;
  const float low = ScaledValue(row, at, &scale), high = ScaledValue(row, at + 1, &scale);
  StoreBytePair(row, out_row, at, low, high);
  return isnan(low) || isnan(high);
}

__device__ void StorePair(const Operand& out, int64_t row, int rank, int64_t at, float low, float high) {
  uint16_t* const data = static_cast<uint16_t*>(out.data);
  for (int term = 0; term < out.terms; ++term) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    const int64_t to = term * out.term_stride + OperandAt(out.row_stride, out.panel_stride, row, rank, at);
    *reinterpret_cast<__nv_bfloat162*>(data + to) = pair;
    low -= __low2float(pair);
    high -= __high2float(pair);
  }
}

// body(stored row, its rank) for the rows that staging row `row` makes.
template <typename Body>
__device__ void ForEachStored(const StageArgs& a, const SortArgs* sort, int64_t row, const Body& body) {
  if (!a.scatter) return body(row, a.out.panel_stride > 0 ? sort->rank[row] : 0);
  for (int j = 0; j < a.top_k; ++j) {
    const int at = sort->position[row * a.top_k + j];
    if (at >= 0) body(at, sort->rank[at]);
  }
}

// Where the rows that staging row `row` makes go, 32 slots at a time, one a lane.
struct StoredRow {
  int at, rank;  // -1: none
};
__device__ StoredRow FindStored(const StageArgs& a, const SortArgs* sort, int64_t row, int first) {
  const int j = first + static_cast<int>(threadIdx.x) % kWarp;
  if (!a.scatter) return {static_cast<int>(row), a.out.panel_stride > 0 ? sort->rank[row] : 0};
  const int at = j < a.top_k ? sort->position[row * a.top_k + j] : -1;
  return {at, at >= 0 ? sort->rank[at] : 0};
}

// Rows of bf16 as they are, 16 bytes at a time: the many copies of a row would wait for each other's places in the general kernel.
__device__ void StageCopy(const StageArgs& a, const SortArgs* sort, int64_t row) {
  const int64_t source = a.from_source ? sort->source[row] : row;
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.x) + source * a.x_stride);
  uint16_t* const out = static_cast<uint16_t*>(a.out.data);
  const int slots = a.scatter ? a.top_k : 1, pieces = static_cast<int>(a.depth / 8);
  for (int first = 0; first < slots; first += kWarp) {
    const StoredRow own = FindStored(a, sort, row, first);
    // Whole warps go round, so that all lanes are there to tell their slots.
    for (int base = threadIdx.x / kWarp * kWarp; base < pieces; base += kRowThreads) {
      const int piece = base + threadIdx.x % kWarp;
      const uint4 value = piece < a.cols / 8 ? from[piece] : make_uint4(0, 0, 0, 0);
#pragma unroll 8
      for (int j = 0; j < min(slots - first, kWarp); ++j) {
        const int at = __shfl_sync(~0u, own.at, j), rank = __shfl_sync(~0u, own.rank, j);
        if (at < 0 || piece >= pieces) continue;
        *reinterpret_cast<uint4*>(out + OperandAt(a.out.row_stride, a.out.panel_stride, at, rank, piece * 8)) = value;
      }
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) StageCopies(const StageArgs* args, const SortArgs* sort) {
  const StageArgs a = *args;
  BeginAfterEarlier();
  const int64_t rows = a.out.by_sorted_row && !a.scatter ? sort->totals[0] : a.rows;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) StageCopy(a, sort, row);
}

// Rows that a thread block gathers at once, by way of shared memory: they mostly have the same order, which is read once.
constexpr int kMostGatheredRows = 4;
int GatheredRows(int32_t cols) {
  constexpr int32_t kElements = 24576;
  return std::clamp<int32_t>(kElements / std::max(cols, 1), 1, kMostGatheredRows);
}

// The 8 elements of a row that `order` names, zeros for -1.
__device__ uint4 GatherEight(const uint16_t* row, const int4 (&order)[2]) {
  const int at[8] = {order[0].x, order[0].y, order[0].z, order[0].w, order[1].x, order[1].y, order[1].z, order[1].w};
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = at[2 * i] >= 0 ? row[at[2 * i]] : 0, high = at[2 * i + 1] >= 0 ? row[at[2 * i + 1]] : 0;
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__global__ void __launch_bounds__(kRowThreads) StageGathers(const StageArgs* args, const SortArgs* sort, int rows_at_once) {
  extern __shared__ __align__(16) uint16_t gathered[];
  const StageArgs a = *args;
  BeginAfterEarlier();
  const int first = blockIdx.x * rows_at_once, count = min(rows_at_once, (a.out.by_sorted_row ? sort->totals[0] : a.rows) - first);
  if (count <= 0) return;
  const int pieces = static_cast<int>(a.cols / 8);
  for (int r = 0; r < count; ++r) {
    const int64_t source = a.from_source ? sort->source[first + r] : first + r;
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.x) + source * a.x_stride);
    for (int piece = threadIdx.x; piece < pieces; piece += kRowThreads)
      reinterpret_cast<uint4*>(gathered + r * a.cols)[piece] = from[piece];
  }
  __syncthreads();
  uint16_t* const out = static_cast<uint16_t*>(a.out.data);
  for (int64_t at = threadIdx.x * 8; at < a.depth; at += kRowThreads * 8) {
    int64_t ordered = -1;  // where the order in registers lies
    int4 order[2];
    for (int r = 0; r < count; ++r) {
      const int row = first + r, rank = a.out.panel_stride > 0 ? sort->rank[row] : 0;
      const int64_t wanted = a.order_stride > 0 ? sort->expert[row] * a.order_stride : 0;
      if (wanted != ordered) {
        ordered = wanted;
        const int4* const from = reinterpret_cast<const int4*>(a.order + ordered + at);
        order[0] = __ldg(from), order[1] = __ldg(from + 1);
      }
      const uint4 eight = GatherEight(gathered + r * a.cols, order);
      *reinterpret_cast<uint4*>(out + OperandAt(a.out.row_stride, a.out.panel_stride, row, rank, at)) = eight;
    }
  }
}

// Scales as the product wants them: of every group, also where one covers the row. `nan`: a code that should be NaN makes them so.
__device__ void StoreScales(const StagedRow& staged, const SortArgs* sort, int64_t row, int64_t groups, bool nan) {
  const StageArgs& a = staged.a;
  const bool one = groups == 1 || a.absmax != nullptr || a.scheme.mode == ActivationMode::kStatic;
  for (int64_t g = threadIdx.x; g < a.out.scale_stride; g += kRowThreads) {
    const float factor = nan ? __int_as_float(0x7FC00000) : staged.Factor(staged.scales[one ? 0 : g]);
    ForEachStored(a, sort, row, [&](int64_t to, int) { a.out.scales[to * a.out.scale_stride + g] = factor; });
  }
}

__global__ void __launch_bounds__(kRowThreads) StageRows(const StageArgs* args, const SortArgs* sort) {
  const StageArgs a = *args;
  BeginAfterEarlier();
  const int64_t row = blockIdx.x;
  if (row >= (a.out.by_sorted_row && !a.scatter ? sort->totals[0] : a.rows)) return;
  const int64_t source = a.from_source ? sort->source[row] : row;
  const int expert = a.out.by_sorted_row && !a.scatter ? sort->expert[row] : 0;
  const int64_t groups = a.group == 0 ? 1 : (a.cols + a.group - 1) / a.group;
  __shared__ float one_scale;  // of a row that is scattered: it has one, and its place in the operand is another row's
  const StagedRow staged = {a, source * a.x_stride, a.weights != nullptr ? a.weights[sort->slot[row]] : 1.0f,
                            a.stored != nullptr ? a.stored[expert] : 1.0f, a.scatter ? &one_scale : a.scratch + row * groups,
                            a.order != nullptr ? a.order + expert * a.order_stride : nullptr};
  if (a.scheme.mode != ActivationMode::kNone) MakeScales(staged);
  const bool bytes = a.out.kind == OperandKind::kBytes;
  bool nan = false;
  for (int64_t at = 2 * threadIdx.x; at < a.depth; at += 2 * kRowThreads) {
    if (bytes) {
      nan = StoreBytes(staged, row, at) || nan;
      continue;
    }
    const float low = StagedValue(staged, at), high = StagedValue(staged, at + 1);
    ForEachStored(a, sort, row, [&](int64_t to, int rank) { StorePair(a.out, to, rank, at, low, high); });
  }
  if (a.out.scales == nullptr) return;
  StoreScales(staged, sort, row, groups, __syncthreads_or(nan) != 0);
}

// Four neighbours of a row.
__device__ void LoadFour(const void* x, DType dtype, int64_t at, float (&v)[4]) {
  if (dtype == DType::kF32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    return;
  }
  const uint2 four = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(x) + at);
  const uint32_t bits[4] = {four.x & 0xFFFF, four.x >> 16, four.y & 0xFFFF, four.y >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = dtype == DType::kBf16 ? Bits(bits[i] << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits[i])));
  }
}

// What StageBy::kGroups is for: a warp makes a group of 128 inputs at once, which it reads once.
__global__ void __launch_bounds__(kRowThreads) StageGroups(const StageArgs* args, const SortArgs* sort) {
  const StageArgs a = *args;
  BeginAfterEarlier();
  const int64_t row = blockIdx.x;
  if (row >= (a.out.by_sorted_row ? sort->totals[0] : a.rows)) return;
  const int64_t source = a.from_source ? sort->source[row] : row;
  const StagedRow staged = {a, source * a.x_stride, 1.0f, 1.0f, nullptr, nullptr};
  float* const scales = a.out.scales + row * a.out.scale_stride;
  const int groups = static_cast<int>(a.cols / kWarpGroup);
  bool nan = false;
  for (int g = threadIdx.x / kWarp; g < groups; g += kRowThreads / kWarp) {
    const int at = g * kWarpGroup + threadIdx.x % kWarp * 4;
    float v[4];
    LoadFour(a.x, a.dtype, staged.from + at, v);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, Magnitude(v[i]));
    const float scale = staged.ScaleOf(Bits(__reduce_max_sync(~0u, most)));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float low = staged.Scaled(v[i], scale), high = staged.Scaled(v[i + 1], scale);
      StoreBytePair(staged, row, at + i, low, high);
      nan = nan || isnan(low) || isnan(high);
    }
    if (threadIdx.x % kWarp == 0) scales[g] = scale;
  }
  if (__syncthreads_or(nan) == 0) return;
  for (int g = threadIdx.x; g < groups; g += kRowThreads) scales[g] = __int_as_float(0x7FC00000);
}

}  // namespace

cudaError_t LaunchAbsMax(const AbsMaxArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream) {
  return LaunchAfter(AbsMax, capacity, kRowThreads, 0, stream, args, sort);
}

cudaError_t LaunchStage(const StageLaunch& launch, const StageArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if (launch.by == StageBy::kGathers) {
    const int rows = GatheredRows(launch.cols);
    return LaunchAfter(StageGathers, (launch.rows + rows - 1) / rows, kRowThreads,
                       static_cast<size_t>(rows) * static_cast<size_t>(launch.cols) * sizeof(uint16_t), stream, args, sort, rows);
  }
  if (launch.by == StageBy::kCopies)
    return LaunchAfter(StageCopies, std::min(launch.rows, kMostRowBlocks), kRowThreads, 0, stream, args, sort);
  const auto kernel = launch.by == StageBy::kGroups ? StageGroups : StageRows;
  return LaunchAfter(kernel, launch.rows, kRowThreads, 0, stream, args, sort);
}

}  // namespace moed::cuda
