// What the product for few rows (few_rows-inl.cuh) reads: pieces of weights in a ring and slabs of rows and scales, all in shared
// memory; and how a piece becomes the tensor cores' operand.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_SLAB_INL_CUH_

#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// A piece is a chunk of both halves; pieces of a row tile follow each other in memory.
constexpr int kPieceBytes = 2 * kTileThreads * kChunkBytes;
constexpr int kRing = 6;  // pieces that a thread has under way

// 16 bytes, in order with copies to the same place.
__device__ inline uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// c[16 x 8] = a[16 x 16] b[16 x 8].
__device__ inline void MultiplyFresh(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// As DecodeNibbles of FP4 codes. One multiplication moves a nibble to two places, its sign to the top of its half and its other
// bits to where they belong; what else it moves lies apart, and is masked.
__device__ inline uint32_t DecodeFp4(uint32_t word, int reg) {
  const uint32_t low = reg < 2 ? word : word >> 8;
  const uint32_t moved = reg % 2 == 0 ? (low & 0x000F000Fu) * 0x1040u : (low & 0x00F000F0u) * 0x0104u;
  return MultiplyPair(moved & 0x81C081C0u, 0x7E807E80u);
}

// Register `reg` of step `step` of a chunk: the weight's code, less the middle of integers.
template <Codes kCodes>
__device__ inline uint32_t DecodeSymmetric(const uint4& chunk, int step, int reg) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (kCodes == Codes::kInt4) {
    return DecodeNibbles<kCodes, true>(words[step], reg, 0x43084308u);  // 128 + 8
  } else if constexpr (kCodes == Codes::kFp4) {
    return DecodeFp4(words[step], reg);
  } else if constexpr (kCodes == Codes::kInt8) {
    const uint32_t word = words[step * 2 + reg / 2];
    return BytesMinus128(reg % 2 == 0 ? word : word >> 8);
  } else if constexpr (BitsOf(kCodes) == 8) {
    return DecodeBytes<kCodes, true>(make_uint2(words[step * 2], words[step * 2 + 1]), reg, 0);
  } else {
    return words[reg];
  }
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
