// The kernel of the product of gemm-inl.cuh and its launchers, for one kind of codes.
#ifndef MOED_KERNELS_CUDA_GEMM_LAUNCH_INL_CUH_
#define MOED_KERNELS_CUDA_GEMM_LAUNCH_INL_CUH_

#include "kernels/cuda/gemm-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {

// Thread blocks of a multiprocessor that the registers must leave room for.
constexpr int BlocksFor(int tokens, bool powers) { return tokens <= 16 ? 5 : tokens <= 48 || powers ? 3 : 2; }

template <Codes kCodes, int kTokens, bool kPowers>
__global__ void __launch_bounds__(kTileThreads, BlocksFor(kTokens, kPowers)) Gemm(const GemmArgs* args, const SortArgs* sort) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ int rows[kTokens];
  Tile tile;
  if (!BeginTile<kTokens>(args, sort, words, rows, &tile)) return;
  TileProduct<kCodes, kTokens, kPowers> product(*reinterpret_cast<const GemmArgs*>(words), tile, blockIdx.y, ring, rows);
  product.Run();
  product.Store();
}

template <Codes kCodes, int kTokens, bool kPowers>
cudaError_t LaunchTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Layout = StageLayout<kCodes, kTokens>;
  const int bytes = Layout::kStages * Layout::Bytes(launch.terms);
  // The most of any launch, since a captured one is held to what is set when it runs.
  constexpr int kMostTerms = kTokens <= kMostTermRows && !kPowers ? 3 : 1;
  const cudaError_t error = cudaFuncSetAttribute(Gemm<kCodes, kTokens, kPowers>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 Layout::kStages * Layout::Bytes(kMostTerms));
  if (error != cudaSuccess) return error;
  return LaunchAfter(Gemm<kCodes, kTokens, kPowers>, dim3(launch.tiles, launch.row_tiles), kTileThreads, bytes, stream, args, sort);
}

// Every number of rows of one kind of codes: the body of one source file, so that none takes long to compile.
template <Codes kCodes, bool kPowers = false>
cudaError_t LaunchGemmOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.tokens) {
    case 8: return LaunchTiles<kCodes, 8, kPowers>(launch, args, sort, stream);
    case 16: return LaunchTiles<kCodes, 16, kPowers>(launch, args, sort, stream);
    case 32: return LaunchTiles<kCodes, 32, kPowers>(launch, args, sort, stream);
    case 48: return LaunchTiles<kCodes, 48, kPowers>(launch, args, sort, stream);
    case 64: return LaunchTiles<kCodes, 64, kPowers>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_GEMM_LAUNCH_INL_CUH_
