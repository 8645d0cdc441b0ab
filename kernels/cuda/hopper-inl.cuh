// Products on Hopper: rows of bf16 values or codes times packed weights by wgmma, weights decoded into its register operand.
//
// Each multiplying warpgroup has one half of a row tile (64 features; in a paired matrix gate and up of 32, so that a feature's
// two sums end in the same thread), or both, and all rows of the tile, which it shares with the others; a warpgroup more fills
// the ring that they read (hopper_ring-inl.cuh). Products are under way while the next one's weights are decoded. Under scales of
// groups a weight is rounded to bf16 twice, its scale and the code times that; one scale for all inputs multiplies the sums
// instead, and no weight is rounded. Codes have no stored zero points: where their mean is far from 0, the rounding of a group's
// weights would not average out. Sums are float32 in the order of the tensor cores, so their last bits differ from those of
// gemm-inl.cuh; they depend on the row and the weights only.
#ifndef MOED_KERNELS_CUDA_HOPPER_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/hopper_ring-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"
#include "kernels/cuda/wgmma-inl.cuh"

namespace moed::cuda {

// Registers of a thread. A thread block has what it was launched with, 168 for each thread of three warpgroups, 96 of five, and one
// that asks for more than others gave back waits for ever.
constexpr int ProducerRegisters(int groups) { return groups == 2 ? 56 : 64; }
constexpr int MathRegisters(int groups) { return groups == 2 ? 224 : 104; }
constexpr int LaunchRegisters(int groups) { return 65536 / ((groups + 1) * kTileThreads) / 8 * 8; }
static_assert(ProducerRegisters(2) + 2 * MathRegisters(2) <= 3 * LaunchRegisters(2));
static_assert(ProducerRegisters(4) + 4 * MathRegisters(4) <= 5 * LaunchRegisters(4));

// One warpgroup's part of every piece of work.
template <Codes kCodes, int kTokens>
class HopperMath {
 public:
  using Layout = HopperLayout<kCodes, kTokens>;
  static constexpr int kHalves = Layout::kHalves;
  // That products read at once, as the registers allow.
  static constexpr int kOperands = Layout::kMathGroups == 2 && Layout::kHalves * kTokens <= 256 ? 4 : 2;

  __device__ HopperMath(const GemmArgs& args, const HopperWorkList& list, const Ring<Layout>& ring)
      : args_(args),
        w_(args.weights),
        list_(list),
        ring_(ring),
        blocks_(w_.blocks),
        slots_(ScaledSlots<kCodes>(w_)),
        zero_(kCodes == Codes::kBf16 ? w_.zero : ZeroOperand<kCodes>(w_.zero)),
        weights_at_(Layout::kWeights + tile() * BlockBytes(kCodes) +
                    (first_half() * kTileThreads + threadIdx.x % kTileThreads) * kChunkBytes),
        scales_at_(Layout::kScales + tile() * Layout::kScaleBytes + first_half() * Layout::kHalfBytes +
                   (threadIdx.x % kTileThreads / 32 * 8 + threadIdx.x % 32 / 4) * 8) {}

  // Piece `at` of the list, which is looked up again when it is stored: the registers are the sums'.
  __device__ void Run(int at) {
    if (tile() >= list_.Get(at).row_tiles) return PassBlocks();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums_[half][i] = 0.0f;
    }
    RunBlocks();
    Store(list_.Get(at));
  }

 private:
  // Of a piece of work without a second row tile.
  __device__ void PassBlocks() {
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(ring_.Full(place_.stage), place_.parity);
      ring_.Release(place_.stage);
      place_.Next();
    }
  }

  __device__ void RunBlocks() {
    if constexpr (IsScaled(kCodes)) {
      if (slots_ == 1) return RunLoop<1>();
      if (slots_ == 2) return RunLoop<2>();
      if (slots_ == 4) return RunLoop<4>();
    }
    RunLoop<0>();
  }

  template <int kSlots>
  __device__ void RunLoop() {
    RingPlace<Layout::kStages> place = place_;
    int previous = -1, earlier = -1;  // stages: of the last block, some of whose products may still read it, and of the one before
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(ring_.Full(place.stage), place.parity);
      if (earlier >= 0) ring_.Release(earlier);
      MultiplyBlock<kSlots>(place.stage);
      earlier = previous;
      previous = place.stage;
      place.Next();
    }
    WaitProducts<0>();
    if (earlier >= 0) ring_.Release(earlier);
    ring_.Release(previous);
    place_ = place;
  }

  template <int kSlots>
  __device__ void MultiplyBlock(int stage) {
    using Reader = ChunkReader<kCodes>;
    const uint32_t base = ring_.Stage(stage);
    const uint8_t* memory = reinterpret_cast<const uint8_t*>(__cvta_shared_to_generic(base));
    constexpr int kLast = kSlots == 0 ? kSteps : kSteps / kSlots;  // steps of a slot
    Reader reader[2][kHalves];  // chunks in turn
    uint2 scale[kHalves] = {};  // pairs of the thread's two features
    LoadCodes(memory, 0, reader[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kSlots > 0) {
        if (step % kLast == 0) LoadScales(memory + step / kLast * Layout::kSlotBytes, scale);
      }
      if (step + 1 < kSteps) LoadCodes(memory, step + 1, reader[(step + 1) / Reader::kStepsPerChunk % 2]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int product = step * kHalves + half;
        Fragment<kCodes>& operand = operand_[product % kOperands];
        DecodeStep<kSlots>(reader[step / Reader::kStepsPerChunk % 2][half], step, scale[half], operand);
        BeginProducts();
        WarpgroupProduct<kTokens>::Add(sums_[half], operand[0], OperandB(base + Layout::kRows, step));
        CommitProducts();
        WaitProducts<kOperands - 1>();  // the next product's operand is free
      }
    }
  }

  __device__ void LoadCodes(const uint8_t* memory, int step, ChunkReader<kCodes> (&reader)[kHalves]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) reader[half].Load(memory + weights_at_, half, step);
  }

  __device__ void LoadScales(const uint8_t* memory, uint2 (&scale)[kHalves]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      scale[half] = *reinterpret_cast<const uint2*>(memory + scales_at_ + half * Layout::kHalfBytes);
  }

  template <int kSlots>
  __device__ void DecodeStep(const ChunkReader<kCodes>& reader, int step, const uint2& scale, Fragment<kCodes>& operand) const {
    const uint32_t zero[2] = {zero_, zero_};
    reader.Decode(step, zero, operand);
    if constexpr (kCodes == Codes::kBf16) {
      // By an operation with a 0 that the compiler does not know: else the operand would be the registers that chunks are loaded
      // into, while a product still reads them.
#pragma unroll
      for (int reg = 0; reg < 4; ++reg)
        asm volatile("xor.b32 %0, %1, %2;\n" : "=r"(operand[0][reg]) : "r"(operand[0][reg]), "r"(zero_));
    }
    if constexpr (kSlots > 0) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) operand[0][reg] = MultiplyPair(operand[0][reg], reg % 2 == 0 ? scale.x : scale.y);
    }
  }

  // The one group's scales of the thread's two features of a half, or 1.
  __device__ void LastScales(const HopperWork& work, int half, float (&scale)[2]) const {
    scale[0] = scale[1] = 1.0f;
    if (w_.groups != 1) return;
    const int bytes = ScaleBytesOf(w_.scale), thread = threadIdx.x % kTileThreads;
    const int64_t first = static_cast<int64_t>(work.first_row_tile + tile()) * kTileRows + half * kHalfRows + thread / 32 * 16 +
                          thread % 32 / 4;
    const uint8_t* scales = w_.scales + work.tile.expert * w_.scales_stride + first * bytes;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float global = w_.globals[static_cast<int64_t>(work.tile.expert) * 2 + second];
      scale[second] = global * ScaleOfBits(w_.scale, LoadBits(scales + second * 8 * bytes, bytes));
    }
  }

  __device__ void Store(const HopperWork& work) const {
    const TileStore store(args_, work.tile, work.first_row_tile + tile(), threadIdx.x % kTileThreads, nullptr);
    float scale[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) LastScales(work, first_half() + half, scale[half]);
    const auto sum = [&](int half, int column, int at) { return sums_[half][column * 4 + at] * scale[half][at / 2]; };
    store.Store<kTokens / 8, kHalves, true>(sum, first_half());
  }

  __device__ static int group() { return threadIdx.x / kTileThreads - 1; }
  __device__ static int tile() { return group() * kHalves / 2; }  // of the piece of work
  __device__ static int first_half() { return group() * kHalves % 2; }

  const GemmArgs& args_;
  const MatrixArgs& w_;
  const HopperWorkList& list_;
  const Ring<Layout> ring_;
  const int blocks_, slots_;
  const uint32_t zero_;                    // as ChunkReader wants it; of bf16 a 0
  const uint32_t weights_at_, scales_at_;  // in a stage, of the thread's first half
  RingPlace<Layout::kStages> place_;
  Fragment<kCodes> operand_[kOperands];
  float sums_[kHalves][kTokens / 2];
};

template <Codes kCodes, int kTokens>
__global__ void __launch_bounds__(HopperLayout<kCodes, kTokens>::kThreads, 1)
    HopperGemm(const GemmArgs* global_args, const SortArgs* sort) {
  using Layout = HopperLayout<kCodes, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ __align__(8) uint64_t barriers[2 * Layout::kStages];
  __shared__ HopperWorkList list;
  static_assert(sizeof(words) + sizeof(barriers) + sizeof(list) <= kHopperStatic);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(GemmArgs) / 8); i += Layout::kThreads)
    words[i] = reinterpret_cast<const uint64_t*>(global_args)[i];
  const uint32_t full = Opaque(SharedAddress(barriers));
  const Ring<Layout> ring = {Opaque((SharedAddress(memory) + 1023) / 1024 * 1024), full, full + Layout::kStages * 8};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      InitBarrier(ring.Full(stage), ScaledSlots<kCodes>(global_args->weights) > 0 ? 1 + kScaleLanes : 1);
      InitBarrier(ring.Empty(stage), Layout::kMathGroups * kTileThreads / 32);
    }
    FenceBarrierInit();
  }
  BeginAfterEarlier();
  if (threadIdx.x == 0) list.Fill(*sort, global_args->weights, Layout::kTiles);
  __syncthreads();
  const GemmArgs& args = *reinterpret_cast<const GemmArgs*>(words);
  if (threadIdx.x < kTileThreads) {
    FewerRegisters<ProducerRegisters(Layout::kMathGroups)>();
    ProduceBlocks<kCodes, kTokens>(args, list, ring);
  } else {
    MoreRegisters<MathRegisters(Layout::kMathGroups)>();
    HopperMath<kCodes, kTokens> math(args, list, ring);
    for (int at = blockIdx.x; at < list.size(); at += gridDim.x) math.Run(at);
  }
}

template <Codes kCodes, int kTokens>
cudaError_t LaunchHopperTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Layout = HopperLayout<kCodes, kTokens>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(HopperGemm<kCodes, kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  const int work = launch.tiles * ((launch.row_tiles + Layout::kTiles - 1) / Layout::kTiles);
  return LaunchAfter(HopperGemm<kCodes, kTokens>, work < processors ? work : processors, Layout::kThreads, Layout::kBytes, stream,
                     args, sort);
}

// Every number of rows of one kind of codes.
template <Codes kCodes>
cudaError_t LaunchHopperOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if constexpr (kCodes != Codes::kBf16) {
    if (launch.tokens == 192) return LaunchHopperTiles<kCodes, 192>(launch, args, sort, stream);
    if (launch.tokens == 256) return LaunchHopperTiles<kCodes, 256>(launch, args, sort, stream);
  }
  switch (launch.tokens) {
    case 32: return LaunchHopperTiles<kCodes, 32>(launch, args, sort, stream);
    case 48: return LaunchHopperTiles<kCodes, 48>(launch, args, sort, stream);
    case 64: return LaunchHopperTiles<kCodes, 64>(launch, args, sort, stream);
    case 96: return LaunchHopperTiles<kCodes, 96>(launch, args, sort, stream);
    case 128: return LaunchHopperTiles<kCodes, 128>(launch, args, sort, stream);
    case 144: return LaunchHopperTiles<kCodes, 144>(launch, args, sort, stream);
    case 160: return LaunchHopperTiles<kCodes, 160>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_INL_CUH_
