// Device code that several kernels share: conversions, copies to shared memory, matrix loads and products.
#ifndef MOED_KERNELS_CUDA_DEVICE_INL_CUH_
#define MOED_KERNELS_CUDA_DEVICE_INL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/number_formats.h"
#include "kernels/quant.h"
#include "kernels/tensor.h"

namespace moed::cuda {

__device__ inline float Bits(uint32_t bits) { return __uint_as_float(bits); }

// Element `at` of `x`.
__device__ inline float LoadElement(const void* x, DType dtype, int64_t at) {
  if (dtype == DType::kF32) return static_cast<const float*>(x)[at];
  if (dtype == DType::kF16) return __half2float(static_cast<const __half*>(x)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
}

__device__ inline void StoreElement(void* x, DType dtype, int64_t at, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(x)[at] = value;
  } else if (dtype == DType::kF16) {
    static_cast<__half*>(x)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(x)[at] = __float2bfloat16_rn(value);
  }
}

// E8m0ToFloat and E4m3ToFloat without branches: the exponent is moved in place, and a product moves its bias.
__device__ inline float FastE8m0(uint32_t byte) {
  return byte == 0 ? Bits(0x00400000u) : byte == 255 ? Bits(0x7FC00000u) : Bits(byte << 23);
}
__device__ inline float FastE4m3(uint32_t byte) {
  const float magnitude = Bits((byte & 0x7F) << 20) * 0x1p120f;
  const float value = (byte & 0x7F) == 0x7F ? Bits(0x7FC00000u) : magnitude;
  return (byte & 0x80) != 0 ? -value : value;
}

// body(decode) with decode(scales, at): scale `at` of an array of `type`. One branch for all that the body reads.
template <typename Body>
__device__ inline void WithScale(ScaleType type, const Body& body) {
  switch (type) {
    case ScaleType::kNone: return body([](const uint8_t*, int) { return 1.0f; });
    case ScaleType::kF32: return body([](const uint8_t* scales, int at) { return reinterpret_cast<const float*>(scales)[at]; });
    case ScaleType::kBf16:
      return body([](const uint8_t* scales, int at) { return Bf16ToFloat(reinterpret_cast<const uint16_t*>(scales)[at]); });
    case ScaleType::kF16:
      return body([](const uint8_t* scales, int at) { return __half2float(reinterpret_cast<const __half*>(scales)[at]); });
    case ScaleType::kE8m0: return body([](const uint8_t* scales, int at) { return FastE8m0(scales[at]); });
    case ScaleType::kE4m3: return body([](const uint8_t* scales, int at) { return FastE4m3(scales[at]); });
  }
}

// body(decode) with decode(bits, i): scale `i` of four that LoadFour loaded.
template <typename Body>
__device__ inline void WithFourScales(ScaleType type, const Body& body) {
  switch (type) {
    case ScaleType::kNone: return body([](const uint32_t (&)[4], int) { return 1.0f; });
    case ScaleType::kF32: return body([](const uint32_t (&bits)[4], int i) { return Bits(bits[i]); });
    case ScaleType::kBf16:
      return body(
          [](const uint32_t (&bits)[4], int i) { return Bits(i % 2 == 0 ? bits[i / 2] << 16 : bits[i / 2] & 0xFFFF0000u); });
    case ScaleType::kF16:
      return body([](const uint32_t (&bits)[4], int i) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? bits[i / 2] & 0xFFFFu : bits[i / 2] >> 16)));
      });
    case ScaleType::kE8m0: return body([](const uint32_t (&bits)[4], int i) { return FastE8m0(bits[0] >> (8 * i) & 0xFFu); });
    case ScaleType::kE4m3: return body([](const uint32_t (&bits)[4], int i) { return FastE4m3(bits[0] >> (8 * i) & 0xFFu); });
  }
}
// Bytes of a scale of `type`.
__device__ inline int ScaleBytesOf(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kE8m0 || type == ScaleType::kE4m3 ? 1 : 2;
}

// Four neighbours of `bytes` each, as they lie, from where a multiple of 4 bytes begins. Without branches, and no register is
// loaded by two instructions: behind either the compiler would wait for what was loaded.
__device__ inline void LoadFour(const uint8_t* from, int bytes, uint32_t (&bits)[4]) {
  asm volatile("{\n"
               " .reg .pred two, four;\n"
               " setp.ge.s32 two, %5, 2;\n"
               " setp.ge.s32 four, %5, 4;\n"
               " ld.global.nc.u32 %0, [%4];\n"
               " @two ld.global.nc.u32 %1, [%4+4];\n"
               " @four ld.global.nc.v2.u32 {%2,%3}, [%4+8];\n"
               "}\n"
               : "=r"(bits[0]), "+r"(bits[1]), "+r"(bits[2]), "+r"(bits[3])
               : "l"(from), "r"(bytes));
}

__device__ inline void StoreShared4(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(v) : "memory");
}

__device__ inline void StoreShared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// 16 bytes, in order with copies to the same place.
__device__ inline uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// Where input `at` of an operand's row lies, in elements (Operand in call_block.h): in a row, or in panels with the row's rank.
__device__ inline int64_t OperandAt(int64_t row_stride, int64_t panel_stride, int64_t row, int rank, int64_t at) {
  if (panel_stride == 0) return row * row_stride + at;
  const int in_block = static_cast<int>(at % 64);
  return at / 64 * panel_stride + row * 64 + ((in_block / 8) ^ (rank % 8)) * 8 + in_block % 8;
}

__device__ inline uint32_t SharedAddress(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory, past L1; `valid` false writes zeros and reads nothing.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0));
}
__device__ inline void CopyAsync4(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0));
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;\n"); }
template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ inline void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadMatrix2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8], bf16 in, float32 sums.
__device__ inline void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_DEVICE_INL_CUH_
