// What all products do with their sums: row scales, biases, the gated activation, and stores. Shared by the kernels whose sums lie
// as the tensor cores leave them: thread (warp w, lane 4 g + t) has features 16 w + g and 16 w + g + 8 of a half, in a paired
// matrix gate and up of feature 8 w + g, and of each tile of 8 rows the rows 2 t and 2 t + 1.
#ifndef MOED_KERNELS_CUDA_EPILOGUE_INL_CUH_
#define MOED_KERNELS_CUDA_EPILOGUE_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/packed_layout.h"

namespace moed::cuda {

// Denormal numbers count as 0 where that changes nothing that is seen: e^x beside 1, and 1 / x of more than 10^37.
__device__ inline float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float PowerOfTwo(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// NaN where either is.
__device__ inline float Least(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ inline float Most(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// silu and gpt-oss's swiglu in one formula: h = (u + offset) * g * sigmoid(alpha * g), clamped first.
struct SigmoidForm {
  float exponent, offset, limit;  // of 2 for each g: -alpha / ln 2

  __device__ explicit SigmoidForm(const Activation& activation)
      : exponent((activation.kind == Activation::Kind::kSwigluOai ? activation.alpha : 1.0f) * -1.4426950408889634f),
        offset(activation.kind == Activation::Kind::kSwigluOai ? 1.0f : 0.0f),
        limit(activation.clamped ? activation.limit : Bits(0x7F800000u)) {}

  // The errors of ex2 and rcp are some 1e-6 together.
  __device__ float operator()(float gate, float up) const {
    gate = Least(gate, limit);
    up = Most(Least(up, limit), -limit);
    return (up + offset) * (gate * Reciprocal(1.0f + PowerOfTwo(exponent * gate)));
  }
};

// One thread's part of a tile's results.
class TileStore {
 public:
  // `thread` of 128. rows[r]: row of x of the tile's row r; null where x lies by sorted row.
  __device__ TileStore(const GemmArgs& args, const Tile& tile, int64_t row_tile, int thread, const int* rows)
      : args_(args),
        tile_(tile),
        row_tile_(row_tile),
        rows_(rows),
        in_half_(thread / 32 * 16 + thread % 32 / 4),
        row_(thread % 4 * 2) {
    bias_ = args.weights.bias;
    if (bias_ != nullptr) bias_ += tile.expert * args.weights.bias_stride + row_tile * kTileRows + in_half_;
    scaled_ = args.x.scales != nullptr && args.x.scale_steps == 0;
  }

  // sum(half, column, at): of feature 16 w + g + 8 (at / 2) of a half and row 8 column + 2 t + at % 2.
  template <int kColumns, typename Sum>
  __device__ void Store(const Sum& sum) const {
    if (args_.epilogue == Epilogue::kStore) {
#pragma unroll
      for (int half = 0; half < 2; ++half) StoreSums<kColumns>(sum, half);
    } else {
      const SigmoidForm form(args_.activation);
#pragma unroll
      for (int half = 0; half < 2; ++half) StoreGated<kColumns>(sum, form, half);
    }
  }

 private:
  __device__ float Bias(int half, int second) const { return bias_ != nullptr ? bias_[half * kHalfRows + second * 8] : 0.0f; }

  __device__ float RowScale(int row) const {
    if (!scaled_ || row >= tile_.count) return 1.0f;
    const int64_t x_row = rows_ != nullptr ? rows_[row] : tile_.begin + row;
    return args_.x.scales[x_row * args_.x.scale_stride];
  }

  template <int kColumns, typename Sum>
  __device__ void StoreSums(const Sum& sum, int half) const {
    const int64_t feature = row_tile_ * kTileRows + half * kHalfRows + in_half_;
    float* out = args_.out + (tile_.begin + row_) * args_.out_stride + feature;
    const float bias[2] = {Bias(half, 0), Bias(half, 1)};
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = column * 8 + row_ + odd;
        const float scale = RowScale(row);
        if (row < tile_.count) {
#pragma unroll
          for (int second = 0; second < 2; ++second) {
            if (feature + second * 8 < args_.out_stride)
              out[odd * args_.out_stride + second * 8] = sum(half, column, 2 * second + odd) * scale + bias[second];
          }
        }
      }
      out += 8 * args_.out_stride;
    }
  }

  template <int kColumns, typename Sum>
  __device__ void StoreGated(const Sum& sum, const SigmoidForm& form, int half) const {
    const int64_t feature = row_tile_ * kHalfRows + half * (kHalfRows / 2) + in_half_ / 16 * 8 + in_half_ % 8;
    const float bias[2] = {Bias(half, 0), Bias(half, 1)};
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      float h[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float scale = RowScale(column * 8 + row_ + odd);
        h[odd] = form(sum(half, column, odd) * scale + bias[0], sum(half, column, 2 + odd) * scale + bias[1]);
      }
      StorePair(column * 8, feature, h);
    }
  }

  // h of two neighbouring rows at one feature. As bf16, neighbouring features are exchanged first, so that stores are of 4 bytes:
  // the even feature's thread stores the even row. All threads of the warp take part.
  __device__ void StorePair(int first_row, int64_t feature, float (&h)[2]) const {
    if (feature >= args_.weights.rows) h[0] = h[1] = 0.0f;
    if (args_.out != nullptr) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = first_row + row_ + odd;
        if (row < tile_.count && feature < args_.out_stride) args_.out[(tile_.begin + row) * args_.out_stride + feature] = h[odd];
      }
      return;
    }
    const bool odd = (in_half_ & 1) != 0;
    const float other = __shfl_xor_sync(~0u, odd ? h[0] : h[1], 4);
    const int row = first_row + row_ + (odd ? 1 : 0);
    const int64_t even_feature = feature & ~int64_t{1};
    if (row >= tile_.count || even_feature >= args_.out_stride) return;
    const uint32_t pair = odd ? PackBf16(other, h[1]) : PackBf16(h[0], other);
    // A tile's first row has a rank that is a multiple of 8.
    const int64_t at = OperandAt(args_.out_stride, args_.out_panel_stride, tile_.begin + row, row, even_feature);
    *reinterpret_cast<uint32_t*>(args_.out_bf16 + at) = pair;
  }

  const GemmArgs& args_;
  const Tile& tile_;
  const int64_t row_tile_;
  const int* const rows_;
  const int in_half_, row_;
  const float* bias_;
  bool scaled_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_EPILOGUE_INL_CUH_
