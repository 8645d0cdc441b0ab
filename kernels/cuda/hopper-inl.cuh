// Products on Hopper: rows of bf16 values or codes times packed weights by wgmma, weights decoded into its register operand.
//
// Two warpgroups of a thread block multiply, each one row tile (both halves, gate's and up's in a paired matrix, so that a feature's
// two sums end in the same thread) with the same tile of rows; a third fills the ring that both read (hopper_ring-inl.cuh). Three
// products are under way while the next one's weights are decoded. Under scales of groups a weight is rounded to bf16 twice,
// its scale and the code times that; one scale for all inputs multiplies the sums instead, and nothing is rounded. Codes have no
// stored zero points: where their mean is far from 0, the rounding of a group's weights would not average out. Sums are float32 in
// the order of the tensor cores, so their last bits differ from those of gemm-inl.cuh; they depend on the row and the weights only.
#ifndef MOED_KERNELS_CUDA_HOPPER_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/hopper_ring-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wgmma-inl.cuh"

namespace moed::cuda {

inline constexpr int kProducerRegisters = 56, kMathRegisters = 224;  // of 65536: 128 x 56 + 256 x 224

// One warpgroup's row tile of every piece of work.
template <Codes kCodes, int kTokens>
class HopperMath {
 public:
  using Layout = HopperLayout<kCodes, kTokens>;

  __device__ HopperMath(const GemmArgs& args, const HopperWorkList& list, const Ring<Layout>& ring, int which)
      : args_(args),
        w_(args.weights),
        list_(list),
        ring_(ring),
        which_(which),
        thread_(threadIdx.x % kTileThreads),
        blocks_(w_.blocks),
        slots_(ScaledSlots<kCodes>(w_)),
        zero_(ZeroOperand<kCodes>(w_.zero)) {}

  // Piece `at` of the list, which is looked up again when it is stored: the registers are the sums'.
  __device__ void Run(int at) {
    if (which_ >= list_.Get(at).row_tiles) return PassBlocks();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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
      Release(place_.stage);
      place_.Next();
    }
  }

  __device__ void Release(int stage) const {
    if (threadIdx.x % 32 == 0) Arrive(ring_.Empty(stage));
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
    int previous = -1;
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(ring_.Full(place.stage), place.parity);
      MultiplyBlock<kSlots>(place.stage, previous);
      previous = place.stage;
      place.Next();
    }
    WaitProducts<0>();
    Release(previous);
    place_ = place;
  }

  template <int kSlots>
  __device__ void MultiplyBlock(int stage, int previous) {
    const uint32_t base = Uniform(ring_.Stage(stage));
    const uint8_t* memory = reinterpret_cast<const uint8_t*>(__cvta_shared_to_generic(base));
    const uint8_t* weights = memory + Layout::kWeights + which_ * BlockBytes(kCodes) + thread_ * kChunkBytes;
    const uint8_t* scales = memory + Layout::kScales + which_ * Layout::kScaleBytes + (thread_ / 32 * 8 + thread_ % 32 / 4) * 16;
    constexpr int kLast = kSlots == 0 ? kSteps : kSteps / kSlots;  // steps of a slot
    ChunkReader<kCodes> reader[2];
    uint4 scale = {};  // pairs of the thread's four features
    const uint32_t zero[2] = {zero_, zero_};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kSlots > 0) {
        if (step % kLast == 0) scale = *reinterpret_cast<const uint4*>(scales + step / kLast * Layout::kSlotBytes);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fragment<kCodes>& operand = operand_[step % 2][half];
        reader[half].Load(weights, half, step);
        reader[half].Decode(step, zero, operand);
        if constexpr (kSlots > 0) {
          const uint32_t pair[2] = {half == 0 ? scale.x : scale.z, half == 0 ? scale.y : scale.w};
#pragma unroll
          for (int reg = 0; reg < 4; ++reg) operand[0][reg] = MultiplyPair(operand[0][reg], pair[reg % 2]);
        }
        BeginProducts();
        WarpgroupProduct<kTokens>::Add(sums_[half], operand[0], OperandB(base + Layout::kRows + step * kStepDepth * 2));
        CommitProducts();
        WaitProducts<3>();  // the next product's operand is free, and after the second step the last block's stage
        if (step == 1 && half == 1 && previous >= 0) Release(previous);
      }
    }
  }

  // The one group's scales of the thread's four features, or 1.
  __device__ void LastScales(const HopperWork& work, float (&scale)[2][2]) const {
    scale[0][0] = scale[0][1] = scale[1][0] = scale[1][1] = 1.0f;
    if (w_.groups != 1) return;
    const uint8_t* scales = w_.scales + work.tile.expert * w_.scales_stride;
    const int64_t first = static_cast<int64_t>(work.first_row_tile + which_) * kTileRows + thread_ / 32 * 16 + thread_ % 32 / 4;
    const int bytes = ScaleBytesOf(w_.scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float global = w_.globals[static_cast<int64_t>(work.tile.expert) * 2 + half];
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t bits = LoadBits(scales + (first + half * kHalfRows + second * 8) * bytes, bytes);
        scale[half][second] = global * ScaleOfBits(w_.scale, bits);
      }
    }
  }

  __device__ void Store(const HopperWork& work) const {
    float scale[2][2];
    LastScales(work, scale);
    const TileStore store(args_, work.tile, work.first_row_tile + which_, thread_, nullptr);
    store.Store<kTokens / 8>([&](int half, int column, int at) { return sums_[half][column * 4 + at] * scale[half][at / 2]; });
  }

  const GemmArgs& args_;
  const MatrixArgs& w_;
  const HopperWorkList& list_;
  const Ring<Layout> ring_;
  const int which_, thread_, blocks_, slots_;
  const uint32_t zero_;  // as ChunkReader wants it
  RingPlace<Layout::kStages> place_;
  Fragment<kCodes> operand_[2][2];  // [step mod 2][half]
  float sums_[2][kTokens / 2];
};

template <Codes kCodes, int kTokens>
__global__ void __launch_bounds__(kHopperThreads, 1) HopperGemm(const GemmArgs* global_args, const SortArgs* sort) {
  using Layout = HopperLayout<kCodes, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ __align__(8) uint64_t barriers[2 * Layout::kStages];
  __shared__ HopperWorkList list;
  static_assert(sizeof(words) + sizeof(barriers) + sizeof(list) <= kHopperStatic);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(GemmArgs) / 8); i += kHopperThreads)
    words[i] = reinterpret_cast<const uint64_t*>(global_args)[i];
  const uint32_t full = Opaque(SharedAddress(barriers));
  const Ring<Layout> ring = {Opaque((SharedAddress(memory) + 1023) / 1024 * 1024), full, full + Layout::kStages * 8};
  if (threadIdx.x == 0) {
    list.Fill(*sort, global_args->weights);
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      InitBarrier(ring.Full(stage), ScaledSlots<kCodes>(global_args->weights) > 0 ? 1 + kScaleWarps : 1);
      InitBarrier(ring.Empty(stage), kHopperTiles * kTileThreads / 32);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const GemmArgs& args = *reinterpret_cast<const GemmArgs*>(words);
  if (threadIdx.x < kTileThreads) {
    FewerRegisters<kProducerRegisters>();
    ProduceBlocks<kCodes, kTokens>(args, list, ring);
  } else {
    MoreRegisters<kMathRegisters>();
    HopperMath<kCodes, kTokens> math(args, list, ring, threadIdx.x / kTileThreads - 1);
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
  const int work = launch.tiles * ((launch.row_tiles + kHopperTiles - 1) / kHopperTiles);
  HopperGemm<kCodes, kTokens><<<work < processors ? work : processors, kHopperThreads, Layout::kBytes, stream>>>(args, sort);
  return cudaGetLastError();
}

// Every number of rows of one kind of codes.
template <Codes kCodes>
cudaError_t LaunchHopperOf(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.tokens) {
    case 32: return LaunchHopperTiles<kCodes, 32>(launch, args, sort, stream);
    case 64: return LaunchHopperTiles<kCodes, 64>(launch, args, sort, stream);
    case 128: return LaunchHopperTiles<kCodes, 128>(launch, args, sort, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_INL_CUH_
