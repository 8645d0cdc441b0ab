// The ring of Hopper's products (hopper-inl.cuh): inputs on their way from global to shared memory, a stage of one block of 64 or
// two.
//
// A persistent thread block works on a tile of kTokens rows and up to three row tiles (128 features each) after the other. Its
// first warpgroup fills the ring, also across the end of a piece of work: one thread copies rows and weights, both contiguous, by
// bulk copies; the other three warps make, stage by stage in turn, the pairs of bf16 that weights are multiplied by out of the
// scales of groups. The other two warpgroups multiply, a row tile each, or of one row tile a half (64 features) each.
//
// Barriers of a stage: `full` has one arrival of the copying thread, the bytes of its copies, and one of each thread of a scaling
// warp where there are groups; `empty` has one arrival of each multiplying thread.
#ifndef MOED_KERNELS_CUDA_HOPPER_RING_INL_CUH_
#define MOED_KERNELS_CUDA_HOPPER_RING_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode_scaled-inl.cuh"
#include "kernels/cuda/device-inl.cuh"
#include "kernels/cuda/wgmma-inl.cuh"

namespace moed::cuda {

inline constexpr int kScaleWarps = 3, kScaleLanes = 32;
inline constexpr int kHopperStatic = 1536;        // bytes of shared memory beside the ring, at most
inline constexpr int kMostStages = 8;
inline constexpr int kTilesAtOnce = 8;            // tiles of rows that are walked together, for the L2 cache

// Whether weights may have scales of groups.
constexpr bool IsScaled(Codes codes) { return codes != Codes::kBf16; }

// Of tiles of kTokens rows. `kZeros`: the codes have zero points of their own; `kMany`: groups of inputs end within 128, and there
// may be a slot of scales for each step, else one covers a stage.
template <Codes kCodes_, int kTokens_, bool kZeros_, bool kMany_>
struct HopperLayout {
  static constexpr Codes kCodes = kCodes_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kZeros = kZeros_, kMany = kMany_;
  // Halves of a row tile that a multiplying warpgroup has, as the registers for sums allow; how many warpgroups multiply (while one
  // decodes, the others' products run: with few rows two are not enough).
  static constexpr int kHalves = kTokens <= 160 ? 2 : 1;
  static constexpr int kMathGroups = kTokens <= 96 && IsScaled(kCodes) ? 3 : 2;
  // For how many batches of products each has operands, and the products of a batch, a half's of a block or two steps: as the
  // registers allow.
  static constexpr int kOperandSets = kMany && kMathGroups == 3 && kTokens > 64 ? 1 : 2;
  static constexpr int kBatch = kHalves == 2 && (kMathGroups == 2 || kTokens < 64 || kOperandSets == 1) ? kSteps : kSteps / 2;
  static constexpr int kTiles = kMathGroups * kHalves / 2;          // row tiles of all
  static constexpr int kThreads = (1 + kMathGroups) * kTileThreads;
  static constexpr int kRowBytes = kBlockDepth * 2, kBlockRows = kTokens * kRowBytes;
  static constexpr int kHalfBytes = kHalfRows / 2 * 4, kSlotBytes = 2 * kHalfBytes;
  static constexpr int kRoom = 227 * 1024 - kHopperStatic - 1024;   // the last: what aligning the first stage takes

  // What a warpgroup puts its results into (hopper_store-inl.cuh): so many rows at a time, of float32 at most, each 16 bytes
  // longer, against bank conflicts. A stage of bf16 weights is large, and there must be four of them.
  static constexpr int kChunk = IsScaled(kCodes) ? 32 : 16;
  static constexpr int kStagingBytes = kChunk * (kHalves * kHalfRows * 4 + 16);

  // Bytes of one row tile's scales in a stage of `blocks`, and of the stage, which is aligned to 1024 bytes; how many of them fit.
  static constexpr int ScaleBytesFor(int blocks) {
    return !IsScaled(kCodes) ? 0 : (kMany ? blocks * kSteps : 1) * kSlotBytes * (kZeros ? 2 : 1);
  }
  static constexpr int StageBytesFor(int blocks) {
    return (blocks * (kBlockRows + kTiles * BlockBytes(kCodes)) + kTiles * ScaleBytesFor(blocks) + 1023) / 1024 * 1024;
  }
  static constexpr int FittingFor(int blocks) { return (kRoom - kMathGroups * kStagingBytes) / StageBytesFor(blocks); }

  // Two blocks where three warpgroups multiply: half as many copies, barriers and scales (many slots have no registers in the
  // scaling warps, and larger tiles have no room for enough such stages). The second one may be one that the weights do not have:
  // its rows are zeros then, and what of its weights the stage had is finite, which bf16 ones might not be.
  static constexpr int kStageBlocks = kMathGroups == 3 && !kMany && FittingFor(2) >= 3 ? 2 : 1;
  static constexpr int kStageSteps = kStageBlocks * kSteps;
  static constexpr int kRows = 0;                                   // [block]
  static constexpr int kWeights = kStageBlocks * kBlockRows;        // [row tile][block]
  static constexpr int kTileBytes = kStageBlocks * BlockBytes(kCodes);
  // [row tile][slot][half][warp][g], a word each: the scales of features g and g + 8 as bf16; and as much again of their zero
  // points, as fields (decode_scaled-inl.cuh).
  static constexpr int kScales = kWeights + kTiles * kTileBytes;
  static constexpr int kScaleBytes = ScaleBytesFor(kStageBlocks);
  static constexpr int kZeroPlace = kScaleBytes / 2;
  static constexpr int kStageBytes = StageBytesFor(kStageBlocks);
  static constexpr int kFitting = FittingFor(kStageBlocks);
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr int kStaging = kStages * kStageBytes;            // [warpgroup]
  static constexpr int kBytes = kStaging + kMathGroups * kStagingBytes + 1024;
  static_assert(kStages >= 3);
};

// A place in the ring that moves on. The parity is that of the barriers' phases.
template <int kStages>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ void Next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
  __device__ int Previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// Shared addresses.
template <typename Layout>
struct Ring {
  uint32_t stages, full, empty;  // barriers of 8 bytes

  __device__ uint32_t Stage(int stage) const { return stages + stage * Layout::kStageBytes; }
  __device__ uint32_t Full(int stage) const { return full + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return empty + stage * 8; }

  // A multiplying thread has read all that it wants of the stage. Each arrives for itself: that costs nothing that can be
  // measured, and one that arrives for its warp looks like a race to tools.
  __device__ void Release(int stage) const { Arrive(Empty(stage)); }
};

// A piece of work: a tile of rows and the first of its row tiles.
struct alignas(16) HopperWork {
  Tile tile;
  int first_row_tile;
  int row_tiles;  // at most Layout::kTiles
};

// All pieces of work of a product; those of a thread block are blockIdx.x and every gridDim.x-th from there. kTilesAtOnce tiles of
// rows are walked together over all row tiles, so that weights and rows stay in the L2 cache.
struct HopperWorkList {
  const Tile* tiles;
  int tile_count, row_tiles, each, steps;  // row tiles of a piece at most, and pieces of all row tiles

  __device__ void Fill(const SortArgs& sort, const MatrixArgs& weights, int most, bool rests) {
    tiles = sort.tiles + (rests ? sort.rest_first : 0);
    tile_count = sort.totals[rests ? 2 : 1];
    row_tiles = weights.row_tiles;
    each = EachFor(most);
    steps = StepsOf(each);
  }

  __device__ int size() const { return tile_count * steps; }
  __device__ int StepsOf(int at_once) const { return (row_tiles + at_once - 1) / at_once; }

  // Row tiles of a piece: fewer than there are warpgroups for where the pieces would not come out even over the thread blocks. In
  // hundredths of a full piece's time, what one of one or two row tiles takes.
  __device__ int EachFor(int most) const {
    constexpr int kTimes[][4] = {{0, 100, 0, 0}, {0, 62, 100, 0}, {0, 55, 78, 100}};
    int best = most, least = 0;
    for (int at_once = most; at_once >= 1; --at_once) {
      const int grid = static_cast<int>(gridDim.x), waves = (tile_count * StepsOf(at_once) + grid - 1) / grid;
      const int time = waves * kTimes[most - 1][at_once];
      if (at_once == most || time < least) best = at_once, least = time;
    }
    return best;
  }

  __device__ HopperWork Get(int at) const {
    const int band = kTilesAtOnce * steps;
    const int first = at / band * kTilesAtOnce, in_band = at % band, width = min(kTilesAtOnce, tile_count - first);
    const int row_tile = in_band / width * each;
    return {tiles[first + in_band % width], row_tile, min(each, row_tiles - row_tile)};
  }
};

// What the copying thread tells the multiplying warps of the pieces of work, each before its first block is full: they would wait
// for memory. It is at most as many pieces ahead as there are stages.
struct WorkBoard {
  static constexpr int kPlaces = 2 * kMostStages;
  HopperWork works[kPlaces];
  __device__ HopperWork& At(int piece) { return works[piece % kPlaces]; }
};

// The rows of a block that there is not.
__device__ const uint4 kZeroRows[256 * kBlockDepth * 2 / sizeof(uint4)] = {};

// The copying thread. Rows beyond the tile keep what the stage had: what is made of them is never stored.
template <typename Layout>
__device__ void CopyBlocks(const GemmArgs& args, const HopperWorkList& list, const Ring<Layout>& ring, WorkBoard& board) {
  constexpr int kCodesBytes = BlockBytes(Layout::kCodes);
  RingPlace<Layout::kStages> place{0, 1};  // a fresh barrier counts as passed with parity 1
  const MatrixArgs& w = args.weights;
  const int blocks = w.blocks;
  const int64_t tile_bytes = static_cast<int64_t>(blocks) * kCodesBytes;
  for (int at = blockIdx.x, piece = 0; at < list.size(); at += gridDim.x, ++piece) {
    const HopperWork work = list.Get(at);
    WaitBarrier(ring.Empty(place.stage), place.parity);  // so far behind at most are those who read the board
    board.At(piece) = work;
    const uint16_t* rows = static_cast<const uint16_t*>(args.x.data) + static_cast<int64_t>(work.tile.begin) * kBlockDepth;
    const uint8_t* codes = w.codes + work.tile.expert * w.codes_stride + work.first_row_tile * tile_bytes;
    const uint32_t row_bytes = work.tile.count * Layout::kRowBytes;
    for (int block = 0; block < blocks; block += Layout::kStageBlocks) {
      const int count = min(Layout::kStageBlocks, blocks - block);
      const uint32_t stage = ring.Stage(place.stage), full = ring.Full(place.stage), code_bytes = count * kCodesBytes;
      WaitBarrier(ring.Empty(place.stage), place.parity);
      ArriveExpecting(full, Layout::kStageBlocks * row_bytes + work.row_tiles * code_bytes);
      CopyBulk(stage + Layout::kRows, rows, row_bytes, full);
      if constexpr (Layout::kStageBlocks == 2) {
        const void* const second = count == 2 ? static_cast<const void*>(rows + args.x.panel_stride) : kZeroRows;
        CopyBulk(stage + Layout::kRows + Layout::kBlockRows, second, row_bytes, full);
      }
      for (int tile = 0; tile < work.row_tiles; ++tile)
        CopyBulk(stage + Layout::kWeights + tile * Layout::kTileBytes, codes + tile * tile_bytes, code_bytes, full);
      rows += count * args.x.panel_stride;
      codes += code_bytes;
      place.Next();
    }
  }
}

// The scales of one row tile for the threads that multiply it, and the zero points: a lane has those of one reader (ScalePlace).
template <typename Layout, int kSlotSteps>
class ScaleMaker {
 public:
  static constexpr int kSlots = Layout::kStageSteps / kSlotSteps;
  struct Raw {
    uint32_t scales[kSlots][4] = {};
    uint32_t zeros[Layout::kZeros ? kSlots : 1] = {};  // four bytes each
  };

  __device__ ScaleMaker(const MatrixArgs& w, const HopperWork& work) : w_(w), bytes_(ScaleBytesOf(w.scale)) {
    const int64_t expert = work.tile.expert;
    const int64_t first = static_cast<int64_t>(work.first_row_tile) * w.groups * kTileRows + threadIdx.x % 32 * 4;
    from_ = w.scales + expert * w.scales_stride + first * bytes_;
    if constexpr (Layout::kZeros) zeros_ = w.zeros + expert * w.zeros_stride + first;
    step_groups_ = w.step_groups != nullptr ? w.step_groups + expert * w.step_groups_stride : nullptr;
    per_group_ = 1.0f / static_cast<float>(max(w.group_steps, 1));
    for (int second = 0; second < 2; ++second)
      factor_[second] = (w.groups == 1 ? 1.0f : w.globals[expert * 2 + second]) * ScaleFactor<Layout::kCodes>(second);
  }

  // Of the stage that begins with step `first` of the matrix.
  __device__ void Read(int tile, int first, Raw& raw) const {
    const int64_t of_tile = static_cast<int64_t>(tile) * w_.groups * kTileRows;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int64_t at = of_tile + GroupOf(first + slot * kSlotSteps) * kTileRows;
      LoadFour(from_ + at * bytes_, bytes_, raw.scales[slot]);
      if constexpr (Layout::kZeros) raw.zeros[slot] = __ldg(reinterpret_cast<const uint32_t*>(zeros_ + at));
    }
  }

  __device__ void Store(const Raw& raw, uint32_t to) const {
    to += threadIdx.x % 32 * 4;
    // One group's scale multiplies the sums, exactly.
    WithFourScales(w_.groups == 1 ? ScaleType::kNone : w_.scale, [&](const auto& decode) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const uint32_t(&bits)[4] = raw.scales[slot];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = PackBf16(factor_[0] * decode(bits, half * 2), factor_[1] * decode(bits, half * 2 + 1));
          StoreShared4(to + slot * Layout::kSlotBytes + half * Layout::kHalfBytes, pair);
        }
      }
    });
    if constexpr (Layout::kZeros) {
#pragma unroll
      for (int i = 0; i < 2 * kSlots; ++i) {
        const int slot = i / 2, half = i % 2;
        const uint32_t two = raw.zeros[slot] >> (half * 16);
        const uint32_t pair = ZeroField<Layout::kCodes>(0, two & 0xFFu) | ZeroField<Layout::kCodes>(1, two >> 8 & 0xFFu) << 16;
        StoreShared4(to + Layout::kZeroPlace + slot * Layout::kSlotBytes + half * Layout::kHalfBytes, pair);
      }
    }
  }

 private:
  __device__ int GroupOf(int step) const {
    if (step_groups_ != nullptr) return step_groups_[min(step, w_.blocks * kSteps - 1)];
    return min(static_cast<int>((static_cast<float>(step) + 0.5f) * per_group_), w_.groups - 1);
  }

  const MatrixArgs& w_;
  const int bytes_;
  const uint8_t* from_;
  const uint8_t* zeros_ = nullptr;
  const int32_t* step_groups_;
  float per_group_, factor_[2];
};

// A scaling warp: every kScaleWarps-th stage of all pieces of work is `which`'s. A stage's scales are read while the warp's last
// one is on its way, so that nobody waits for memory.
template <typename Layout, int kSlotSteps>
__device__ void MakeScales(const GemmArgs& args, const HopperWorkList& list, const Ring<Layout>& ring, int which) {
  using Maker = ScaleMaker<Layout, kSlotSteps>;
  const int stages = (args.weights.blocks + Layout::kStageBlocks - 1) / Layout::kStageBlocks;
  RingPlace<Layout::kStages> place{0, 1};
  int turn = 0;  // whose the next stage is
  for (int at = blockIdx.x; at < list.size(); at += gridDim.x) {
    const HopperWork work = list.Get(at);
    const Maker maker(args.weights, work);
    typename Maker::Raw raw[Layout::kTiles];
    const auto read = [&](int stage) {
      if (stage >= stages) return;
#pragma unroll
      for (int tile = 0; tile < Layout::kTiles; ++tile) {
        if (tile < work.row_tiles) maker.Read(tile, stage * Layout::kStageSteps, raw[tile]);
      }
    };
    read((which - turn + kScaleWarps) % kScaleWarps);
    for (int stage = 0; stage < stages; ++stage) {
      if (turn == which) {
        WaitBarrier(ring.Empty(place.stage), place.parity);
#pragma unroll
        for (int tile = 0; tile < Layout::kTiles; ++tile) {
          const uint32_t to = ring.Stage(place.stage) + Layout::kScales + tile * Layout::kScaleBytes;
          if (tile < work.row_tiles) maker.Store(raw[tile], to);
        }
        Arrive(ring.Full(place.stage));
        read(stage + kScaleWarps);
      }
      turn = turn + 1 == kScaleWarps ? 0 : turn + 1;
      place.Next();
    }
  }
}

// Whether weights meet scales before they are multiplied: not where one group for all inputs scales the sums instead.
template <typename Layout>
__device__ inline bool ScalesWeights(const MatrixArgs& w) {
  return Layout::kZeros || (IsScaled(Layout::kCodes) && w.groups > 1);
}

// The first warpgroup.
template <typename Layout>
__device__ void ProduceBlocks(const GemmArgs& args, const HopperWorkList& list, const Ring<Layout>& ring, WorkBoard& board) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) CopyBlocks(args, list, ring, board);
  if constexpr (IsScaled(Layout::kCodes)) {
    if (warp == 0 || !ScalesWeights<Layout>(args.weights)) return;
    if constexpr (!Layout::kMany) return MakeScales<Layout, Layout::kStageSteps>(args, list, ring, warp - 1);
    if (args.weights.slots == kSteps) return MakeScales<Layout, 1>(args, list, ring, warp - 1);
    MakeScales<Layout, 2>(args, list, ring, warp - 1);
  }
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_HOPPER_RING_INL_CUH_
