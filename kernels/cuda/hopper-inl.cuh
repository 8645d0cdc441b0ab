// Products on Hopper: rows of bf16 values or codes times packed weights by wgmma, weights decoded into its register operand.
//
// Each of two or three multiplying warpgroups has one row tile (128 features; of a paired matrix gate and up of 64, so that a
// feature's two sums end in the same thread), or half of one, and all rows of the tile, which it shares with the others; a
// warpgroup more fills the ring that they read (hopper_ring-inl.cuh). While a batch of products is under way the weights of the
// next one are decoded. Under scales of groups a weight is rounded to bf16 twice, its scale and the code less its zero point times
// that; one scale for all inputs multiplies the sums instead, and no weight is rounded. Sums are float32 in the order of the
// tensor cores, so their last bits differ from those of gemm-inl.cuh; they depend on the row and the weights only.
#ifndef MOED_KERNELS_CUDA_HOPPER_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_INL_CUH_

#include <iterator>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode_scaled-inl.cuh"
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

// One warpgroup's part of every piece of work. Slots of scales have two steps or one where there are many, else a stage's or there
// are none: with more than two loops in a kernel the compiler finds no registers for products that are under way (C7512).
template <typename Layout, Results kResults>
class HopperMath {
 public:
  static constexpr Codes kCodes = Layout::kCodes;
  static constexpr int kTokens = Layout::kTokens;
  static constexpr int kHalves = Layout::kHalves;
  static constexpr int kBatch = Layout::kBatch, kOperandSets = Layout::kOperandSets;

  __device__ HopperMath(const GemmArgs& args, WorkBoard& board, const Ring<Layout>& ring)
      : args_(args),
        w_(args.weights),
        board_(board),
        ring_(ring),
        stages_((w_.blocks + Layout::kStageBlocks - 1) / Layout::kStageBlocks),
        unknown_zero_(w_.zero),
        weights_at_(Layout::kWeights + tile() * Layout::kTileBytes +
                    (first_half() * kTileThreads + threadIdx.x % kTileThreads) * kChunkBytes),
        scales_at_(Layout::kScales + tile() * Layout::kScaleBytes + first_half() * Layout::kHalfBytes +
                   (threadIdx.x % kTileThreads / 32 * 8 + threadIdx.x % 32 / 4) * 4) {}

  // Piece `piece` of the board, which is looked up again when it is stored: the registers are the sums'.
  __device__ void Run(int piece) {
    WaitBarrier(ring_.Full(place_.stage), place_.parity);
    if (tile() >= board_.At(piece).row_tiles) return PassStages();
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

    __device__ uint32_t Field(int step, int reg) const { return FieldOf<kCodes>(chunk[step / kOfChunk], step % kOfChunk, reg); }
  };

  // Of a piece of work that has no row tile for the warpgroup.
  __device__ void PassStages() {
    for (int stage = 0; stage < stages_; ++stage) {
      WaitBarrier(ring_.Full(place_.stage), place_.parity);
      ring_.Release(place_.stage);
      place_.Next();
    }
  }

  __device__ void RunBlocks() {
    if constexpr (Layout::kMany) {
      if (w_.slots == kSteps) return RunLoop<1>();
      RunLoop<2>();
    } else if constexpr (IsScaled(kCodes)) {
      if (ScalesWeights<Layout>(w_)) return RunLoop<Layout::kStageSteps>();
      RunLoop<0>();
    } else {
      RunLoop<0>();
    }
  }

  // A stage is given back in the next one, when the last products of its own are done.
  template <int kSlotSteps>
  __device__ void RunLoop() {
    RingPlace<Layout::kStages> place = place_;
#pragma unroll 1
    for (int stage = 0; stage < stages_; ++stage) {
      WaitBarrier(ring_.Full(place.stage), place.parity);
      MultiplyBlock<kSlotSteps, 0>(place.stage, stage > 0);
      if constexpr (Layout::kStageBlocks == 2) MultiplyBlock<kSlotSteps, 1>(place.stage, false);
      place.Next();
    }
    WaitProducts<0>();
    ring_.Release(place.Previous());
    place_ = place;
  }

  // Block `kBlock` of a stage. `release`: the stage before is given back.
  template <int kSlotSteps, int kBlock>
  __device__ void MultiplyBlock(int stage, bool release) {
    const uint32_t base = ring_.Stage(stage);
    const uint8_t* memory = reinterpret_cast<const uint8_t*>(__cvta_shared_to_generic(base));
    // The same in all threads, which the compiler does not know: descriptors are made in uniform registers then.
    const uint32_t rows = __shfl_sync(~0u, base, 0) + Layout::kRows + kBlock * Layout::kBlockRows;
    const uint8_t* const weights = memory + weights_at_ + kBlock * BlockBytes(kCodes);
    HalfCodes codes[kHalves];
    codes[0].Load(weights, 0);
#pragma unroll
    for (int batch = 0; batch < kHalves * kSteps / kBatch; ++batch) {
      const int half = batch * kBatch / kSteps, first = batch * kBatch % kSteps;
      Operand(&operand)[kBatch] = operand_[batch % kOperandSets];
      DecodeBatch<kSlotSteps, kBlock>(codes[half], memory + half * Layout::kHalfBytes, first, operand);
      if (first == 0 && half + 1 < kHalves) codes[half + 1].Load(weights, half + 1);
      BeginProducts();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) WarpgroupProduct<kTokens>::Add(sums_[half], operand[i], OperandB(rows, first + i));
      CommitProducts();
      WaitProducts<kOperandSets - 1>();  // the next batch's operands are free
      if (batch == 0 && release) ring_.Release(RingPlace<Layout::kStages>{stage}.Previous());
    }
  }

  template <int kSlotSteps, int kBlock>
  __device__ void DecodeBatch(const HalfCodes& codes, const uint8_t* scales, int first, Operand (&operand)[kBatch]) const {
    if constexpr (IsScaled(kCodes)) {
      ScaleBatch<kSlotSteps, kBlock>(codes, scales + scales_at_, first, operand);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch * 4; ++i) {
        uint32_t& to = operand[i / 4][i % 4];
        // By an operation with a 0 that the compiler does not know: else the operand would be the registers that chunks are loaded
        // into, while a product still reads them.
        asm volatile("xor.b32 %0, %1, %2;\n" : "=r"(to) : "r"(codes.Field(first + i / 4, i % 4)), "r"(unknown_zero_));
      }
    }
  }

  // By the scales of each slot, of the thread's two features, or by 2^-kLift alone.
  template <int kSlotSteps, int kBlock>
  __device__ static void ScaleBatch(const HalfCodes& codes, const uint8_t* scales, int first, Operand (&operand)[kBatch]) {
    constexpr int kUnit = kSlotSteps > 0 ? kSlotSteps : Layout::kStageSteps;
    FieldScale<kCodes, Layout::kZeros> scale[2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int step = first + i, in_stage = kBlock * kSteps + step;
      if (i == 0 || in_stage % kUnit == 0)
        ReadScales<(kSlotSteps > 0)>(scales + in_stage / kUnit * Layout::kSlotBytes, scale);
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) operand[i][reg] = scale[reg % 2].Apply(codes.Field(step, reg));
    }
  }

  template <bool kScaled>
  __device__ static void ReadScales(const uint8_t* from, FieldScale<kCodes, Layout::kZeros> (&scale)[2]) {
    const uint32_t pair = kScaled ? *reinterpret_cast<const uint32_t*>(from) : 0;
    const uint32_t zeros = Layout::kZeros ? *reinterpret_cast<const uint32_t*>(from + Layout::kZeroPlace) : 0;
#pragma unroll
    for (int reg = 0; reg < 2; ++reg) {
      const uint32_t selector = reg == 0 ? 0x1010 : 0x3232;
      if constexpr (Layout::kZeros) {
        scale[reg] = {__byte_perm(pair, pair, selector), __byte_perm(zeros, zeros, selector)};
      } else if constexpr (kScaled) {
        scale[reg] = scale[reg].Of(reg, __byte_perm(pair, pair, selector));
      } else {
        scale[reg] = scale[reg].Of(reg, PowerPair(UnitPower<kCodes>(reg) - kLift));
      }
    }
  }

  // What sums are multiplied by, the one group's scale or only 2^kLift, and what is added then: [half][of features g and g + 8].
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
      last.scale[i / 2][i % 2] = LiftOf<kCodes>();
    }
    if (w_.groups != 1) return last;
    const int bytes = ScaleBytesOf(w_.scale), reader = threadIdx.x % kTileThreads / 32 * 8 + threadIdx.x % 32 / 4;
    const int64_t place = static_cast<int64_t>(work.first_row_tile + tile()) * kTileRows + reader * 4;
    uint32_t bits[4] = {};
    LoadFour(w_.scales + expert * w_.scales_stride + place * bytes, bytes, bits);
    WithFourScales(w_.scale, [&](const auto& decode) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i)
        last.scale[i / 2][i % 2] *=
            w_.globals[expert * 2 + i % 2] * (first_half() == 0 ? decode(bits, i) : decode(bits, (i + 2) % 4));
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
  const int stages_;                       // of a piece of work
  const uint32_t unknown_zero_;            // of bf16 weights
  const uint32_t weights_at_, scales_at_;  // in a stage, of the thread's first half
  RingPlace<Layout::kStages> place_;
  Operand operand_[kOperandSets][kBatch];
  float sums_[kHalves][kTokens / 2];
};

template <typename Layout, Results kResults>
__global__ void __launch_bounds__(Layout::kThreads, 1) HopperGemm(const GemmArgs* global_args, const SortArgs* sort, bool rests) {
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
      InitBarrier(ring.Full(stage), ScalesWeights<Layout>(global_args->weights) ? 1 + kScaleLanes : 1);
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
    ProduceBlocks(args, list, ring, board);
  } else {
    MoreRegisters<MathRegisters(Layout::kMathGroups)>();
    HopperMath<Layout, kResults> math(args, board, ring);
    for (int at = blockIdx.x, piece = 0; at < list.size(); at += gridDim.x, ++piece) math.Run(piece);
  }
  if (rests) BeginAfterEarlier();  // what follows may count on both
}

template <typename Layout, Results kResults>
cudaError_t LaunchHopperGemm(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  const auto kernel = HopperGemm<Layout, kResults>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  const int64_t work = static_cast<int64_t>(launch.tiles) * launch.row_tiles;
  const unsigned int grid = static_cast<unsigned int>(work < processors ? work : processors);
  return LaunchAfter(kernel, grid, Layout::kThreads, Layout::kBytes, stream, args, sort, launch.rests);
}

template <typename Layout>
cudaError_t LaunchHopperTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.results) {
    case Results::kHidden: return LaunchHopperGemm<Layout, Results::kHidden>(launch, args, sort, stream);
    case Results::kSums: return LaunchHopperGemm<Layout, Results::kSums>(launch, args, sort, stream);
    case Results::kWords:
      if constexpr (HopperHasWords(Layout::kTokens))
        return LaunchHopperGemm<Layout, Results::kWords>(launch, args, sort, stream);
  }
  return cudaErrorInvalidValue;
}

// Every number of rows of one kind of codes, by kHopperTiles from the `kAt`-th on.
template <Codes kCodes, bool kZeros, bool kMany, int kAt = 0>
cudaError_t LaunchHopperRows(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if constexpr (kAt < static_cast<int>(std::size(kHopperTiles))) {
    constexpr HopperTile kTile = kHopperTiles[kAt];
    if constexpr (kCodes == Codes::kBf16 ? kTile.bf16 > 0 : kTile.codes > 0 && (!kZeros || kTile.zeros)) {
      if (launch.tokens == kTile.rows)
        return LaunchHopperTiles<HopperLayout<kCodes, kTile.rows, kZeros, kMany>>(launch, args, sort, stream);
    }
    return LaunchHopperRows<kCodes, kZeros, kMany, kAt + 1>(launch, args, sort, stream);
  } else {
    return cudaErrorInvalidValue;
  }
}

template <Codes kCodes, bool kZeros = false>
cudaError_t LaunchHopperOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if constexpr (IsScaled(kCodes)) {
    if (launch.many) return LaunchHopperRows<kCodes, kZeros, true>(launch, args, sort, stream);
  }
  return LaunchHopperRows<kCodes, kZeros, false>(launch, args, sort, stream);
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_INL_CUH_
