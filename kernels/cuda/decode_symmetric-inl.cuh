// Chunks of packed weights to one bf16 operand, for codes without zero points: as decode-inl.cuh, with what is known of them used.
#ifndef MOED_KERNELS_CUDA_DECODE_SYMMETRIC_INL_CUH_
#define MOED_KERNELS_CUDA_DECODE_SYMMETRIC_INL_CUH_

#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

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

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_DECODE_SYMMETRIC_INL_CUH_
