// Kernels over the sorted rows of a call: operands, activations, combine. Their arguments and contracts are in call_block.h.
//
// Nothing here depends on the order in which threads run: largest magnitudes are merged as integers, where NaN is the largest of
// all, and sums over slots have one order.
#include <cuda_runtime.h>

#include "kernels/activation.h"
#include "kernels/activation_quant_rules.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/launch.h"

namespace moed::cuda {
namespace {

constexpr int kRowThreads = 256;
constexpr int kWarp = 32;

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

// Codes at an even position and the next, which are neighbours among the bytes too. Whether one is NaN, which int8 does not have.
__device__ bool StoreBytes(const StagedRow& row, int64_t out_row, int64_t at) {
  const StageArgs& a = row.a;
  float scale = 0.0f;
  const float low = ScaledValue(row, at, &scale), high = ScaledValue(row, at + 1, &scale);
  uint32_t pair;
  if (a.scheme.element == ElementType::kInt8) {
    pair = (__float2int_rn(row.Code(low)) & 0xFF) | (__float2int_rn(row.Code(high)) & 0xFF) << 8;
  } else {
    pair = E4m3Pair(low, high);
  }
  const int in_step = static_cast<int>(at % kStepDepth);
  const int64_t to = out_row * a.out.row_stride + at - in_step + BytePosition(in_step);
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(a.out.data) + to) = static_cast<uint16_t>(pair);
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

// Rows of bf16 as they are, 16 bytes at a time.
__device__ void CopyRow(const StageArgs& a, const SortArgs* sort, int64_t row, int64_t source) {
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.x) + source * a.x_stride);
  for (int64_t piece = threadIdx.x; piece < a.depth / 8; piece += kRowThreads) {
    const uint4 value = piece < a.cols / 8 ? from[piece] : make_uint4(0, 0, 0, 0);
    ForEachStored(a, sort, row, [&](int64_t to, int rank) {
      const int64_t place = OperandAt(a.out.row_stride, a.out.panel_stride, to, rank, piece * 8);
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(a.out.data) + place) = value;
    });
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
  const int64_t row = blockIdx.x;
  if (a.skip || row >= (a.out.by_sorted_row && !a.scatter ? sort->totals[0] : a.rows)) return;
  const int64_t source = a.from_source ? sort->source[row] : row;
  if (a.copies) return CopyRow(a, sort, row, source);
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

__global__ void __launch_bounds__(kRowThreads) ActivateRows(const ActivateArgs* args, const SortArgs* sort) {
  const ActivateArgs a = *args;
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

template <int kWidth>
__device__ Columns<kWidth> LoadColumns(const float* from) {
  if constexpr (kWidth == 1) {
    return {*from};
  } else {
    const float4 four = *reinterpret_cast<const float4*>(from);
    return {four.x, four.y, four.z, four.w};
  }
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
template <bool kFull, int kWidth>
__device__ void AddGroup(const CombineArgs& a, const SlotGroup& group, int64_t c, Columns<kWidth>* sum) {
  Columns<kWidth> y[kSlotGroup];
#pragma unroll
  for (int j = 0; j < kSlotGroup; ++j) {
    if (kFull || group.at[j] >= 0) y[j] = LoadColumns<kWidth>(a.y + group.at[j] * a.y_stride + c);
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
template <int kWidth>
__device__ void CombineRow(const CombineArgs& a, int64_t row) {
  const bool batched = a.source != nullptr;
  const int64_t to = (batched ? a.source[row] : row) * a.cols;
  const float factor = a.shared != nullptr && a.factor != nullptr ? a.factor[row] : 1.0f;
  SlotGroup group;
  if (!batched) group = LoadGroup(a, row, 0);
  const int64_t threads = blockDim.x, step = gridDim.y * threads * kWidth;
  for (int64_t c = (blockIdx.y * threads + threadIdx.x) * kWidth; c < a.cols; c += step) {
    Columns<kWidth> sum = {};
    if (batched) {
      sum = LoadColumns<kWidth>(a.y + row * a.y_stride + c);
    } else {
      Columns<kWidth> shared = {};
      if (a.shared != nullptr) shared = LoadColumns<kWidth>(a.shared + row * a.shared_stride + c);
      for (int first = 0; first < a.top_k; first += kSlotGroup) {
        if (a.top_k > kSlotGroup) group = LoadGroup(a, row, first);
        if (group.full) {
          AddGroup<true>(a, group, c, &sum);
        } else {
          AddGroup<false>(a, group, c, &sum);
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (a.shared != nullptr) sum.v[i] = __fmaf_rn(factor, shared.v[i], sum.v[i]);
      }
    }
    StoreColumns(a.out, a.dtype, to + c, sum);
  }
}

// Whether every row of the matrices that combine reads and writes can be taken in steps of four elements.
__device__ bool HasWideRows(const CombineArgs& a) {
  const uintptr_t out_bytes = a.dtype == DType::kF32 ? 16 : 8;
  const bool wide_shared = a.shared == nullptr || (a.shared_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.shared) % 16 == 0);
  return a.cols % 4 == 0 && a.y_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0 && wide_shared &&
         reinterpret_cast<uintptr_t>(a.out) % out_bytes == 0;
}

constexpr int kCombineThreads = 128, kFewRowThreads = 64;  // of a block; the latter where rows are few

__global__ void __launch_bounds__(kCombineThreads, 5) Combine(const CombineArgs* args) {
  const CombineArgs a = *args;
  const int64_t row = blockIdx.x;
  if (row >= (a.source != nullptr ? a.totals[0] : a.rows)) return;
  if (HasWideRows(a)) {
    CombineRow<4>(a, row);
  } else {
    CombineRow<1>(a, row);
  }
}

}  // namespace

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
  // Few rows share their columns among blocks, and these are small: one multiprocessor reads what a block reads.
  constexpr int64_t kWidth = 4, kWantedThreads = 512 * 256;
  const bool few = capacity * ((cols + kWidth - 1) / kWidth) < kWantedThreads;
  const int64_t threads = few ? kFewRowThreads : kCombineThreads;
  const int64_t pieces = (cols + kWidth * threads - 1) / (kWidth * threads);
  const int64_t wanted = (kWantedThreads + capacity * threads - 1) / (capacity * threads);
  const dim3 grid(capacity, static_cast<unsigned>(pieces < wanted ? pieces : wanted));
  Combine<<<grid, static_cast<unsigned>(threads), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moed::cuda
