// Random numbers come from a counter: the draw of element i is a hash of seed and i, so that any grid writes the same bytes.
#include "bench/gpu_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/number_formats.h"

namespace moed::bench {
namespace {

using cuda::Codes;

constexpr int kThreads = 256;
constexpr int kFillBlocks = 132 * 8;  // of a loop over everything: any number will do

// SplitMix64's finalizer over a counter.
__device__ uint64_t Hash(uint64_t seed, uint64_t at) {
  uint64_t z = seed + (at + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ float Uniform(uint32_t bits) { return (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f; }  // in (0, 1)

// Two independent Gaussian numbers (Box and Muller).
__device__ float2 Gaussians(uint64_t seed, uint64_t at) {
  const uint64_t bits = Hash(seed, at);
  const float radius = sqrtf(-2.0f * __logf(Uniform(static_cast<uint32_t>(bits))));
  float sine, cosine;
  __sincosf(6.2831853f * Uniform(static_cast<uint32_t>(bits >> 32)), &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

// The bits of the code of a number with standard deviation CodeDeviation, or of the number itself.
template <Codes kCodes>
__device__ uint32_t CodeOf(float x) {
  if constexpr (kCodes == Codes::kInt4) {
    return static_cast<uint32_t>(fminf(fmaxf(rintf(x), -7.0f), 7.0f) + 8.0f);
  } else if constexpr (kCodes == Codes::kInt8) {
    return static_cast<uint32_t>(fminf(fmaxf(rintf(x), -127.0f), 127.0f) + 128.0f);
  } else if constexpr (kCodes == Codes::kFp4) {
    return FloatToE2m1(x);
  } else if constexpr (kCodes == Codes::kFp8) {
    return FloatToE4m3(x);
  } else if constexpr (kCodes == Codes::kBf16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else if constexpr (kCodes == Codes::kF16) {
    return __half_as_ushort(__float2half_rn(x));
  } else {
    return __float_as_uint(x);
  }
}

// Each turn of the loop makes 16 bytes. Where in a tile a code lies does not matter to numbers that are all alike.
template <Codes kCodes>
__global__ void __launch_bounds__(kThreads) FillCodes(float deviation, uint64_t seed, uint4* out, int64_t chunks) {
  constexpr int kBits = BitsOf(kCodes), kPairs = 64 / kBits;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; chunk < chunks;
       chunk += static_cast<int64_t>(gridDim.x) * kThreads) {
    uint32_t words[4] = {};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float2 x = Gaussians(seed, static_cast<uint64_t>(chunk * kPairs + pair));
      const int bit = 2 * pair * kBits;  // of the 128
      words[bit / 32] |= CodeOf<kCodes>(x.x * deviation) << (bit % 32);
      words[(bit + kBits) / 32] |= CodeOf<kCodes>(x.y * deviation) << ((bit + kBits) % 32);
    }
    out[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <Codes kCodes>
cudaError_t FillCodesOf(float deviation, uint64_t seed, void* out, int64_t bytes, cudaStream_t stream) {
  FillCodes<kCodes><<<kFillBlocks, kThreads, 0, stream>>>(deviation, seed, static_cast<uint4*>(out), bytes / 16);
  return cudaGetLastError();
}

__device__ void StoreScale(ScaleType type, float scale, void* out, int64_t at) {
  switch (type) {
    case ScaleType::kNone: return;
    case ScaleType::kF32: static_cast<float*>(out)[at] = scale; return;
    case ScaleType::kBf16: static_cast<uint16_t*>(out)[at] = __bfloat16_as_ushort(__float2bfloat16_rn(scale)); return;
    case ScaleType::kF16: static_cast<uint16_t*>(out)[at] = __half_as_ushort(__float2half_rn(scale)); return;
    // The exponent of a normal float is E8M0's code.
    case ScaleType::kE8m0:
      static_cast<uint8_t*>(out)[at] = static_cast<uint8_t>((__float_as_uint(scale * 1.41421356f) >> 23) & 0xFF);
      return;
    case ScaleType::kE4m3: static_cast<uint8_t*>(out)[at] = FloatToE4m3(scale); return;
  }
}

__global__ void __launch_bounds__(kThreads) FillScales(ScaleType type, float center, uint64_t seed, void* out, int64_t count) {
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    const float part = Uniform(static_cast<uint32_t>(Hash(seed, static_cast<uint64_t>(at))));
    StoreScale(type, center * (0.75f + 0.5f * part), out, at);
  }
}

__global__ void __launch_bounds__(kThreads) FillFloats(float mean, float deviation, uint64_t seed, float* out, int64_t count) {
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    out[at] = mean + deviation * Gaussians(seed, static_cast<uint64_t>(at)).x;
  }
}

constexpr int kStreamThreads = 512;
constexpr int kStreamLoads = 8;  // in flight, of each thread

// The grid reads windows of kStreamLoads x its threads; what is left over is read piece by piece.
__global__ void __launch_bounds__(kStreamThreads) ReadStream(const uint4* data, int64_t chunks, uint32_t* sink) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kStreamThreads, window = threads * kStreamLoads;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  uint32_t mixed = 0;
  for (; at + (kStreamLoads - 1) * threads < chunks; at += window) {
    uint4 loaded[kStreamLoads];
#pragma unroll
    for (int i = 0; i < kStreamLoads; ++i) loaded[i] = __ldcs(data + at + i * threads);
#pragma unroll
    for (int i = 0; i < kStreamLoads; ++i) mixed ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  }
  for (; at < chunks; at += threads) {
    const uint4 loaded = __ldcs(data + at);
    mixed ^= loaded.x ^ loaded.y ^ loaded.z ^ loaded.w;
  }
  // Keeps the loads alive; one word of 2^32 would be written, harmlessly.
  if (mixed == 0x5EED1E55u) *sink = mixed;
}

__global__ void __launch_bounds__(kStreamThreads) CopyStream(const uint4* from, uint4* to, int64_t chunks) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kStreamThreads, window = threads * kStreamLoads;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  for (; at + (kStreamLoads - 1) * threads < chunks; at += window) {
    uint4 loaded[kStreamLoads];
#pragma unroll
    for (int i = 0; i < kStreamLoads; ++i) loaded[i] = __ldcs(from + at + i * threads);
#pragma unroll
    for (int i = 0; i < kStreamLoads; ++i) __stcs(to + at + i * threads, loaded[i]);
  }
  for (; at < chunks; at += threads) __stcs(to + at, __ldcs(from + at));
}

}  // namespace

cudaError_t LaunchFillCodes(Codes codes, float deviation, uint64_t seed, void* out, int64_t bytes, cudaStream_t stream) {
  const float of_codes = CodeDeviation(codes);
  switch (codes) {
    case Codes::kInt4: return FillCodesOf<Codes::kInt4>(of_codes, seed, out, bytes, stream);
    case Codes::kFp4: return FillCodesOf<Codes::kFp4>(of_codes, seed, out, bytes, stream);
    case Codes::kInt8: return FillCodesOf<Codes::kInt8>(of_codes, seed, out, bytes, stream);
    case Codes::kFp8: return FillCodesOf<Codes::kFp8>(of_codes, seed, out, bytes, stream);
    case Codes::kBf16: return FillCodesOf<Codes::kBf16>(deviation, seed, out, bytes, stream);
    case Codes::kF16: return FillCodesOf<Codes::kF16>(deviation, seed, out, bytes, stream);
    case Codes::kF32: return FillCodesOf<Codes::kF32>(deviation, seed, out, bytes, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchFillScales(ScaleType type, float center, uint64_t seed, void* out, int64_t count, cudaStream_t stream) {
  FillScales<<<kFillBlocks, kThreads, 0, stream>>>(type, center, seed, out, count);
  return cudaGetLastError();
}

cudaError_t LaunchFillFloats(float mean, float deviation, uint64_t seed, float* out, int64_t count, cudaStream_t stream) {
  FillFloats<<<kFillBlocks, kThreads, 0, stream>>>(mean, deviation, seed, out, count);
  return cudaGetLastError();
}

cudaError_t LaunchReadStream(const void* data, int64_t bytes, int blocks, uint32_t* sink, cudaStream_t stream) {
  ReadStream<<<blocks, kStreamThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sink);
  return cudaGetLastError();
}

cudaError_t LaunchCopyStream(const void* from, void* to, int64_t bytes, int blocks, cudaStream_t stream) {
  CopyStream<<<blocks, kStreamThreads, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
  return cudaGetLastError();
}

}  // namespace moed::bench
