// Prefill on Hopper: 16-bit activations times packed weights by wgmma, weights decoded into its register operand.
//
// A thread block of three warpgroups owns two row tiles (256 features) and one tile of kTokens rows. The first warpgroup fills a
// ring in shared memory: rows by cp.async, since they are gathered; weights and scales by bulk copies, since they are contiguous.
// Each of the other two multiplies one row tile: both halves, gate's and up's in a paired matrix, so that a feature's two sums end
// in the same thread. While products of a step run, the next step's weights are decoded. Under scales of groups a weight is rounded
// to bf16 twice, its scale and the code times that; one scale for all inputs multiplies the sums instead, and nothing is rounded.
// Codes have no stored zero points: where their mean is far from 0, the rounding of a group's weights would not average out. Sums
// are float32 in the order of the tensor cores, so their last bits differ from those of gemm-inl.cuh; they depend on the row and
// the weights only.
//
// Barriers of a stage: `full` has the arrivals of the producer's threads (their rows are visible to the tensor cores) and the bytes
// of the bulk copies; `empty` has one arrival of each multiplying warp.
#ifndef MOED_KERNELS_CUDA_HOPPER_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wgmma-inl.cuh"

namespace moed::cuda {

inline constexpr int kHopperTiles = 2;                              // row tiles of a thread block
inline constexpr int kHopperThreads = (kHopperTiles + 1) * kTileThreads;
inline constexpr int kProducerRegisters = 80, kMathRegisters = 208;  // of 65536: 128 x 80 + 256 x 208
inline constexpr int kTilesAtOnce = 8;                              // row tiles of rows that are walked together, for the L2 cache

template <Codes kCodes, int kTokens>
struct HopperLayout {
  static constexpr int kRowBytes = kBlockDepth * 2;
  static constexpr int kRows = 0;                                   // aligned to 1024 bytes, as every stage is
  static constexpr int kWeights = kTokens * kRowBytes;              // [row tile]
  static constexpr int kScales = kWeights + kHopperTiles * BlockBytes(kCodes);   // [row tile][slot][128] of at most 4 bytes
  static constexpr int kScaleBytes = kSteps * kTileRows * 4;
  static constexpr int kStageBytes = (kScales + kHopperTiles * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = kStageBytes > 40 * 1024 ? 4 : 5;  // at least the producer's lag and two
  static constexpr int kBytes = kStages * kStageBytes + 1024;       // and what aligning the first takes
};

// What every thread of the block knows.
template <Codes kCodes, int kTokens>
struct HopperTile {
  using Layout = HopperLayout<kCodes, kTokens>;
  const GemmArgs& args;
  Tile tile;
  int first_row_tile;
  int row_tiles;      // 1 or 2
  const int* rows;    // of x, -1 beyond the tile
  uint32_t ring, full, empty;  // shared addresses; barriers of 8 bytes

  __device__ uint32_t Stage(int stage) const { return ring + stage * Layout::kStageBytes; }
  __device__ uint32_t Full(int stage) const { return full + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return empty + stage * 8; }
};

// --- load ---

// The rows of a block: the thread copies the same 16 bytes of every 16th row, whose swizzle is the same.
template <int kTokens>
class RowCopies {
 public:
  static constexpr int kRowStep = kTileThreads / 8, kPieces = kTokens / kRowStep, kRowBytes = kBlockDepth * 2;

  // Rows beyond the tile copy its first: what is made of them is never stored.
  __device__ RowCopies(const Operand& x, const int* rows) {
    const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
    to_ = first * kRowBytes + ((piece ^ (first % 8)) * 16);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = rows[first + i * kRowStep];
      from_[i] = static_cast<const uint16_t*>(x.data) + (row < 0 ? rows[0] : row) * x.row_stride + piece * 8;
    }
  }

  // The next block's, to the rows of a stage.
  __device__ void Copy(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      CopyAsync16(stage + to_ + i * kRowStep * kRowBytes, from_[i]);
      from_[i] += kBlockDepth;
    }
  }

 private:
  uint32_t to_;
  const uint16_t* from_[kPieces];
};

// The weights of a block with the scales of its slots: a lane for each row tile.
template <Codes kCodes, int kTokens>
class WeightCopies {
 public:
  using Layout = HopperLayout<kCodes, kTokens>;

  __device__ explicit WeightCopies(const HopperTile<kCodes, kTokens>& tile) : w_(tile.args.weights), lane_(threadIdx.x % 32) {
    const int64_t expert = tile.tile.expert, row_tile = tile.first_row_tile + lane_;
    has_tile_ = lane_ < tile.row_tiles;
    codes_ = w_.codes + expert * w_.codes_stride + row_tile * w_.blocks * BlockBytes(kCodes);
    scale_bytes_ = w_.scale == ScaleType::kF32 ? 4 : w_.scale == ScaleType::kE8m0 || w_.scale == ScaleType::kE4m3 ? 1 : 2;
    slots_ = w_.groups > 1 ? w_.slots : 0;  // one group for all inputs scales the sums instead
    scales_ = w_.scales + expert * w_.scales_stride + row_tile * w_.groups * kTileRows * scale_bytes_;
    step_groups_ = w_.step_groups != nullptr ? w_.step_groups + expert * w_.step_groups_stride : nullptr;
    per_group_ = 1.0f / static_cast<float>(max(w_.group_steps, 1));
    bytes_ = tile.row_tiles * (BlockBytes(kCodes) + kTileRows * slots_ * scale_bytes_);
  }

  // Those of the next block; all lanes of one warp.
  __device__ void Copy(int block, uint32_t stage, uint32_t full) {
    if (lane_ == 0) ArriveExpecting(full, bytes_);
    __syncwarp();
    if (!has_tile_) return;
    CopyBulk(stage + Layout::kWeights + lane_ * BlockBytes(kCodes), codes_, BlockBytes(kCodes), full);
    codes_ += BlockBytes(kCodes);
    for (int slot = 0; slot < slots_; ++slot) {
      const int64_t group = GroupOf(block * kSteps + slot * kSteps / slots_);
      CopyBulk(stage + Layout::kScales + lane_ * Layout::kScaleBytes + slot * kTileRows * scale_bytes_,
               scales_ + group * kTileRows * scale_bytes_, kTileRows * scale_bytes_, full);
    }
  }

 private:
  __device__ int GroupOf(int step) const {
    if (step_groups_ != nullptr) return step_groups_[step];
    return min(static_cast<int>((static_cast<float>(step) + 0.5f) * per_group_), w_.groups - 1);
  }

  const MatrixArgs& w_;
  const int lane_;
  bool has_tile_;
  const uint8_t *codes_, *scales_;
  const int32_t* step_groups_;
  int scale_bytes_, slots_;
  uint32_t bytes_;
  float per_group_;
};

// The first warpgroup: rows by all of its threads, weights by its first warp.
template <Codes kCodes, int kTokens>
__device__ void ProduceBlocks(const HopperTile<kCodes, kTokens>& t) {
  using Layout = HopperLayout<kCodes, kTokens>;
  constexpr int kLag = 2;  // blocks whose rows are under way
  const int blocks = t.args.weights.blocks;
  RowCopies<kTokens> rows(t.args.x, t.rows);
  WeightCopies<kCodes, kTokens> weights(t);
  int stage = 0, parity = 1;  // a fresh barrier counts as passed with parity 1
  int ready = 0;              // stage whose rows arrive next
  for (int block = 0; block < blocks + kLag; ++block) {
    if (block < blocks) {
      WaitBarrier(t.Empty(stage), parity);
      if (threadIdx.x < 32) weights.Copy(block, t.Stage(stage), t.Full(stage));
      rows.Copy(t.Stage(stage) + Layout::kRows);
      stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
      if (stage == 0) parity ^= 1;
    }
    CommitCopies();
    if (block < kLag) continue;
    WaitCopies<kLag>();
    FenceToTensorCores();
    Arrive(t.Full(ready));
    ready = ready + 1 == Layout::kStages ? 0 : ready + 1;
  }
}

// --- math ---

// One warpgroup's row tile.
template <Codes kCodes, int kTokens>
class HopperMath {
 public:
  using Layout = HopperLayout<kCodes, kTokens>;

  __device__ HopperMath(const HopperTile<kCodes, kTokens>& tile, int which)
      : t_(tile),
        w_(tile.args.weights),
        which_(which),
        thread_(threadIdx.x % kTileThreads),
        blocks_(w_.blocks),
        zero_(ZeroOperand<kCodes>(w_.zero)),
        scale_type_(w_.scale) {
    for (int half = 0; half < 2; ++half) global_[half] = w_.globals[static_cast<int64_t>(tile.tile.expert) * 2 + half];
  }

  __device__ void Run() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int at = 0; at < kTokens / 2; ++at) sums_[half][at] = 0.0f;
    }
    // One group for all inputs scales the sums instead.
    if (w_.groups <= 1) return RunLoop<0>();
    if (w_.slots == 1) return RunLoop<1>();
    if (w_.slots == 2) return RunLoop<2>();
    RunLoop<4>();
  }

  __device__ void Store() const {
    float scale[2][2];
    LoadLastScales(scale);
    const TileStore store(t_.args, t_.tile, t_.first_row_tile + which_, thread_, t_.rows);
    store.Store<kTokens / 8>([&](int half, int column, int at) { return sums_[half][column * 4 + at] * scale[half][at / 2]; });
  }

 private:
  using Scales = uint32_t[2][2];  // bf16 pairs, of the thread's two features of each half

  template <int kSlots>
  __device__ void RunLoop() {
    int stage = 0, parity = 0, previous = -1;
    for (int block = 0; block < blocks_; ++block) {
      WaitBarrier(t_.Full(stage), parity);
      MultiplyBlock<kSlots>(stage, previous);
      previous = stage;
      stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
      if (stage == 0) parity ^= 1;
    }
    WaitProducts<0>();
  }

  template <int kSlots>
  __device__ void MultiplyBlock(int stage, int previous) {
    const uint8_t* base = reinterpret_cast<const uint8_t*>(__cvta_shared_to_generic(t_.Stage(stage)));
    const uint8_t* weights = base + Layout::kWeights + which_ * BlockBytes(kCodes) + thread_ * kChunkBytes;
    const uint8_t* scales = base + Layout::kScales + which_ * Layout::kScaleBytes;
    constexpr int kLast = kSlots == 0 ? kSteps : kSteps / kSlots;  // steps of a slot
    ChunkReader<kCodes> reader[2];
    Scales scale;
    const uint32_t zero[2] = {zero_, zero_};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step % kLast == 0) {
        const int slot = step / kLast;
        if constexpr (kSlots > 0) LoadScales(scales, slot, scale);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reader[half].Load(weights, half, step);
        reader[half].Decode(step, zero, operand_[step % 2][half]);
        if constexpr (kSlots > 0) {
#pragma unroll
          for (int reg = 0; reg < 4; ++reg)
            operand_[step % 2][half][0][reg] = MultiplyPair(operand_[step % 2][half][0][reg], scale[half][reg % 2]);
        }
      }
      const uint64_t b = OperandB(t_.Stage(stage) + Layout::kRows + step * kStepDepth * 2);
      BeginProducts();
#pragma unroll
      for (int half = 0; half < 2; ++half) WarpgroupProduct<kTokens>::Add(sums_[half], operand_[step % 2][half][0], b);
      CommitProducts();
      WaitProducts<1>();  // those of the step before: their operand is free, and after the first step their stage
      if (step == 0 && previous >= 0 && threadIdx.x % 32 == 0) Arrive(t_.Empty(previous));
    }
  }

  __device__ int FeatureInTile(int half, int second) const {
    return half * kHalfRows + thread_ / 32 * 16 + thread_ % 32 / 4 + second * 8;
  }

  // Of the thread's four features, the `at`-th 128 of an array.
  __device__ void ReadScales(const uint8_t* scales, int64_t at, float (&scale)[2][2]) const {
    WithScale(scale_type_, [&](const auto& decode) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          scale[half][second] = global_[half] * decode(scales, static_cast<int>(at * kTileRows) + FeatureInTile(half, second));
        }
      }
    });
  }

  __device__ void LoadScales(const uint8_t* scales, int slot, Scales& out) const {
    float scale[2][2];
    ReadScales(scales, slot, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) out[half][second] = PackBf16(scale[half][second], scale[half][second]);
    }
  }

  // Of the one group, or 1.
  __device__ void LoadLastScales(float (&scale)[2][2]) const {
    scale[0][0] = scale[0][1] = scale[1][0] = scale[1][1] = 1.0f;
    if (w_.groups == 1) ReadScales(w_.scales + t_.tile.expert * w_.scales_stride, t_.first_row_tile + which_, scale);
  }

  const HopperTile<kCodes, kTokens>& t_;
  const MatrixArgs& w_;
  const int which_, thread_, blocks_;
  const uint32_t zero_;  // as ChunkReader wants it
  const ScaleType scale_type_;
  float global_[2];
  Fragment<kCodes> operand_[2][2];  // [step mod 2][half]
  float sums_[2][kTokens / 2];
};

// Which tile of rows and which row tiles a thread block works on: kTilesAtOnce tiles of rows are walked together over all row
// tiles, so that weights and rows stay in the L2 cache.
__device__ inline void FindHopperWork(int tiles, int row_pairs, int* tile, int* row_pair) {
  const int work = blockIdx.x, band = kTilesAtOnce * row_pairs;
  const int first = work / band * kTilesAtOnce, in_band = work % band;
  const int width = min(kTilesAtOnce, tiles - first);
  *tile = first + in_band % width;
  *row_pair = in_band / width;
}

template <Codes kCodes, int kTokens>
__global__ void __launch_bounds__(kHopperThreads, 1) HopperGemm(const GemmArgs* args, const SortArgs* sort) {
  using Layout = HopperLayout<kCodes, kTokens>;
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t words[sizeof(GemmArgs) / 8];
  __shared__ __align__(8) uint64_t barriers[2 * Layout::kStages];
  __shared__ int rows[kTokens];
  const int tiles = sort->totals[1], row_tiles = args->weights.row_tiles;
  const int row_pairs = (row_tiles + kHopperTiles - 1) / kHopperTiles;
  if (static_cast<int>(blockIdx.x) >= tiles * row_pairs) return;
  int at, row_pair;
  FindHopperWork(tiles, row_pairs, &at, &row_pair);
  const Tile tile = sort->tiles[at];
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(GemmArgs) / 8); i += kHopperThreads)
    words[i] = reinterpret_cast<const uint64_t*>(args)[i];
  if (threadIdx.x < kTokens) {
    const int sorted = tile.begin + threadIdx.x;
    rows[threadIdx.x] = static_cast<int>(threadIdx.x) >= tile.count ? -1 : args->x.by_sorted_row ? sorted : sort->source[sorted];
  }
  const uint32_t start = (SharedAddress(ring) + 1023) / 1024 * 1024, full = SharedAddress(barriers),
                 empty = full + Layout::kStages * 8;
  const int math_tiles = min(kHopperTiles, row_tiles - row_pair * kHopperTiles);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      InitBarrier(full + stage * 8, kTileThreads + 1);
      InitBarrier(empty + stage * 8, math_tiles * 4);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const HopperTile<kCodes, kTokens> work = {
      *reinterpret_cast<const GemmArgs*>(words), tile, row_pair * kHopperTiles, math_tiles, rows, start, full, empty};
  if (threadIdx.x < kTileThreads) {
    FewerRegisters<kProducerRegisters>();
    ProduceBlocks(work);
  } else {
    MoreRegisters<kMathRegisters>();
    const int which = threadIdx.x / kTileThreads - 1;
    if (which < math_tiles) {
      HopperMath<kCodes, kTokens> math(work, which);
      math.Run();
      math.Store();
    }
  }
}

template <Codes kCodes, int kTokens>
cudaError_t LaunchHopperTiles(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  using Layout = HopperLayout<kCodes, kTokens>;
  const cudaError_t error =
      cudaFuncSetAttribute(HopperGemm<kCodes, kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  const int row_pairs = (launch.row_tiles + kHopperTiles - 1) / kHopperTiles;
  HopperGemm<kCodes, kTokens><<<launch.tiles * row_pairs, kHopperThreads, Layout::kBytes, stream>>>(args, sort);
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
