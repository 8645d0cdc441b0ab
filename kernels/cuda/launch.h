// Launchers of the layer's kernels as plain declarations. Arguments are members of a CallBlock in device memory; capacities bound
// the grids and may exceed what the call then has.
#ifndef MOED_KERNELS_CUDA_LAUNCH_H_
#define MOED_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// By what slots are sorted.
enum class SortBy : uint8_t {
  kIds,     // SortArgs::ids
  kOne,     // every row goes to expert 0
  kCounts,  // SortArgs::counts
};
struct SortLaunch {
  int32_t experts = 0;  // SortArgs::experts
  int32_t slots = 0;    // capacity
  int32_t blocks = 1;   // SortBlocks of the two
  SortBy by = SortBy::kIds;
  bool operator==(const SortLaunch&) const = default;
};
// Sorts the call's slots by expert and lists the tiles: one kernel, or two for many slots.
// SortArgs::count has SortScratch elements for the capacity, and no more slots are sorted than that.
cudaError_t LaunchSort(const SortLaunch& launch, const SortArgs* args, cudaStream_t stream);

cudaError_t LaunchAbsMax(const AbsMaxArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream);

// Thread blocks that go through rows of which a call may have many fewer than its capacity (batched experts): at most so many.
inline constexpr int32_t kMostRowBlocks = 16384;

// How operand rows are made.
enum class StageBy : uint8_t {
  kValues,  // by any rule
  kCopies,  // rows of bf16 to which nothing is to be done but to move them, in pieces of 16 bytes; no order, no weights
  kGathers,  // the same by an order; at most kMostGathered elements
  // Bytes under dynamic float32 scales of kStagedGroup inputs, which divide the row; no order, weights, scatter or scales that span
  // rows; rows aligned to four elements.
  kGroups,
};
struct StageLaunch {
  int32_t rows = 0;  // capacity; 0: nothing to launch
  StageBy by = StageBy::kValues;
  int32_t cols = 0;  // of a row, of kGathers
  bool operator==(const StageLaunch&) const = default;
};
// One block of threads an operand row, or a few of kGathers.
cudaError_t LaunchStage(const StageLaunch& launch, const StageArgs* args, const SortArgs* sort, cudaStream_t stream);

// Which kernel makes a product.
enum class Product : uint8_t {
  kGeneric,  // gemm-inl.cuh
  kFewRows,  // few_rows-inl.cuh, for rows of one term with one scale at most
  kHopper,   // hopper-inl.cuh: wgmma, for the same rows
};

// What of a product's results is stored, which Hopper's own products must know when they are compiled.
enum class Results : uint8_t {
  kHidden,  // h as bf16 in panels
  kSums,    // sums as rows of bf16, of which a row has a multiple of 8
  kWords,   // either as rows of float32
};
constexpr Results ResultsOf(const GemmArgs& args) {
  return args.out != nullptr ? Results::kWords : args.epilogue == Epilogue::kGateUp ? Results::kHidden : Results::kSums;
}

// A product of all tiles with all row tiles of the weights. `terms`: Operand::terms, which fixes the shared memory.
struct GemmLaunch {
  Codes codes = Codes::kBf16;
  Product product = Product::kGeneric;
  int32_t tokens = 8;      // of kTileRowChoices, kFewRowsTileRowChoices or kHopperTiles; SortArgs::tile_rows
  int32_t terms = 1;
  bool powers = false;     // of kGeneric and kFewRows: scales are powers of two that multiply operands, ScalesArePowers
  bool bytes = false;      // bytes-inl.cuh: rows are OperandKind::kBytes
  int32_t slot_steps = 0;  // of such a product: ByteSlotSteps; of kFewRows: FewRowsSlotSteps
  bool rests = false;      // of kHopper: the tiles of the other list (SortArgs::rest_rows); follows the product of the first one
  int32_t tiles = 0;       // capacity
  int32_t row_tiles = 0;
  Results results = Results::kWords;  // of kHopper
  bool many = false;   // of kHopper: groups of inputs end within two blocks
  bool zeros = false;  // of kHopper and kFewRows: codes have zero points of their own
  int32_t ranges = 1;  // of kFewRows: that the inputs are cut into; above 1 GemmArgs::partials is used
  bool operator==(const GemmLaunch&) const = default;
};
cudaError_t LaunchGemm(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream);

cudaError_t LaunchActivate(const ActivateArgs* args, const SortArgs* sort, int32_t capacity, cudaStream_t stream);

cudaError_t LaunchCombine(const CombineArgs* args, int32_t capacity, int64_t cols, cudaStream_t stream);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_LAUNCH_H_
