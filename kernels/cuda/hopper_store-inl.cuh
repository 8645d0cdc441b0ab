// The end of Hopper's products (hopper-inl.cuh): sums as rows, and h as the next product's panels, by way of shared memory.
//
// The tensor cores leave a row spread over threads that have two features each. So a warpgroup puts kChunk rows of its results at a
// time into shared memory, in the order of the output (stmatrix transposes), and copies them from there in whole lines. A kernel
// has one kind of results: every step is unrolled over the registers of the sums, and code that the instruction cache does not hold
// costs more than what it does.
#ifndef MOED_KERNELS_CUDA_HOPPER_STORE_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_STORE_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/hopper_ring-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wgmma-inl.cuh"

namespace moed::cuda {

// The results of one warpgroup for a piece of work: of both halves of a row tile, or of one (`Layout`: HopperLayout). Where two
// warpgroups have a half each, both share the lines of h, and so the first one's place in shared memory.
template <typename Layout, Results kResults>
class StagedStore {
 public:
  static constexpr int kTokens = Layout::kTokens, kHalves = Layout::kHalves, kChunk = Layout::kChunk;

  // `staging`: shared address of the Layout::kStagingBytes of warpgroup `group`.
  __device__ StagedStore(const GemmArgs& args, const Tile& tile, int row_tile, int group, uint32_t staging)
      : args_(args),
        tile_(tile),
        row_tile_(row_tile),
        first_half_(group * kHalves % 2),
        features_(args.weights.rows),
        gated_(args.epilogue == Epilogue::kGateUp),
        barrier_(kShared ? 1 : 1 + group),
        staging_(staging - (kShared ? first_half_ * Layout::kStagingBytes : 0)) {}

  // sum(half, column, at): of the thread (warp w, lane 4 g + t), feature 16 w + g + 8 (at / 2) of one of the warpgroup's halves and
  // row 8 column + 2 t + at % 2 of the tile. To be called by all threads of the warpgroup, and of the other one of its row tile.
  template <typename Sum>
  __device__ void Store(const Sum& sum) const {
    const SigmoidForm form(args_.activation);
#pragma unroll
    for (int first = 0; first < kTokens; first += kChunk) {
      if (first >= tile_.count) break;
      Meet();  // what was there has been copied
      if constexpr (kResults == Results::kHidden) PutHidden(sum, form, first / 8);
      if constexpr (kResults == Results::kSums) PutSums(sum, first / 8);
      if constexpr (kResults == Results::kWords) PutWords(sum, form, first / 8);
      Meet();
      if constexpr (kResults == Results::kWords) {
        CopyWords(first);
      } else {
        CopyPieces(first);
      }
    }
  }

 private:
  static constexpr bool kShared = kHalves == 1 && kResults == Results::kHidden;
  static constexpr int kThreads = kShared ? 2 * kTileThreads : kTileThreads;
  // A line of 16-bit elements: 64 inputs of the next product, in a panel's order, or the features of a row.
  static constexpr int kPieces = kResults == Results::kHidden ? 8 : kHalves * 8;
  static constexpr int kPitch = kResults == Results::kHidden ? 128 : kPieces * 16 + 16;

  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int Thread() { return threadIdx.x % kTileThreads; }
  __device__ static int Warp() { return Thread() / 32; }
  // Columns of a chunk that begins with `column`.
  __device__ static constexpr int ColumnsFrom(int column) { return min(kChunk / 8, kTokens / 8 - column); }

  __device__ void Meet() const { SyncThreads<kThreads>(barrier_); }

  // Matrices of 8 features and 8 rows: two of features, 8 apart, for each of two columns.
  template <typename Sum>
  __device__ void PutSums(const Sum& sum, int column) const {
    const uint32_t to = staging_ + (Lane() % 8 + Lane() / 16 * 8) * kPitch + (2 * Warp() + Lane() / 8 % 2) * 16;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int c = 0; c < ColumnsFrom(column); c += 2) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pair[i] = PackBf16(sum(half, column + c + i / 2, i % 2 * 2), sum(half, column + c + i / 2, i % 2 * 2 + 1));
        StoreTransposed(to + c * 8 * kPitch + half * kHalfRows * 2, pair);
      }
    }
  }

  // h of a paired row tile is one block of the next product's inputs: 64 features, 128 bytes a row. A thread has feature 8 w + g of
  // half 0 and 32 more of half 1, so a warp has one piece of 16 bytes of each half.
  template <typename Sum>
  __device__ void PutHidden(const Sum& sum, const SigmoidForm& form, int column) const {
    constexpr int kAtOnce = 4 / kHalves;  // columns
    const int half_of = kHalves == 2 ? Lane() / 8 % 2 : first_half_, column_of = kHalves == 2 ? Lane() / 16 : Lane() / 8;
    const uint32_t to = staging_ + (Lane() % 8 + column_of * 8) * kPitch + ((Warp() + 4 * half_of) ^ (Lane() % 8)) * 16;
#pragma unroll
    for (int c = 0; c < ColumnsFrom(column); c += kAtOnce) {
      uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % kHalves, at = min(column + c + i / kHalves, kTokens / 8 - 1);
        pair[i] = PackBf16(Hidden(sum, form, half, at, 0), Hidden(sum, form, half, at, 1)) & Mask(half);
      }
      StoreTransposed(to + c * 8 * kPitch, pair);
    }
  }

  template <typename Sum>
  __device__ static float Hidden(const Sum& sum, const SigmoidForm& form, int half, int column, int odd) {
    return form(sum(half, column, odd), sum(half, column, 2 + odd));
  }

  // Of the thread's feature of h: 0 beyond the intermediate size.
  __device__ uint32_t Mask(int half) const {
    const int feature = row_tile_ * kHalfRows + (first_half_ + half) * (kHalfRows / 2) + Warp() * 8 + Lane() / 4;
    return feature < features_ ? ~0u : 0;
  }

  // Lines, 16 bytes a thread. A tile's first row has a rank that is a multiple of 8, so panels have the pieces as they lie here.
  __device__ void CopyPieces(int first) const {
    const int64_t stride = kResults == Results::kHidden ? kBlockDepth : args_.out_stride;
    const int thread = Thread() + (kShared ? first_half_ * kTileThreads : 0), piece = thread % kPieces;
    uint16_t* out = args_.out_bf16 + (tile_.begin + first) * stride;
    if constexpr (kResults == Results::kHidden) {
      out += row_tile_ * args_.out_panel_stride;
    } else {
      const int feature = row_tile_ * kTileRows + first_half_ * kHalfRows;
      if (feature + piece * 8 >= args_.out_stride) return;
      out += feature;
    }
    const int rows = min(kChunk, tile_.count - first);
#pragma unroll
    for (int i = 0; i < kChunk * kPieces / kThreads; ++i) {
      const int row = i * (kThreads / kPieces) + thread / kPieces;
      if (row >= rows) continue;
      *reinterpret_cast<uint4*>(out + row * stride + piece * 8) = LoadShared16(staging_ + row * kPitch + piece * 16);
    }
  }

  // Sums or h as float32.
  __device__ int Features() const { return kHalves * (gated_ ? kHalfRows / 2 : kHalfRows); }
  __device__ int WordPitch() const { return Features() * 4 + 16; }

  template <typename Sum>
  __device__ void PutWords(const Sum& sum, const SigmoidForm& form, int column) const {
    const int pitch = WordPitch();
    const uint32_t to = staging_ + Lane() % 4 * 2 * pitch + (Warp() * (gated_ ? 8 : 16) + Lane() / 4) * 4;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int c = 0; c < ColumnsFrom(column); ++c) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t row = to + (c * 8 + odd) * pitch + half * (gated_ ? kHalfRows / 2 : kHalfRows) * 4;
          if (gated_) {
            StoreShared4(row, __float_as_uint(Hidden(sum, form, half, column + c, odd)) & Mask(half));
          } else {
            StoreShared4(row, __float_as_uint(sum(half, column + c, odd)));
            StoreShared4(row + 32, __float_as_uint(sum(half, column + c, 2 + odd)));
          }
        }
      }
    }
  }

  __device__ void CopyWords(int first) const {
    const int features = Features(), shift = 31 - __clz(features), rows = min(kChunk, tile_.count - first);
    const int feature = row_tile_ * (gated_ ? kHalfRows : kTileRows) + first_half_ * features;
    float* out = args_.out + (tile_.begin + first) * args_.out_stride + feature;
#pragma unroll 1
    for (int i = Thread(); i < rows << shift; i += kTileThreads) {
      const int row = i >> shift, at = i & (features - 1);
      if (feature + at < args_.out_stride) out[row * args_.out_stride + at] = LoadShared4(staging_ + row * WordPitch() + at * 4);
    }
  }

  const GemmArgs& args_;
  const Tile& tile_;
  const int row_tile_, first_half_, features_;
  const bool gated_;
  const int barrier_;
  const uint32_t staging_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_STORE_INL_CUH_
