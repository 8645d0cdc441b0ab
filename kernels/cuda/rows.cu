// Kernels over the sorted rows of a call: activations and combine. Their arguments and contracts are in call_block.h.
//
// Nothing here depends on the order in which threads run: sums over slots have one order.
#include <cuda_runtime.h>

#include "kernels/activation.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {
namespace {

constexpr int kRowThreads = 256;

__global__ void __launch_bounds__(kRowThreads) ActivateRows(const ActivateArgs* args, const SortArgs* sort) {
  const ActivateArgs a = *args;
  BeginAfterEarlier();
  const int64_t row = blockIdx.x;
  if (row >= sort->totals[0]) return;
  const float* gate = a.gate + row * a.stride;
  const float* up = a.up != nullptr ? a.up + row * a.stride : gate;
  for (int64_t f = threadIdx.x; f < a.out_stride; f += kRowThreads) {
    const int64_t tile = f / kHalfRows * kTileRows;
    const int in_tile = static_cast<int>(f % kHalfRows);
    const int64_t gate_at = a.up != nullptr ? f : tile + PairedRow(in_tile, false);
    const int64_t up_at = a.up != nullptr ? f : tile + PairedRow(in_tile, true);
    const float h = f < a.cols ? Activate<float>(a.activation, gate[gate_at], up[up_at]) : 0.0f;
    if (a.out != nullptr) {
      a.out[row * a.out_stride + f] = h;
    } else {
      const int rank = a.out_panel_stride > 0 ? sort->rank[row] : 0;
      a.out_bf16[OperandAt(a.out_stride, a.out_panel_stride, row, rank, f)] = __bfloat16_as_ushort(__float2bfloat16_rn(h));
    }
  }
}

// `kWidth` neighbouring columns: 4, read and written as one, or 1.
template <int kWidth>
struct Columns {
  float v[kWidth];
};

// The columns of `rows` from element `at` on, of which the caller knows whether they are bf16.
template <bool kBf16, int kWidth>
__device__ Columns<kWidth> LoadSums(const SumRows& rows, int64_t at) {
  static_assert(kWidth == 1 || kWidth == 4);
  if constexpr (kBf16) {
    const uint16_t* from = static_cast<const uint16_t*>(rows.data) + at;
    if constexpr (kWidth == 1) {
      return {Bits(static_cast<uint32_t>(*from) << 16)};
    } else {
      const uint2 four = *reinterpret_cast<const uint2*>(from);
      return {Bits(four.x << 16), Bits(four.x & 0xFFFF0000u), Bits(four.y << 16), Bits(four.y & 0xFFFF0000u)};
    }
  } else {
    const float* from = static_cast<const float*>(rows.data) + at;
    if constexpr (kWidth == 1) {
      return {*from};
    } else {
      const float4 four = *reinterpret_cast<const float4*>(from);
      return {four.x, four.y, four.z, four.w};
    }
  }
}

template <int kWidth>
__device__ Columns<kWidth> LoadSums(const SumRows& rows, int64_t at) {
  return rows.bf16 ? LoadSums<true, kWidth>(rows, at) : LoadSums<false, kWidth>(rows, at);
}

// Four 16-bit elements as one.
template <typename Convert>
__device__ uint2 PackFour(const Columns<4>& x, const Convert& convert) {
  const auto pair = [&](float low, float high) { return convert(low) | static_cast<uint32_t>(convert(high)) << 16; };
  return make_uint2(pair(x.v[0], x.v[1]), pair(x.v[2], x.v[3]));
}

template <int kWidth>
__device__ void StoreColumns(void* out, DType dtype, int64_t at, const Columns<kWidth>& x) {
  if constexpr (kWidth == 1) {
    StoreElement(out, dtype, at, x.v[0]);
  } else if (dtype == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  } else {
    const uint2 packed = dtype == DType::kF16 ? PackFour(x, [](float f) { return __half_as_ushort(__float2half_rn(f)); })
                                              : PackFour(x, [](float f) { return __bfloat16_as_ushort(__float2bfloat16_rn(f)); });
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out) + at) = packed;
  }
}

// Slots of one row, as many as are read at once.
constexpr int kSlotGroup = 8;
struct SlotGroup {
  int at[kSlotGroup];  // sorted rows, -1: none
  float weight[kSlotGroup];
  bool full;           // none is -1
};

// The slots of `row` from `first` on. Without weights they are 1: a product with it is exact, so that sums keep their bits.
__device__ SlotGroup LoadGroup(const CombineArgs& a, int64_t row, int first) {
  SlotGroup group;
  group.full = true;
#pragma unroll
  for (int j = 0; j < kSlotGroup; ++j) {
    const bool valid = first + j < a.top_k;
    const int64_t slot = row * a.top_k + first + j;
    group.at[j] = valid ? a.position[slot] : -1;
    group.weight[j] = valid && a.weights != nullptr ? a.weights[slot] : 1.0f;
    group.full = group.full && group.at[j] >= 0;
  }
  return group;
}

// Adds the group's slots to the sum of the columns from `c` on, in order; all are read before the first is added.
// `kFull`: the group is; without the conditions more reads are under way at once.
template <bool kFull, bool kBf16, int kWidth>
__device__ void AddGroup(const CombineArgs& a, const SlotGroup& group, int64_t c, Columns<kWidth>* sum) {
  Columns<kWidth> y[kSlotGroup];
#pragma unroll
  for (int j = 0; j < kSlotGroup; ++j) {
    if (kFull || group.at[j] >= 0) y[j] = LoadSums<kBf16, kWidth>(a.y, group.at[j] * a.y.stride + c);
  }
#pragma unroll
  for (int j = 0; j < kSlotGroup; ++j) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (kFull || group.at[j] >= 0) sum->v[i] = __fmaf_rn(group.weight[j], y[j].v[i], sum->v[i]);
    }
  }
}

// The block's share of a row's columns.
template <int kWidth, bool kBf16>
__device__ void CombineRow(const CombineArgs& a, int64_t row) {
  const bool batched = a.source != nullptr;
  const int64_t to = (batched ? a.source[row] : row) * a.cols;
  const float factor = a.shared.data != nullptr && a.factor != nullptr ? a.factor[row] : 1.0f;
  SlotGroup group;
  if (!batched) group = LoadGroup(a, row, 0);
  const int64_t threads = blockDim.x, step = gridDim.y * threads * kWidth;
  for (int64_t c = (blockIdx.y * threads + threadIdx.x) * kWidth; c < a.cols; c += step) {
    Columns<kWidth> sum = {};
    if (batched) {
      sum = LoadSums<kBf16, kWidth>(a.y, row * a.y.stride + c);
    } else {
      Columns<kWidth> shared = {};
      if (a.shared.data != nullptr) shared = LoadSums<kWidth>(a.shared, row * a.shared.stride + c);
      for (int first = 0; first < a.top_k; first += kSlotGroup) {
        if (a.top_k > kSlotGroup) group = LoadGroup(a, row, first);
        if (group.full) {
          AddGroup<true, kBf16>(a, group, c, &sum);
        } else {
          AddGroup<false, kBf16>(a, group, c, &sum);
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (a.shared.data != nullptr) sum.v[i] = __fmaf_rn(factor, shared.v[i], sum.v[i]);
      }
    }
    StoreColumns(a.out, a.dtype, to + c, sum);
  }
}

// Whether every row of the matrices that combine reads and writes can be taken in steps of four elements.
__device__ bool HasWideRows(const CombineArgs& a) {
  const uintptr_t out_bytes = a.dtype == DType::kF32 ? 16 : 8;
  const auto wide = [](const SumRows& rows) { return rows.stride % 4 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0; };
  return a.cols % 4 == 0 && wide(a.y) && wide(a.shared) && reinterpret_cast<uintptr_t>(a.out) % out_bytes == 0;
}

constexpr int kCombineThreads = 128, kFewRowThreads = 64;  // of a block; the latter where rows are few

__global__ void __launch_bounds__(kCombineThreads, 5) Combine(const CombineArgs* args) {
  const CombineArgs a = *args;
  BeginAfterEarlier();
  const int64_t rows = a.source != nullptr ? a.totals[0] : a.rows;
  const bool wide = HasWideRows(a);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (wide) {
      a.y.bf16 ? CombineRow<4, true>(a, row) : CombineRow<4, false>(a, row);
    } else {
      a.y.bf16 ? CombineRow<1, true>(a, row) : CombineRow<1, false>(a, row);
    }
  }
}

}  // namespace

cudaError_t LaunchActivate(const ActivateArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream) {
  return LaunchAfter(ActivateRows, capacity, kRowThreads, 0, stream, args, sort);
}

cudaError_t LaunchCombine(const CombineArgs* args, int32_t capacity, int64_t cols, cudaStream_t stream) {
  // Few rows share their columns among blocks, and these are small: one multiprocessor reads what a block reads.
  constexpr int64_t kWidth = 4, kWantedThreads = 512 * 256;
  const bool few = capacity * ((cols + kWidth - 1) / kWidth) < kWantedThreads;
  const int64_t threads = few ? kFewRowThreads : kCombineThreads;
  const int64_t pieces = (cols + kWidth * threads - 1) / (kWidth * threads);
  const int64_t wanted = (kWantedThreads + capacity * threads - 1) / (capacity * threads);
  const dim3 grid(capacity < kMostRowBlocks ? capacity : kMostRowBlocks, static_cast<unsigned>(pieces < wanted ? pieces : wanted));
  return LaunchAfter(Combine, grid, static_cast<unsigned>(threads), 0, stream, args);
}

}  // namespace moed::cuda
