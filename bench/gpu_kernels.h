// Kernels of the GPU benchmark as plain declarations: random numbers in the formats of packed layers, and the streams that measure
// what the memory gives. Pointers are the device's; launches are asynchronous and return what the launch says.
#ifndef MOED_BENCH_GPU_KERNELS_H_
#define MOED_BENCH_GPU_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/packed_layout.h"
#include "kernels/quant.h"

namespace moed::bench {

// Fills `bytes`, a multiple of 16, with codes of Gaussian numbers. Codes of quantized formats are what a quantizer makes of a group
// whose largest magnitude is three standard deviations: CodeDeviation in units of a code's value, the tails at the largest code,
// never NaN. bf16, f16 and f32 have the standard deviation `deviation`.
cudaError_t LaunchFillCodes(cuda::Codes codes, float deviation, uint64_t seed, void* out, int64_t bytes, cudaStream_t stream);

// The standard deviation of the values of quantized codes (minus the middle code 8 or 128 of integers); 1 for others.
constexpr float CodeDeviation(cuda::Codes codes) {
  switch (codes) {
    case cuda::Codes::kInt4: return 7.0f / 3;
    case cuda::Codes::kInt8: return 127.0f / 3;
    case cuda::Codes::kFp4: return 6.0f / 3;
    case cuda::Codes::kFp8: return 448.0f / 3;
    default: return 1.0f;
  }
}

// Fills `count` scales of `type` with numbers from 3/4 to 5/4 of `center`, or the powers of two next to those.
cudaError_t LaunchFillScales(ScaleType type, float center, uint64_t seed, void* out, int64_t count, cudaStream_t stream);

// Fills `count` floats with Gaussian numbers.
cudaError_t LaunchFillFloats(float mean, float deviation, uint64_t seed, float* out, int64_t count, cudaStream_t stream);

// Reads `bytes`, a multiple of 16, once, in `blocks` thread blocks; `sink` is 4 bytes that nothing is written to in practice.
cudaError_t LaunchReadStream(const void* data, int64_t bytes, int blocks, uint32_t* sink, cudaStream_t stream);
// Copies `bytes`, a multiple of 16.
cudaError_t LaunchCopyStream(const void* from, void* to, int64_t bytes, int blocks, cudaStream_t stream);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_KERNELS_H_
