#include "kernels/cuda/reference_quantize.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/activation_quant.h"
#include "kernels/activation_quant_rules.h"
#include "kernels/cuda/load_element.cuh"

namespace moed::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
// Blocks of a kernel that strides over its elements: enough to fill any device.
constexpr int64_t kMostBlocks = 4096;

// Magnitudes are compared as the integers that their bits are: the same order, with infinity above every number and NaN above it.
__device__ uint32_t MagnitudeBits(float value) { return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu; }

// `load(i)` is value i as float32.
template <typename Load>
__global__ void __launch_bounds__(kThreads) AbsMaxKernel(Load load, int64_t count, float* largest) {
  uint32_t bits = 0;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += threads) {
    bits = max(bits, MagnitudeBits(load(i)));
  }
  bits = __reduce_max_sync(kAllLanes, bits);
  if (threadIdx.x % kLanes == 0) atomicMax(reinterpret_cast<unsigned int*>(largest), bits);
}

template <typename Load>
cudaError_t LaunchAbsMaxOf(const Load& load, int64_t count, float* largest, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  AbsMaxKernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(load, count, largest);
  return cudaGetLastError();
}

struct LoadDouble {
  const double* values;
  __device__ float operator()(int64_t i) const { return static_cast<float>(values[i]); }
};

struct LoadInput {
  const void* values;
  DType dtype;
  __device__ float operator()(int64_t i) const { return LoadElement(values, dtype, i); }
};

// A group of a row, and the lane of the warp that quantizes it. A value is read and written by the same lane.
struct Group {
  const double* x;
  double* out;
  int64_t size;
  int lane;

  __device__ float load(int64_t k) const { return static_cast<float>(x[k]); }
  __device__ void Fill(float value) const {
    for (int64_t k = lane; k < size; k += kLanes) out[k] = value;
  }
  // For all lanes of the warp at once.
  __device__ float AbsMax() const {
    uint32_t bits = 0;
    for (int64_t k = lane; k < size; k += kLanes) bits = max(bits, MagnitudeBits(load(k)));
    return std::bit_cast<float>(static_cast<uint32_t>(__reduce_max_sync(kAllLanes, bits)));
  }
};

// The functions of activation_quant.cc, each lane with its values.

__device__ void ScaleGroup(const ActivationScheme& scheme, float scale, const Group& group) {
  const bool full_range = scheme.mode == ActivationMode::kStatic;
  for (int64_t k = group.lane; k < group.size; k += kLanes) {
    group.out[k] = quant::RoundToElement(scheme.element, full_range, group.load(k) / scale) * scale;
  }
}

__device__ void DynamicGroup(const ActivationScheme& scheme, float absmax, const Group& group) {
  if (!std::isfinite(absmax)) return group.Fill(std::numeric_limits<float>::quiet_NaN());
  if (absmax == 0.0f) {  // the zeros of the row rounded to float32, with their signs
    for (int64_t k = group.lane; k < group.size; k += kLanes) group.out[k] = group.load(k);
    return;
  }
  const float scale = quant::DynamicScale(scheme, absmax);
  if (scale == 0.0f) return group.Fill(0.0f);  // absmax underflows when divided
  ScaleGroup(scheme, scale, group);
}

__device__ void NvGroup(const ActivationScheme& scheme, float global, const Group& group) {
  const float absmax = group.AbsMax();
  if (!std::isfinite(absmax)) return group.Fill(std::numeric_limits<float>::quiet_NaN());
  const float block = quant::NvBlockScale(global, absmax);
  if (block == 0.0f) return group.Fill(0.0f);
  for (int64_t k = group.lane; k < group.size; k += kLanes) {
    group.out[k] = quant::RoundToElement(scheme.element, false, group.load(k) * global / block) * block / global;
  }
}

// A block a row, a warp a group of `size` values. `spans`: args.absmax is the groups' largest magnitude.
__global__ void __launch_bounds__(kThreads) QuantizeRowsKernel(QuantizeRowsArgs args, int64_t size, bool spans) {
  const int64_t row = blockIdx.x;
  const int64_t at = row * args.cols;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const float stored = args.stored[args.experts[row]];
  for (int64_t first = warp * size; first < args.cols; first += kWarps * size) {
    const Group group = {args.rows + at + first, args.quantized + at + first, min(size, args.cols - first),
                         static_cast<int>(threadIdx.x) % kLanes};
    if (args.scheme.mode == ActivationMode::kStatic) {
      ScaleGroup(args.scheme, stored, group);
    } else if (spans) {
      DynamicGroup(args.scheme, *args.absmax, group);
    } else if (args.scheme.scale == ScaleType::kE4m3) {
      NvGroup(args.scheme, stored, group);
    } else {
      DynamicGroup(args.scheme, group.AbsMax(), group);
    }
  }
}

}  // namespace

cudaError_t LaunchAbsMax(const double* values, int64_t count, float* largest, cudaStream_t stream) {
  return LaunchAbsMaxOf(LoadDouble{values}, count, largest, stream);
}

cudaError_t LaunchInputAbsMax(const void* values, DType dtype, int64_t count, float* largest, cudaStream_t stream) {
  return LaunchAbsMaxOf(LoadInput{values, dtype}, count, largest, stream);
}

cudaError_t LaunchQuantizeRows(const QuantizeRowsArgs& args, cudaStream_t stream) {
  if (args.count == 0 || args.cols == 0) return cudaSuccess;
  const bool spans = SpansRows(args.scheme);
  // A scale that is known before the group is read goes for any cut of the row.
  const bool known = spans || args.scheme.mode == ActivationMode::kStatic;
  const int64_t size = known ? kLanes : args.scheme.group.cols > 0 ? args.scheme.group.cols : args.cols;
  QuantizeRowsKernel<<<static_cast<unsigned int>(args.count), kThreads, 0, stream>>>(args, size, spans);
  return cudaGetLastError();
}

}  // namespace moed::cuda
