// Products on Hopper: rows of bf16 values or codes times packed weights by wgmma, weights decoded into its register operand.
//
// Each of two or three multiplying warpgroups has one row tile (128 features; of a paired matrix gate and up of 64, so that a
// feature's two sums end in the same thread), or half of one, and all rows of the tile, which it shares with the others; a warpgroup
// more fills the ring that they read (hopper_ring-inl.cuh). While a batch of products is under way the weights of the next one are
// decoded. Under scales of groups a weight is rounded to bf16 twice, its scale and the code times that; one scale for all inputs
// multiplies the sums instead, and no weight is rounded. Codes have no stored zero points: where their mean is far from 0, the
// rounding of a group's weights would not average out. Sums are float32 in the order of the tensor cores, so their last bits differ
// from those of gemm-inl.cuh; they depend on the row and the weights only.
#ifndef MOED_KERNELS_CUDA_HOPPER_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode_symmetric-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/hopper_ring-inl.cuh"
#include "kernels/cuda/hopper_store-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"
#include "kernels/cuda/wgmma-inl.cuh"
#include "kernels/cuda/wgmma_products-inl.cuh"

namespace moed::cuda {

// Registers of a thread. A thread block has what it was launched with, 168 for each thread of three warpgroups, 128 of four, and
// one that asks for more than others gave back waits for ever.
inline constexpr int kProducerRegisters = 56;
constexpr int MathRegisters(int groups) { return groups == 2 ? 224 : 152; }
static_assert(kProducerRegisters + 2 * MathRegisters(2) <= 3 * 168 && kProducerRegisters + 3 * MathRegisters(3) <= 4 * 128);

// One warpgroup's part of every piece of work. `kMany`: blocks have two or four slots of scales, not one or none. With more than two
// loops in a kernel the compiler finds no registers for products that are under way (C7512).
template <Codes kCodes, int kTokens, Results kResults, bool kMany>
class HopperMath {
 public:
  using Layout = HopperLayout<kCodes, kTokens>;
  static constexpr int kHalves = Layout::kHalves;
  // Products of a batch: a half's of a block, or two steps.
  static constexpr int kBatch = kHalves == 2 ? kSteps : kSteps / 2;

  __device__ HopperMath(const GemmArgs& args, WorkBoard& board, const Ring<Layout>& ring)
      : args_(args),
        w_(args.weights),
        board_(board),
        ring_(ring),
        blocks_(w_.blocks),
        slots_(ScaledSlots<kCodes>(w_)),
        unknown_zero_(w_.zero),
        weights_at_(Layout::kWeights + tile() * BlockBytes(kCodes) +
                    (first_half() * kTileThreads + threadIdx.x % kTileThreads) * kChunkBytes),
        scales_at_(Layout::kScales + tile() * Layout::kScaleBytes + first_half() * Layout::kHalfBytes +
                   (threadIdx.x % kTileThreads / 32 * 8 + threadIdx.x % 32 / 4) * 4) {}

  // Piece `piece` of the board, which is looked up again when it is stored: the registers are the sums'.
  __device__ void Run(int piece) {
    WaitBarrier(ring_.Full(place_.stage), place_.parity);
    if (tile() >= board_.At(piece).row_tiles) return PassBlocks();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums_[half][i] = 0.0f;
    }
    RunBlocks();
    Store(board_.At(piece));
  }

 private:
  using Operand = uint32_t[4];

  // The codes of a half of a block.
  struct HalfCodes {
    static constexpr int kOfChunk = 16 / BitsOf(kCodes);  // steps of a chunk
    uint4 chunk[kSteps / kOfChunk];

    __device__ void Load(const uint8_t* weights, int half) {
#pragma unroll
      for (int i = 0; i < kSteps / kOfChunk; ++i)
        chunk[i] = *reinterpret_cast<const uint4*>(weights + (i * 2 + half) * kTileThreads * kChunkBytes);
    }

    __device__ void Decode(int step, uint32_t unknown_zero, uint32_t (&operand)[4]) const {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        operand[reg] = DecodeSymmetric<kCodes>(chunk[step / kOfChunk], step % kOfChunk, reg);
        // By an operation with a 0 that the compiler does not know: else the operand would be the registers that chunks are loaded
        // into, while a product still reads them.
        if constexpr (kCodes == Codes::kBf16)
          asm volatile("xor.b32 %0, %1, %2;\n" : "=r"(operand[reg]) : "r"(operand[reg]), "r"(unknown_zero));
      }
    }
  };

  // Of a piece of work that has no row tile for the warpgroup.
  __device__ void PassBlocks() {
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(ring_.Full(place_.stage), place_.parity);
      ring_.Release(place_.stage);
      place_.Next();
    }
  }

  __device__ void RunBlocks() {
    if constexpr (kMany) {
      if (slots_ == 2) return RunLoop<2>();
      RunLoop<4>();
    } else if constexpr (IsScaled(kCodes)) {
      if (slots_ == 1) return RunLoop<1>();
      RunLoop<0>();
    } else {
      RunLoop<0>();
    }
  }

  // A stage is given back in the next block, when the last products of its own are done.
  template <int kSlots>
  __device__ void RunLoop() {
    RingPlace<Layout::kStages> place = place_;
#pragma unroll 1
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(ring_.Full(place.stage), place.parity);
      MultiplyBlock<kSlots>(place.stage, block > 0);
      place.Next();
    }
    WaitProducts<0>();
    ring_.Release(place.Previous());
    place_ = place;
  }

  template <int kSlots>
  __device__ void MultiplyBlock(int stage, bool release) {
    const uint32_t base = ring_.Stage(stage);
    const uint8_t* memory = reinterpret_cast<const uint8_t*>(__cvta_shared_to_generic(base));
    // The same in all threads, which the compiler does not know: descriptors are made in uniform registers then.
    const uint32_t rows = __shfl_sync(~0u, base, 0) + Layout::kRows;
    HalfCodes codes[kHalves];
    codes[0].Load(memory + weights_at_, 0);
#pragma unroll
    for (int batch = 0; batch < kHalves * kSteps / kBatch; ++batch) {
      const int half = batch * kBatch / kSteps, first = batch * kBatch % kSteps;
      Operand(&operand)[kBatch] = operand_[batch % Layout::kOperandSets];
      DecodeBatch<kSlots>(codes[half], memory + half * Layout::kHalfBytes, first, operand);
      if (first == 0 && half + 1 < kHalves) codes[half + 1].Load(memory + weights_at_, half + 1);
      BeginProducts();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) WarpgroupProduct<kTokens>::Add(sums_[half], operand[i], OperandB(rows, first + i));
      CommitProducts();
      WaitProducts<Layout::kOperandSets - 1>();  // the next batch's operands are free
      if (batch == 0 && release) ring_.Release(RingPlace<Layout::kStages>{stage}.Previous());
    }
  }

  // Times the scales of each slot, of the thread's two features.
  template <int kSlots>
  __device__ void DecodeBatch(const HalfCodes& codes, const uint8_t* scales, int first, Operand (&operand)[kBatch]) const {
    constexpr int kSlotSteps = kSlots > 0 ? kSteps / kSlots : kSteps;
    uint32_t scale[2] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int step = first + i;
      codes.Decode(step, unknown_zero_, operand[i]);
      if constexpr (kSlots > 0) {
        if (i == 0 || step % kSlotSteps == 0) {
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(scales + scales_at_ + step / kSlotSteps * Layout::kSlotBytes);
          scale[0] = __byte_perm(pair, pair, 0x1010);
          scale[1] = __byte_perm(pair, pair, 0x3232);
        }
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) operand[i][reg] = MultiplyPair(operand[i][reg], scale[reg % 2]);
      }
    }
  }

  // What sums are multiplied by, the one group's scale or 1, and what is added then: [half][of features g and g + 8].
  struct Last {
    float scale[kHalves][2], bias[kHalves][2];
  };

  __device__ Last LastOf(const HopperWork& work) const {
    Last last;
    const int64_t expert = work.tile.expert;
    const int row = first_half() * kHalfRows + threadIdx.x % kTileThreads / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t first = static_cast<int64_t>(work.first_row_tile + tile()) * kTileRows + row;
    const float* bias = w_.bias != nullptr ? w_.bias + expert * w_.bias_stride + first : nullptr;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      last.bias[i / 2][i % 2] = bias != nullptr ? bias[i / 2 * kHalfRows + i % 2 * 8] : 0.0f;
      last.scale[i / 2][i % 2] = 1.0f;
    }
    if (w_.groups != 1) return last;
    const int bytes = ScaleBytesOf(w_.scale);
    const uint8_t* scales = w_.scales + expert * w_.scales_stride + first * bytes;
    uint32_t bits[2 * kHalves];
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) bits[i] = LoadBits(scales + (i / 2 * kHalfRows + i % 2 * 8) * bytes, bytes);
    WithScaleBits(w_.scale, [&](const auto& decode) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) last.scale[i / 2][i % 2] = w_.globals[expert * 2 + i % 2] * decode(bits[i]);
    });
    return last;
  }

  __device__ void Store(const HopperWork& work) const {
    const Last last = LastOf(work);
    const uint32_t staging = ring_.stages + Layout::kStaging + group() * Layout::kStagingBytes;
    const StagedStore<Layout, kResults> store(args_, work.tile, work.first_row_tile + tile(), group(), staging);
    store.Store([&](int half, int column, int at) {
      return fmaf(sums_[half][column * 4 + at], last.scale[half][at / 2], last.bias[half][at / 2]);
    });
  }

  __device__ static int group() { return threadIdx.x / kTileThreads - 1; }
  __device__ static int tile() { return group() * kHalves / 2; }  // of the piece of work
  __device__ static int first_half() { return group() * kHalves % 2; }

  const GemmArgs& args_;
  const MatrixArgs& w_;
  WorkBoard& board_;
  const Ring<Layout> ring_;
  const int blocks_, slots_;
  const uint32_t unknown_zero_;            // of bf16 weights
  const uint32_t weights_at_, scales_at_;  // in a stage, of the thread's first half
  RingPlace<Layout::kStages> place_;
  Operand operand_[Layout::kOperandSets][kBatch];
  float sums_[kHalves][kTokens / 2];
};

template <Codes kCodes, int kTokens, Results kResults, bool kMany>
__global__ void __launch_bounds__(HopperLayout<kCodes, kTokens>::kThreads, 1)
    HopperGemm(const GemmArgs* global_args, const SortArgs* sort, bool rests) {
  using Layout = HopperLayout<kCodes, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ __align__(8) uint64_t barriers[2 * Layout::kStages];
  __shared__ HopperWorkList list;
  __shared__ WorkBoard board;
  static_assert(sizeof(words) + sizeof(barriers) + sizeof(list) + sizeof(board) <= kHopperStatic);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(GemmArgs) / 8); i += Layout::kThreads)
    words[i] = reinterpret_cast<const uint64_t*>(global_args)[i];
  const uint32_t full = SharedAddress(barriers);
  const Ring<Layout> ring = {(SharedAddress(memory) + 1023) / 1024 * 1024, full, full + Layout::kStages * 8};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      InitBarrier(ring.Full(stage), ScaledSlots<kCodes>(global_args->weights) > 0 ? 1 + kScaleLanes : 1);
      InitBarrier(ring.Empty(stage), Layout::kMathGroups * kTileThreads);
    }
    FenceBarrierInit();
  }
  // The product of rest tiles stands beside that of the others, which is right before it and has its inputs from the same kernels.
  if (!rests) BeginAfterEarlier();
  if (threadIdx.x == 0) list.Fill(*sort, global_args->weights, Layout::kTiles, rests);
  __syncthreads();
  const GemmArgs& args = *reinterpret_cast<const GemmArgs*>(words);
  if (threadIdx.x < kTileThreads) {
    FewerRegisters<kProducerRegisters>();
    ProduceBlocks<kCodes, kTokens, kMany>(args, list, ring, board);
  } else {
    MoreRegisters<MathRegisters(Layout::kMathGroups)>();
    HopperMath<kCodes, kTokens, kResults, kMany> math(args, board, ring);
    for (int at = blockIdx.x, piece = 0; at < list.size(); at += gridDim.x, ++piece) math.Run(piece);
  }
  if (rests) BeginAfterEarlier();  // what follows may count on both
}

template <Codes kCodes, int kTokens, Results kResults, bool kMany>
cudaError_t LaunchHopperGemm(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Layout = HopperLayout<kCodes, kTokens>;
  const auto kernel = HopperGemm<kCodes, kTokens, kResults, kMany>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  const int64_t work = static_cast<int64_t>(launch.tiles) * launch.row_tiles;
  const unsigned int grid = static_cast<unsigned int>(work < processors ? work : processors);
  return LaunchAfter(kernel, grid, Layout::kThreads, Layout::kBytes, stream, args, sort, launch.rests);
}

template <Codes kCodes, int kTokens, bool kMany>
cudaError_t LaunchHopperTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.results) {
    case Results::kHidden: return LaunchHopperGemm<kCodes, kTokens, Results::kHidden, kMany>(launch, args, sort, stream);
    case Results::kSums: return LaunchHopperGemm<kCodes, kTokens, Results::kSums, kMany>(launch, args, sort, stream);
    case Results::kWords:
      if constexpr (HopperHasWords(kTokens))
        return LaunchHopperGemm<kCodes, kTokens, Results::kWords, kMany>(launch, args, sort, stream);
  }
  return cudaErrorInvalidValue;
}

// Every number of rows of one kind of codes.
template <Codes kCodes, bool kMany>
cudaError_t LaunchHopperOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.tokens) {
    case 32: return LaunchHopperTiles<kCodes, 32, kMany>(launch, args, sort, stream);
    case 48: return LaunchHopperTiles<kCodes, 48, kMany>(launch, args, sort, stream);
    case 64: return LaunchHopperTiles<kCodes, 64, kMany>(launch, args, sort, stream);
    case 80: return LaunchHopperTiles<kCodes, 80, kMany>(launch, args, sort, stream);
    case 96: return LaunchHopperTiles<kCodes, 96, kMany>(launch, args, sort, stream);
    case 112: return LaunchHopperTiles<kCodes, 112, kMany>(launch, args, sort, stream);
    case 144: return LaunchHopperTiles<kCodes, 144, kMany>(launch, args, sort, stream);
    case 160:
      if constexpr (kCodes == Codes::kBf16) return LaunchHopperTiles<kCodes, 160, kMany>(launch, args, sort, stream);
      break;
    case 256:
      if constexpr (kCodes != Codes::kBf16) return LaunchHopperTiles<kCodes, 256, kMany>(launch, args, sort, stream);
      break;
    default: break;
  }
  return cudaErrorInvalidValue;
}

template <Codes kCodes>
cudaError_t LaunchHopperOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if constexpr (IsScaled(kCodes)) {
    if (launch.slots > 1) return LaunchHopperOf<kCodes, true>(launch, args, sort, stream);
  }
  return LaunchHopperOf<kCodes, false>(launch, args, sort, stream);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_INL_CUH_
