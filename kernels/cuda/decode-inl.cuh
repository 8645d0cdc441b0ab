// Chunks of packed weights to operands of the tensor cores (packed_layout.h has the bits): codes minus their zero point, or the
// values of float formats, as one, two or three bf16 numbers whose sum is exact.
#ifndef MOED_KERNELS_CUDA_DECODE_INL_CUH_
#define MOED_KERNELS_CUDA_DECODE_INL_CUH_

#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// bf16 numbers whose sum is a weight: f16 has 11 significant bits, f32 has 24, all the others at most 8.
constexpr int WeightTerms(Codes codes) { return codes == Codes::kF32 ? 3 : codes == Codes::kF16 ? 2 : 1; }

// The registers of one step: [term][register].
template <Codes kCodes>
using Fragment = uint32_t[WeightTerms(kCodes)][4];

// Subtracts or scales both bf16 of a word.
__device__ inline uint32_t SubtractPair(uint32_t a, uint32_t b) {
  const __nv_bfloat162 r = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  const __nv_bfloat162 r = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}

// Splits two floats into bf16 terms: each takes what the earlier ones left. All 24 bits of a float are in three terms.
template <int kTerms>
__device__ inline void SplitPair(float low, float high, uint32_t (&out)[kTerms]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    out[term] = *reinterpret_cast<const uint32_t*>(&pair);
    low -= __low2float(pair);
    high -= __high2float(pair);
  }
}

// (a & mask) | bits in one instruction. In plain C++ the compiler makes two of it, since it encodes one constant in each.
template <uint32_t kMask, uint32_t kBits>
__device__ inline uint32_t MaskOr(uint32_t a) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "n"(kMask), "n"(kBits));
  return r;
}
// (~a & mask) | bits.
template <uint32_t kMask, uint32_t kBits>
__device__ inline uint32_t InverseMaskOr(uint32_t a) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(r) : "r"(a), "n"(kMask), "n"(kBits));
  return r;
}

// The low byte of each half of `bytes`, minus 128, as a pair of bf16: its seven low bits under 128's exponent are 128 + low; its
// top bit, inverted, under the same exponent makes 256 of 128. All of it is exact.
__device__ inline uint32_t BytesMinus128(uint32_t bytes) {
  return SubtractPair(MaskOr<0x007F007Fu, 0x43004300u>(bytes), InverseMaskOr<0x00800080u, 0x43004300u>(bytes));
}

// 2 to this is what the bits of a float code, moved to the place of bf16's exponent and mantissa, are multiplied by to be the
// code's value: the bias goes from 127 to E2M1's 1 or E4M3's 7, for subnormal codes as well.
constexpr int BiasPower(Codes codes) { return codes == Codes::kFp4 ? 126 : 120; }

// Register `reg` of a 4-bit step's word. `zero`: 128 + zero point, twice, for the register's row. Floats are not yet multiplied by
// their BiasPower when `kMoved` is false.
template <Codes kCodes, bool kMoved>
__device__ inline uint32_t DecodeNibbles(uint32_t word, int reg, uint32_t zero) {
  if constexpr (kCodes == Codes::kInt4) {
    // Mantissas of 128 + code; the difference is exact.
    return SubtractPair(MaskOr<0x000F000Fu, 0x43004300u>(word >> (4 * reg)), zero);
  } else {
    // E2M1's exponent and mantissa become the low bits of bf16's exponent and the top of its mantissa.
    const uint32_t top = word << (12 - 4 * reg), bits = (top & 0x80008000u) | ((top >> 6) & 0x01C001C0u);
    return kMoved ? MultiplyPair(bits, 0x7E807E80u) : bits;
  }
}

// Register `reg` of an 8-bit step's words. `zero`: zero point - 128, twice, for the register's row. `kMoved` as above.
template <Codes kCodes, bool kMoved>
__device__ inline uint32_t DecodeBytes(uint2 step, int reg, uint32_t zero) {
  const uint32_t word = reg < 2 ? step.x : step.y;
  if constexpr (kCodes == Codes::kInt8) {
    return SubtractPair(BytesMinus128(reg % 2 == 0 ? word : word >> 8), zero);
  } else {
    // As E2M1. NaN codes are refused when packing.
    const uint32_t top = reg % 2 == 0 ? word << 8 : word, bits = (top & 0x80008000u) | ((top >> 4) & 0x07F007F0u);
    return kMoved ? MultiplyPair(bits, 0x7B807B80u) : bits;
  }
}

// The chunks of one half in a step, as loaded from shared memory.
template <Codes kCodes>
struct ChunkReader {
  static constexpr int kStepsPerChunk = BitsOf(kCodes) <= 16 ? 16 / BitsOf(kCodes) : 1;
  static constexpr int kChunksPerStep = BitsOf(kCodes) == 32 ? 2 : 1;
  uint4 chunk[kChunksPerStep];

  // To be called for the steps of a block in turn; `weights`: this thread's chunk 0 of half 0 in the block.
  __device__ void Load(const uint8_t* weights, int half, int step) {
    if (step % kStepsPerChunk != 0) return;
#pragma unroll
    for (int c = 0; c < kChunksPerStep; ++c) {
      const int at = step * kChunksPerStep / kStepsPerChunk + c;
      chunk[c] = *reinterpret_cast<const uint4*>(weights + (at * 2 + half) * kTileThreads * kChunkBytes);
    }
  }

  __device__ uint32_t Word(int at) const {
    const uint4& c = chunk[at / 4];
    return at % 4 == 0 ? c.x : at % 4 == 1 ? c.y : at % 4 == 2 ? c.z : c.w;
  }

  // `zero`: of the thread's two rows, as ZeroOperand gives it; unused by floats.
  template <bool kMoved = true>
  __device__ void Decode(int step, const uint32_t (&zero)[2], Fragment<kCodes>& out) const {
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
      if constexpr (BitsOf(kCodes) == 4) {
        out[0][reg] = DecodeNibbles<kCodes, kMoved>(Word(step), reg, zero[reg % 2]);
      } else if constexpr (BitsOf(kCodes) == 8) {
        const int first = step % 2 * 2;
        out[0][reg] = DecodeBytes<kCodes, kMoved>(make_uint2(Word(first), Word(first + 1)), reg, zero[reg % 2]);
      } else if constexpr (kCodes == Codes::kBf16) {
        out[0][reg] = Word(reg);
      } else {
        DecodeWide(reg, out);
      }
    }
  }

 private:
  __device__ void DecodeWide(int reg, Fragment<kCodes>& out) const {
    constexpr int kTerms = WeightTerms(kCodes);
    float low, high;
    if constexpr (kCodes == Codes::kF16) {
      const uint32_t word = Word(reg);
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      low = pair.x, high = pair.y;
    } else {
      low = Bits(Word(2 * reg)), high = Bits(Word(2 * reg + 1));
    }
    uint32_t terms[kTerms];
    SplitPair<kTerms>(low, high, terms);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) out[term][reg] = terms[term];
  }
};

// A zero point as ChunkReader::Decode wants it.
template <Codes kCodes>
__device__ inline uint32_t ZeroOperand(int zero) {
  if constexpr (kCodes == Codes::kInt4) return (0x4300u | static_cast<uint32_t>(zero)) * 0x00010001u;
  return BytesMinus128(static_cast<uint32_t>(zero) * 0x00010001u);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_DECODE_INL_CUH_
