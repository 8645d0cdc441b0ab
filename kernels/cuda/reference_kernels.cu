#include "kernels/cuda/reference_kernels.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/cuda/load_element.cuh"
#include "kernels/number_formats.h"

namespace moed::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of a kernel that strides over its elements: enough to fill any device.
constexpr int64_t kMostBlocks = 4096;

// One block a row.
__global__ void __launch_bounds__(kThreads) GatherKernel(GatherArgs args) {
  const int64_t row = blockIdx.x;
  const int64_t source = args.sources[row] * args.cols;
  const double weight = args.weights != nullptr ? args.weights[row] : 1.0;
  for (int64_t c = threadIdx.x; c < args.cols; c += kThreads) {
    args.copies[row * args.cols + c] = static_cast<double>(LoadElement(args.x, args.dtype, source + c)) * weight;
  }
}

// The product's tile: kTileRows rows by as many output features, over kDepth inputs at a time. Thread (tx, ty) of 16 x 16 computes
// rows ty + 16 i and features tx + 16 j.
constexpr int kTileOutputs = kTileRows;
constexpr int kDepth = 16;
constexpr int kSide = 16;
constexpr int kEach = kTileRows / kSide;
static_assert(kSide * kSide == kThreads && kTileRows % kSide == 0);

// Transposed, so that threads of a warp read neighbours. One column more than the tile has: the 16 inputs of a row, written at
// once by 16 threads, then lie in different banks.
using Panel = double[kDepth][kTileRows + 1];

// panel[d][r] = source[r * stride + d] for r < rows and d < depth, else 0: what lies outside the matrix adds nothing.
template <typename T>
__device__ void LoadPanel(const T* source, int64_t stride, int64_t rows, int64_t depth, Panel& panel) {
  const int d = static_cast<int>(threadIdx.x) % kDepth;
  for (int r = static_cast<int>(threadIdx.x) / kDepth; r < kTileRows; r += kThreads / kDepth) {
    panel[d][r] = r < rows && d < depth ? static_cast<double>(source[r * stride + d]) : 0.0;
  }
}

__device__ void MultiplyPanels(const Panel& x, const Panel& w, int tx, int ty, double (&sums)[kEach][kEach]) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    double a[kEach], b[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) a[i] = x[d][ty + kSide * i];
#pragma unroll
    for (int j = 0; j < kEach; ++j) b[j] = w[d][tx + kSide * j];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[i][j] += a[i] * b[j];
    }
  }
}

// A block computes features [feature, feature + kTileOutputs) of one tile of rows; blocks of a tile are neighbours.
__global__ void __launch_bounds__(kThreads) ProductKernel(ProductArgs args, int64_t feature_tiles) {
  __shared__ Panel x_panel, w_panel;
  const RowTile tile = args.tiles[blockIdx.x / feature_tiles];
  const int64_t feature = blockIdx.x % feature_tiles * kTileOutputs;
  const double* x = args.x + tile.first * args.inputs;
  const float* w = args.weights + (tile.expert * args.outputs + feature) * args.inputs;
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  double sums[kEach][kEach] = {};
  for (int64_t k = 0; k < args.inputs; k += kDepth) {
    LoadPanel(x + k, args.inputs, tile.rows, args.inputs - k, x_panel);
    LoadPanel(w + k, args.inputs, args.outputs - feature, args.inputs - k, w_panel);
    __syncthreads();
    MultiplyPanels(x_panel, w_panel, tx, ty, sums);
    __syncthreads();  // before the panels are written again
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t n = feature + tx + kSide * j;
    if (n >= args.outputs) continue;
    const double bias = args.bias != nullptr ? args.bias[tile.expert * args.outputs + n] : 0.0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = ty + kSide * i;
      if (row < tile.rows) args.y[(tile.first + row) * args.outputs + n] = sums[i][j] + bias;
    }
  }
}

__global__ void __launch_bounds__(kThreads) ActivateKernel(Activation activation, double* gate, const double* up, int64_t count) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += threads) {
    gate[i] = Activate<double>(activation, gate[i], up[i]);
  }
}

__device__ void StoreElement(float value, void* out, DType dtype, int64_t at) {
  if (dtype == DType::kF32) {
    static_cast<float*>(out)[at] = value;
  } else {
    static_cast<uint16_t*>(out)[at] = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) CombineKernel(CombineArgs args) {
  const int64_t row = blockIdx.x;
  for (int64_t c = threadIdx.x; c < args.cols; c += kThreads) {
    double sum = 0.0;
    for (int64_t slot = row * args.top_k; slot < (row + 1) * args.top_k; ++slot) {
      const int64_t position = args.positions[slot];
      if (position < 0) continue;
      const double weight = args.weights != nullptr ? args.weights[slot] : 1.0;
      sum += weight * args.y[position * args.cols + c];
    }
    StoreElement(static_cast<float>(sum), args.out, args.dtype, row * args.cols + c);
  }
}

}  // namespace

cudaError_t LaunchGather(const GatherArgs& args, cudaStream_t stream) {
  if (args.routed == 0) return cudaSuccess;
  GatherKernel<<<static_cast<unsigned int>(args.routed), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchProduct(const ProductArgs& args, cudaStream_t stream) {
  const int64_t feature_tiles = (args.outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t blocks = args.tile_count * feature_tiles;
  if (blocks == 0) return cudaSuccess;
  ProductKernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(args, feature_tiles);
  return cudaGetLastError();
}

cudaError_t LaunchActivate(const Activation& activation, double* gate, const double* up, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  ActivateKernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(activation, gate, up, count);
  return cudaGetLastError();
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.cols == 0) return cudaSuccess;
  CombineKernel<<<static_cast<unsigned int>(args.rows), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moed::cuda
