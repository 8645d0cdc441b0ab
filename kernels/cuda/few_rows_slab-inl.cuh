// What the product for few rows (few_rows-inl.cuh) reads: pieces of weights in a ring and slabs of rows and scales, all in shared
// memory; and how a piece becomes the tensor cores' operand.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_

#include "kernels/cuda/decode_scaled-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// A piece is a chunk of both halves; pieces of a row tile follow each other in memory.
constexpr int kPieceBytes = 2 * kTileThreads * kChunkBytes;
constexpr int kRing = 4;  // pieces that a thread has under way, which divides those of a slab

// c[16 x 8] = a[16 x 16] b[16 x 8].
__device__ inline void MultiplyFresh(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// A shared address that the compiler must keep: else it makes it anew, by a read of a special register, wherever it is used.
__device__ inline uint32_t KeptAddress(const void* shared) {
  uint32_t kept;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(kept) : "r"(SharedAddress(shared)));
  return kept;
}

// Shared memory: the ring, slabs of rows, then the scales of two passes as floats, each with its zero points as ZeroTerm gives
// them.
template <int kTokens, int kSlotSteps, bool kZeros>
struct SlabLayout {
  static constexpr int kSlabBlocks = 4;  // blocks of 64 inputs
  static constexpr int kSlots = kSlotSteps > 0 ? kSlabBlocks * kSteps / kSlotSteps : 0;
  // One in use, the others on their way. More would cost thread blocks where rows or scales are many.
  static constexpr int kSlabCount = kTokens <= 16 && kSlots <= kSlabBlocks ? 3 : 2;
  // 16 bytes more than a slab has: eight rows' pieces of 16 bytes then lie in different banks.
  static constexpr int kRowBytes = kSlabBlocks * kBlockDepth * 2 + 16;
  static constexpr int kRows = kTokens * kRowBytes;
  static constexpr int kPassed = kSlots > 0 && kSlots < 4 ? 4 / kSlots : 1;  // slabs whose scales are passed on together
  static constexpr int kScaleCount = kPassed * kSlots * kTileRows;
  static constexpr int kSlabs = kRing * kPieceBytes;
  static constexpr int kZeroTerms = kScaleCount * 4;  // behind a pass's scales
  static constexpr int kScaleBytes = (kZeros ? 2 : 1) * kScaleCount * 4;
  static constexpr int kScales = kSlabs + kSlabCount * kRows;
  static constexpr int kBytes = kScales + 2 * kScaleBytes;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_
