// What the product for few rows (few_rows-inl.cuh) reads: pieces of weights in a ring and slabs of rows and scales, all in shared
// memory; and how a piece becomes the tensor cores' operand.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_

#include "kernels/cuda/decode_symmetric-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// A piece is a chunk of both halves; pieces of a row tile follow each other in memory.
constexpr int kPieceBytes = 2 * kTileThreads * kChunkBytes;
constexpr int kRing = 6;  // pieces that a thread has under way

// c[16 x 8] = a[16 x 16] b[16 x 8].
__device__ inline void MultiplyFresh(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Shared memory: the ring, slabs of rows, then a slab's scales as floats, and slabs of them as they are stored.
template <int kTokens, int kSlots>
struct SlabLayout {
  static constexpr int kSlabBlocks = 4;  // blocks of 64 inputs
  // One in use, the others on their way. More would cost thread blocks where rows or scales are many.
  static constexpr int kSlabCount = kTokens <= 16 && kSlots <= 1 ? 3 : 2;
  // 16 bytes more than a slab has: eight rows' pieces of 16 bytes then lie in different banks.
  static constexpr int kRowBytes = kSlabBlocks * kBlockDepth * 2 + 16;
  static constexpr int kRows = kTokens * kRowBytes;
  static constexpr int kScaleCount = kSlabBlocks * kSlots * kTileRows;
  static constexpr int kSlabs = kRing * kPieceBytes;
  static constexpr int kScales = kSlabs + kSlabCount * kRows;
  static constexpr int kStored = kScales + kScaleCount * 4;
  __host__ __device__ static int Bytes(int scale_bytes) { return kStored + (kSlabCount - 1) * kScaleCount * scale_bytes; }
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_
