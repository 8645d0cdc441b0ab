// Numbers that plans share with kernels and that need no CUDA.
#ifndef MOED_KERNELS_CUDA_CALL_SIZES_H_
#define MOED_KERNELS_CUDA_CALL_SIZES_H_

#include <cstddef>
#include <cstdint>

namespace moed::cuda {

inline constexpr size_t kArrayAlignment = 256;  // of arrays in device memory
inline constexpr size_t kTileBytes = 16;        // of a Tile
inline constexpr int64_t kMostSlots = int64_t{1} << 30;  // of a call, rows x top-k: their indices are 32 bits wide
// Inputs of a group whose codes a warp makes at once.
inline constexpr int kStagedGroup = 128;
// Elements of a row that is brought into an order by way of shared memory.
inline constexpr int64_t kMostGathered = 20480;
// The token sort: slots that are compared with each other; experts whose counts fit shared memory twice.
inline constexpr int32_t kFewSlots = 128;
inline constexpr int32_t kSharedExperts = 4096;
// Rows of a tile that the product exists for.
inline constexpr int kTileRowChoices[] = {8, 16, 32, 48, 64};
// The same of the product for few rows.
inline constexpr int kFewRowsTileRowChoices[] = {8, 16, 24, 32};
inline constexpr int kMostFewRowsOfBf16Tile = 16;  // of weights that are not codes
// Multiprocessors of an H200; the most tiles by row tiles whose inputs it cuts into ranges, since it counts for each how many are
// done; and thread blocks of all ranges.
inline constexpr int kProcessors = 132;
inline constexpr int kFewRowsCounters = 1536, kFewRowsBlocks = 3072;
// Tiles of Hopper's own products: rows, what a tile costs in the time of so many rows of a large one (docs/performance.md; 0:
// there is none), of codes that are decoded and of bf16 weights, and whether there is one for codes with zero points of their own.
struct HopperTile {
  int rows, codes, bf16;
  bool zeros;
};
inline constexpr HopperTile kHopperTiles[] = {
    {32, 64, 73, true},     {48, 71, 77, false},   {64, 86, 91, true},   {80, 96, 102, false}, {96, 107, 114, true},
    {112, 131, 131, false}, {144, 165, 165, true}, {160, 0, 180, false}, {256, 262, 0, true},
};
// Decoded weights of Hopper's products are divided by 2 to this (decode_scaled-inl.cuh), which leaves room for scales up to
// kMostLifted.
inline constexpr int kLift = 24;
inline constexpr float kMostLifted = 131072.0f;
// ZeroPointOffset up to which rounding such weights keeps rows within the bound of 16-bit activations: with zero points anywhere,
// 0.5, some were 1.5 % off.
inline constexpr double kMostZeroOffset = 0.375;
// What is won by a second list of tiles for the rests at least, for its launches' sake.
inline constexpr double kRestsGain = 0.04;
// Which of them can store float32, for layers that need it.
constexpr bool HopperHasWords(int rows) { return rows == 32 || rows == 80 || rows == 144; }
// The most of the former for rows of several terms.
inline constexpr int kMostTermRows = 32;

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CALL_SIZES_H_
