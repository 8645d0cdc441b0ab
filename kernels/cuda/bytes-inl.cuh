// Products of 8-bit codes by 8-bit codes, rows and weights under scales: int8 by int8 in exact integers, E4M3 by E4M3 as f16, which
// holds every value of E4M3, with float32 sums.
//
// Tiles, threads and the ring are those of gemm-inl.cuh, but a stage of the ring is a unit of 128 inputs: two blocks of weights and
// 128 bytes a row, in the order of BytePosition, so that bytes of both operands meet without an exchange. Sums of a slot, the
// inputs under one scale of the weights and one of the row, are made by the tensor cores and added, scaled, to float32 sums; int8
// has one slot, the sum over all inputs, which is scaled once. A row's sums depend on that row and the weights alone: every tile
// size gives the same bits.
#ifndef MOED_KERNELS_CUDA_BYTES_INL_CUH_
#define MOED_KERNELS_CUDA_BYTES_INL_CUH_

#include <type_traits>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile-inl.cuh"

namespace moed::cuda {

inline constexpr int kUnitBlocks = 2, kUnitSteps = kUnitBlocks * kSteps, kUnitDepth = kUnitBlocks * kBlockDepth;

// c[16 x 8] += a[16 x 32] b[32 x 8], integers.
__device__ inline void MultiplyInt8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16 x 8] += a[16 x 16] b[16 x 8], f16 in, float32 sums.
__device__ inline void MultiplyF16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Bits of two E4M3 numbers in the upper bytes of a word's halves, as f16.
__device__ inline uint32_t E4m3HalvesToF16(uint32_t top) {
  // The exponent moves to f16's place; 2^8 moves its bias from 15 to 7.
  const uint32_t bits = (top & 0x80008000u) | ((top >> 1) & 0x3F803F80u), scale = 0x5C005C00u;
  const __half2 r = __hmul2(*reinterpret_cast<const __half2*>(&bits), *reinterpret_cast<const __half2*>(&scale));
  return *reinterpret_cast<const uint32_t*>(&r);
}

// The values of four E4M3 codes as f16: of bytes 0 and 1, and of bytes 2 and 3. NaN is told by the rows' scales.
__device__ inline void E4m3ToF16(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  // In one piece, so that the halves of the register are read where they lie.
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = E4m3HalvesToF16(__byte_perm(codes, 0, 0x1404));
  high = E4m3HalvesToF16(__byte_perm(codes, 0, 0x3424));
#endif
}

// Bytes of one stage of the ring.
template <Codes kCodes, int kTokens, int kSlotSteps>
struct ByteStage {
  static constexpr int kStages = kTokens <= 16 ? 4 : 3;
  static constexpr int kSlots = kSlotSteps == 0 ? 0 : kUnitSteps / kSlotSteps;
  static constexpr int kRows = kUnitBlocks * BlockBytes(kCodes);
  static constexpr int kScales = kRows + kTokens * kUnitDepth;
  static constexpr int kRowScales = kScales + kSlots * kTileRows * 4;
  static constexpr int kBytes = kRowScales + kSlots * kTokens * 4;
  static_assert(kBytes % 16 == 0);
};

// One thread block's share of a product. `kSlotSteps`: steps of a slot, 0 for one slot.
template <Codes kCodes, int kTokens, int kSlotSteps>
class ByteProduct {
 public:
  static constexpr bool kIntegers = kCodes == Codes::kInt8;
  static_assert(kIntegers == (kSlotSteps == 0));
  using Stage = ByteStage<kCodes, kTokens, kSlotSteps>;
  static constexpr int kColumns = kTokens / 8;  // tiles of 8 rows
  static constexpr int kPieces = (kTokens * 8 + kTileThreads - 1) / kTileThreads;  // of 16 bytes of a unit's rows, for each thread

  __device__ ByteProduct(const GemmArgs& args, const Tile& tile, int row_tile, uint8_t* ring, const int* rows)
      : args_(args), tile_(tile), row_tile_(row_tile), ring_(ring), rows_(rows), blocks_(args.weights.blocks),
        grouped_(args.x.scale_steps > 0) {
    weights_.Find<kCodes>(args.weights, tile.expert, row_tile);
    if (grouped_) per_row_group_ = 1.0f / static_cast<float>(args.x.scale_steps);
    FindRows();
  }

  __device__ void Run() {
    Clear(sums_);
    const int units = (blocks_ + kUnitBlocks - 1) / kUnitBlocks;
#pragma unroll
    for (int stage = 0; stage < Stage::kStages - 1; ++stage) Load(stage, units, stage);
    int stage = 0;
    for (int unit = 0; unit < units; ++unit) {
      WaitCopies<Stage::kStages - 2>();
      __syncthreads();
      // The stage that all threads have left.
      Load(unit + Stage::kStages - 1, units, stage == 0 ? Stage::kStages - 1 : stage - 1);
      Accumulate(ring_ + stage * Stage::kBytes);
      stage = stage == Stage::kStages - 1 ? 0 : stage + 1;
    }
    WaitCopies<0>();
  }

  __device__ void Store() const {
    const TileStore store(args_, tile_, row_tile_, threadIdx.x, rows_);
    if constexpr (kIntegers) {
      float scale[2][2];
      weights_.Scales(weights_.scales, scale);
      store.Store<kColumns>([&](int half, int column, int at) {
        return static_cast<float>(sums_[half][column][at]) * scale[half][at / 2];
      });
    } else {
      store.Store<kColumns>([this](int half, int column, int at) { return sums_[half][column][at]; });
    }
  }

 private:
  using Sums = std::conditional_t<kIntegers, int, float>[2][kColumns][4];

  __device__ static void Clear(Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int at = 0; at < 4; ++at) sums[half][column][at] = 0;
      }
    }
  }

  // Where this thread's pieces of rows lie: piece p of 16 bytes of a unit belongs to thread p mod 128.
  __device__ void FindRows() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = threadIdx.x + i * kTileThreads, row = at / 8;
      const int from = row < kTokens ? rows_[row] : -1;
      source_[i] = static_cast<const uint8_t*>(args_.x.data) + (from < 0 ? 0 : from) * args_.x.row_stride + at % 8 * 16;
      valid_ |= (from >= 0 ? 1u : 0u) << i;
    }
  }

  // --- load ---

  __device__ void Load(int unit, int units, int at) {
    if (unit < units) {
      const uint32_t stage = SharedAddress(ring_) + at * Stage::kBytes;
      // Of an odd number of blocks the last unit's second block is zeros.
      const bool whole = unit * kUnitBlocks + kUnitBlocks <= blocks_;
      LoadWeights(unit, whole, stage);
      LoadRows(unit, whole, stage + Stage::kRows);
      if constexpr (!kIntegers) {
        LoadScales(unit, stage + Stage::kScales);
        if (grouped_) LoadRowScales(unit, stage + Stage::kRowScales);
      }
    }
    CommitCopies();
  }

  __device__ void LoadWeights(int unit, bool whole, uint32_t stage) const {
    constexpr int kChunks = ChunksOf(kCodes) * 2, kStride = kTileThreads * kChunkBytes;
    constexpr int kUnitBytes = kUnitBlocks * BlockBytes(kCodes);
    const uint8_t* from = weights_.codes + static_cast<int64_t>(unit) * kUnitBytes + threadIdx.x * kChunkBytes;
    const uint32_t to = stage + threadIdx.x * kChunkBytes;
#pragma unroll
    for (int chunk = 0; chunk < kUnitBlocks * kChunks; ++chunk) {
      CopyAsync16(to + chunk * kStride, from + chunk * kStride, chunk < kChunks || whole);
    }
  }

  // The 16-byte pieces of row r are exchanged by r mod 8, so that eight rows' pieces lie in different banks.
  __device__ void LoadRows(int unit, bool whole, uint32_t rows) const {
    const int64_t offset = static_cast<int64_t>(unit) * kUnitDepth;
    const bool there = whole || threadIdx.x % 8 < 4;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = threadIdx.x + i * kTileThreads, piece = at % 8, row = at / 8;
      if (row >= kTokens) break;
      CopyAsync16(rows + row * kUnitDepth + ((piece ^ (row % 8)) * 16), source_[i] + offset, there && (valid_ >> i & 1) != 0);
    }
  }

  __device__ int StepOf(int unit, int slot) const { return min(unit * kUnitSteps + slot * kSlotSteps, blocks_ * kSteps - 1); }

  __device__ void LoadScales(int unit, uint32_t to) const {
    const int shift = 3 + weights_.shift;  // 8 pieces of 16 bytes in a slot's 128 scales of one byte
#pragma unroll 1
    for (int at = threadIdx.x; at < Stage::kSlots << shift; at += kTileThreads) {
      const int64_t group = weights_.GroupOf(StepOf(unit, at >> shift));
      CopyAsync16(to + at * 16, weights_.scales + (group * kTileRows << weights_.shift) + (at & ((1 << shift) - 1)) * 16);
    }
  }

  __device__ void LoadRowScales(int unit, uint32_t to) const {
#pragma unroll 1
    for (int at = threadIdx.x; at < kTokens * Stage::kSlots; at += kTileThreads) {
      const int from = rows_[at % kTokens];
      const int group = min(DividedStep(StepOf(unit, at / kTokens), per_row_group_), args_.x.scale_stride - 1);
      const int64_t row_scales = (from < 0 ? 0 : from) * static_cast<int64_t>(args_.x.scale_stride);
      CopyAsync4(to + at * 4, args_.x.scales + row_scales + group, from >= 0);
    }
  }

  // --- math ---

  __device__ void Accumulate(const uint8_t* stage) {
    if constexpr (kIntegers) {
#pragma unroll
      for (int chunk = 0; chunk < kUnitSteps / 2; ++chunk) MultiplyIntegers(stage, chunk);
    } else {
      Sums part;
#pragma unroll
      for (int step = 0; step < kUnitSteps; step += 2) {
        uint4 words[2];
        ReadWeights(stage, step / 2, words);
        if constexpr (kSlotSteps == 1) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            Clear(part);
            MultiplyFloats<1>(stage, step + odd, words, part);
            AddScaled(stage, step + odd, part);
          }
        } else {
          if (step % kSlotSteps == 0) Clear(part);
          MultiplyFloats<2>(stage, step, words, part);
          if ((step + 2) % kSlotSteps == 0) AddScaled(stage, step / kSlotSteps, part);
        }
      }
    }
  }

  // Chunk `chunk` of a unit, two steps, of both halves.
  __device__ static void ReadWeights(const uint8_t* stage, int chunk, uint4 (&words)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = *reinterpret_cast<const uint4*>(stage + ((chunk * 2 + half) * kTileThreads + threadIdx.x) * kChunkBytes);
    }
  }

  // The codes of feature g (of g + 8 with `second`) in a step's two words: inputs 2t, 2t+1, 2t+8, 2t+9.
  __device__ static uint32_t FeatureBytes(uint32_t first, uint32_t last, bool second) {
    return __byte_perm(first, last, second ? 0x7531 : 0x6420);
  }

  __device__ void MultiplyIntegers(const uint8_t* stage, int chunk) {
    constexpr uint32_t kSigns = 0x80808080u;  // codes are packed as 128 + value
    uint4 words[2];
    ReadWeights(stage, chunk, words);
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        a[half][second] = FeatureBytes(words[half].x, words[half].y, second != 0) ^ kSigns;
        a[half][2 + second] = FeatureBytes(words[half].z, words[half].w, second != 0) ^ kSigns;
      }
    }
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      uint32_t b[4];
      LoadRowsOperand(stage, chunk, column, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        MultiplyInt8(sums_[half][column], a[half], b[0], b[1]);
        if constexpr (kColumns > 1) MultiplyInt8(sums_[half][column + 1], a[half], b[2], b[3]);
      }
    }
  }

  // Products of `kCount` steps from `step` on, which lie in the chunk `words` of both halves.
  template <int kCount>
  __device__ static void MultiplyFloats(const uint8_t* stage, int step, const uint4 (&words)[2], Sums& part) {
    uint32_t a[kCount][2][4];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool odd = (step + s) % 2 != 0;
        const uint32_t first = odd ? words[half].z : words[half].x, last = odd ? words[half].w : words[half].y;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t codes = FeatureBytes(first, last, second != 0);
          E4m3ToF16(codes, a[s][half][second], a[s][half][2 + second]);
        }
      }
    }
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      uint32_t b[4];
      LoadRowsOperand(stage, step / 2, column, b);
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
#pragma unroll
        for (int c = 0; c < (kColumns > 1 ? 2 : 1); ++c) {
          uint32_t low, high;
          E4m3ToF16(b[2 * c + (step + s) % 2], low, high);
#pragma unroll
          for (int half = 0; half < 2; ++half) MultiplyF16(part[half][column + c], a[s][half], low, high);
        }
      }
    }
  }

  // Words of the rows of columns `column` and, where there is one, `column` + 1 (b[2], b[3]) in the two steps of a chunk.
  __device__ static void LoadRowsOperand(const uint8_t* stage, int chunk, int column, uint32_t (&b)[4]) {
    const uint32_t rows = SharedAddress(stage + Stage::kRows);
    const int lane = threadIdx.x % 32, piece = chunk * 2 + lane / 8 % 2;
    if constexpr (kColumns > 1) {
      const int row = column * 8 + lane / 16 * 8 + lane % 8;
      LoadMatrix4(b, rows + row * kUnitDepth + ((piece ^ (row % 8)) * 16));
    } else {
      const int row = lane % 8;
      uint32_t two[2];
      LoadMatrix2(two, rows + row * kUnitDepth + ((piece ^ (row % 8)) * 16));
      b[0] = two[0], b[1] = two[1];
    }
  }

  // Row scales of groups are the slot's, others are left to the epilogue.
  __device__ void AddScaled(const uint8_t* stage, int slot, const Sums& part) {
    float scale[2][2];
    weights_.Scales(stage + Stage::kScales + (slot * kTileRows << weights_.shift), scale);
    const float* row_scales = reinterpret_cast<const float*>(stage + Stage::kRowScales) + slot * kTokens;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      float2 row_scale = make_float2(1.0f, 1.0f);
      if (grouped_) row_scale = *reinterpret_cast<const float2*>(row_scales + column * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
          sums_[half][column][at] += part[half][column][at] * (scale[half][at / 2] * (at % 2 == 0 ? row_scale.x : row_scale.y));
        }
      }
    }
  }

  const GemmArgs& args_;
  const Tile tile_;
  const int row_tile_;
  uint8_t* const ring_;
  const int* const rows_;
  const int blocks_;
  const bool grouped_;       // rows have scales of groups
  float per_row_group_ = 0.0f;
  WeightTile weights_;
  const uint8_t* source_[kPieces];
  uint32_t valid_ = 0;       // bit i: source_[i] is a row
  Sums sums_;
};

// Thread blocks of a multiprocessor that the registers must leave room for: as many as its shared memory holds.
template <Codes kCodes, int kTokens>
constexpr int ByteBlocksFor() {
  return kCodes == Codes::kFp8 && kTokens == 64 ? 2 : 3;
}

template <Codes kCodes, int kTokens, int kSlotSteps>
__global__ void __launch_bounds__(kTileThreads, ByteBlocksFor<kCodes, kTokens>())
    Bytes(const GemmArgs* args, const SortArgs* sort) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ int rows[kTokens];
  Tile tile;
  if (!BeginTile<kTokens>(args, sort, words, rows, &tile)) return;
  ByteProduct<kCodes, kTokens, kSlotSteps> product(*reinterpret_cast<const GemmArgs*>(words), tile, blockIdx.y, ring, rows);
  product.Run();
  product.Store();
}

template <Codes kCodes, int kTokens, int kSlotSteps>
cudaError_t LaunchByteTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Stage = ByteStage<kCodes, kTokens, kSlotSteps>;
  constexpr int kBytes = Stage::kStages * Stage::kBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(Bytes<kCodes, kTokens, kSlotSteps>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return LaunchAfter(Bytes<kCodes, kTokens, kSlotSteps>, dim3(launch.tiles, launch.row_tiles), kTileThreads, kBytes, stream, args,
                     sort);
}

// Every number of rows of one kind of codes and slots.
template <Codes kCodes, int kSlotSteps>
cudaError_t LaunchBytesOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.tokens) {
    case 8: return LaunchByteTiles<kCodes, 8, kSlotSteps>(launch, args, sort, stream);
    case 16: return LaunchByteTiles<kCodes, 16, kSlotSteps>(launch, args, sort, stream);
    case 32: return LaunchByteTiles<kCodes, 32, kSlotSteps>(launch, args, sort, stream);
    case 48: return LaunchByteTiles<kCodes, 48, kSlotSteps>(launch, args, sort, stream);
    case 64: return LaunchByteTiles<kCodes, 64, kSlotSteps>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_BYTES_INL_CUH_
