// The kernel of the product for few rows (few_rows-inl.cuh) and its launchers, for one kind of codes.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_LAUNCH_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_LAUNCH_INL_CUH_

#include "kernels/cuda/few_rows-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {

// Thread blocks of a multiprocessor that the registers must leave room for.
constexpr int FewRowsResident(int tokens) { return tokens <= 8 ? 5 : tokens == 32 ? 3 : 4; }

template <Codes kCodes, int kTokens, int kSlotSteps, bool kZeros, bool kPowers>
__global__ void __launch_bounds__(kTileThreads, FewRowsResident(kTokens))
    FewRows(const GemmArgs* global_args, const SortArgs* sort) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ int rows[kTokens];
  static_assert(sizeof(GemmArgs) / 8 <= kTileThreads);
  // Before the wait: these are the call's, and to read one takes as long as a block of weights.
  if (threadIdx.x < sizeof(GemmArgs) / 8) words[threadIdx.x] = reinterpret_cast<const uint64_t*>(global_args)[threadIdx.x];
  const Tile* const tiles = sort->tiles;
  const int32_t *const totals = sort->totals, *const source = sort->source;
  __syncthreads();
  const GemmArgs& args = *reinterpret_cast<const GemmArgs*>(words);
  if (!args.tiles_early) WaitForEarlier();
  const Tile tile = tiles[blockIdx.x];
  if (static_cast<int>(blockIdx.x) >= totals[1]) return WaitForEarlier();
  FewRowsProduct<kCodes, kTokens, kSlotSteps, kZeros, kPowers> product(args, tile, shared);
  product.Run(source, rows);
  if (product.Gather()) product.Store(rows);
}

template <Codes kCodes, int kTokens, int kSlotSteps, bool kZeros, bool kPowers>
cudaError_t LaunchFewRowsTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Layout = SlabLayout<kTokens, kSlotSteps, kZeros>;
  const auto kernel = FewRows<kCodes, kTokens, kSlotSteps, kZeros, kPowers>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(launch.tiles, launch.row_tiles, launch.ranges);
  return LaunchAfter(kernel, grid, kTileThreads, Layout::kBytes, stream, args, sort);
}

template <Codes kCodes, int kTokens, bool kZeros, bool kPowers>
cudaError_t LaunchFewRowsScaled(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.slot_steps) {
    case 1: return LaunchFewRowsTiles<kCodes, kTokens, 1, kZeros, kPowers>(launch, args, sort, stream);
    case 2: return LaunchFewRowsTiles<kCodes, kTokens, 2, kZeros, kPowers>(launch, args, sort, stream);
    case 4: return LaunchFewRowsTiles<kCodes, kTokens, 4, kZeros, kPowers>(launch, args, sort, stream);
    case 8: return LaunchFewRowsTiles<kCodes, kTokens, 8, kZeros, kPowers>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <Codes kCodes, int kTokens, bool kZeros>
cudaError_t LaunchFewRowsSlots(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if constexpr (!kZeros) {
    if (launch.slot_steps == 0) return LaunchFewRowsTiles<kCodes, kTokens, 0, false, false>(launch, args, sort, stream);
  }
  if constexpr (kCodes == Codes::kFp4) {
    if (launch.powers) return LaunchFewRowsScaled<kCodes, kTokens, kZeros, true>(launch, args, sort, stream);
  }
  if constexpr (BitsOf(kCodes) <= 8) return LaunchFewRowsScaled<kCodes, kTokens, kZeros, false>(launch, args, sort, stream);
  return cudaErrorInvalidValue;
}

// Every number of rows and scales of one kind of codes, with zero points or without: the body of one source file, so that none
// takes long to compile.
template <Codes kCodes, bool kZeros = false>
cudaError_t LaunchFewRowsOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.tokens) {
    case 8: return LaunchFewRowsSlots<kCodes, 8, kZeros>(launch, args, sort, stream);
    case 16: return LaunchFewRowsSlots<kCodes, 16, kZeros>(launch, args, sort, stream);
    default: break;
  }
  // Of bf16 weights, which are not decoded, wgmma makes larger tiles.
  if constexpr (BitsOf(kCodes) <= 8) {
    switch (launch.tokens) {
      case 24: return LaunchFewRowsSlots<kCodes, 24, kZeros>(launch, args, sort, stream);
      case 32: return LaunchFewRowsSlots<kCodes, 32, kZeros>(launch, args, sort, stream);
      default: break;
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_FEW_ROWS_LAUNCH_INL_CUH_
