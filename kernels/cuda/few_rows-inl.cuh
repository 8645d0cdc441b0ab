// The product where experts have few rows: reading weights is all that takes time. For rows of one bf16 term with at most one scale
// a row, and codes without zero points of their own.
//
// A thread block of 4 warps owns one tile of 8 to 32 rows of an expert, one row tile of 128 features (warp w the features 16 w to
// 16 w + 15 of both halves), and one range of the blocks of 64 inputs. Each thread copies the chunks that it alone needs into a
// ring of its own in shared memory, by cp.async, so that no barrier stands between (registers would do as a ring, but the compiler
// gives all loads into them one scoreboard, and each turn waits for the last of them). Rows and scales of a slab of blocks follow
// the same way, a slab or two ahead, and are shared. Sums of a slot are made by the tensor cores from zero and added, scaled, to
// float32 sums; under one scale for all inputs the tensor cores add up the range.
//
// With several ranges (gridDim.z) each thread block leaves its sums in GemmArgs::partials, and the last of a tile and row tile to
// finish adds them up in the order of the ranges. So results depend on the number of ranges, which the host chooses, and not on
// time.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/few_rows_slab-inl.cuh"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {

// One thread block's share of a product. `kSlots`: scales of a block, or 0 where a feature has one scale or none.
template <Codes kCodes, int kTokens, int kSlots>
class FewRowsProduct {
 public:
  using Layout = SlabLayout<kTokens, kSlots>;

  __device__ FewRowsProduct(const GemmArgs& args, const Tile& tile, uint8_t* shared)
      : args_(args), tile_(tile), shared_(shared) {
    const MatrixArgs& weights = args.weights;
    const int range = blockIdx.z, ranges = gridDim.z;
    first_ = range * weights.blocks / ranges;
    blocks_ = (range + 1) * weights.blocks / ranges - first_;
    codes_ = weights.codes + tile.expert * weights.codes_stride +
             (static_cast<int64_t>(blockIdx.y) * weights.blocks + first_) * BlockBytes(kCodes) + threadIdx.x * kChunkBytes;
    pieces_ = blocks_ * kPieces;
    place_ = SharedAddress(shared) + threadIdx.x * kChunkBytes;
  }

  // Fills `rows` [kTokens]: row of x of each row of the tile, -1 where it has none. Visible to all after Run. `source`: as in
  // SortArgs.
  __device__ void Run(const int32_t* source, int* rows) {
    StartWeights();
    FindRow(source, rows);
    if constexpr (kSlots > 0) FindScales();
    BeginAfterEarlier();
#pragma unroll
    for (int slab = 0; slab < kAhead; ++slab) LoadSlab(slab);
    Clear();
    WaitCopies<kAhead - 1>();
    for (int slab = 0; slab * kSlabBlocks < blocks_; ++slab) {
      WaitSlab(slab);
      __syncthreads();  // everyone's part is there, and nobody reads the slab before
      if constexpr (kSlots > 0) {
        WidenScales(slab);
        __syncthreads();
      }
      LoadSlab(slab + kAhead);
      MultiplySlab(slab);
    }
  }

  // Whether this thread block has the sums of all ranges, and stores: the last of its tile and row tile to come here.
  __device__ bool Gather() {
    const int ranges = gridDim.z;
    if (ranges == 1) return true;
    __shared__ bool last;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    float4* const partials = reinterpret_cast<float4*>(args_.partials) + place * ranges * kRangeVectors + threadIdx.x;
    WriteSums(partials + static_cast<int64_t>(blockIdx.z) * kRangeVectors);
    __syncthreads();
    if (threadIdx.x == 0) {
      // The first fence is for the sums of all threads, which the barrier puts before it; the second one for what all read next.
      __threadfence();
      last = atomicInc(args_.finished + place, ranges - 1) == ranges - 1u;
      __threadfence();
    }
    __syncthreads();
    if (!last) return false;
    AddRanges(partials, ranges);
    return true;
  }

  __device__ void Store(const int* rows) const {
    float scale[2][2];
    LastScales(scale);
    const TileStore store(args_, tile_, blockIdx.y, threadIdx.x, rows);
    store.template Store<kColumns>(
        [&](int half, int column, int at) { return sums_[half][column][at] * scale[half][at / 2]; });
  }

 private:
  static constexpr int kColumns = kTokens / 8;                     // tiles of 8 rows
  static constexpr int kPieces = ChunksOf(kCodes);                 // of a block
  static constexpr int kPieceSteps = kSteps / kPieces;
  static constexpr int kSlabBlocks = Layout::kSlabBlocks, kAhead = Layout::kSlabCount - 1;  // slabs that are on their way
  static constexpr int kRowThreads = kTokens == 24 ? 4 : kTileThreads / kTokens;  // that copy a row
  static constexpr int kSlotSteps = kSlots > 0 ? kSteps / kSlots : kSteps;
  static constexpr int kHalfChunks = kTileThreads * kChunkBytes;   // bytes of one half's chunks of a piece
  static constexpr int kRangeVectors = 2 * kColumns * kTileThreads;  // float4 of a range's sums
  using Sums = float[2][kColumns][4];

  __device__ void Clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int at = 0; at < 4; ++at) sums_[half][column][at] = 0.0f;
      }
    }
  }

  __device__ int ScaleShift() const {  // log2 of a scale's bytes
    const ScaleType type = args_.weights.scale;
    return type == ScaleType::kF32 ? 2 : type == ScaleType::kE8m0 || type == ScaleType::kE4m3 ? 0 : 1;
  }

  // The expert's scales of this row tile.
  __device__ const uint8_t* Scales() const {
    const MatrixArgs& weights = args_.weights;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * weights.groups * kTileRows;
    return weights.scales + tile_.expert * weights.scales_stride + (first << ScaleShift());
  }

  // --- load ---

  // Asks for the next piece, if there is one, and moves on to the next place of the ring.
  __device__ void LoadPiece() {
    if (pieces_ > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) CopyAsync16(place_ + half * kHalfChunks, codes_ + half * kHalfChunks);
    }
    CommitCopies();
    --pieces_;
    codes_ += kPieceBytes;
    place_ += kPieceBytes;
    if (place_ - SharedAddress(shared_) >= kRing * kPieceBytes) place_ -= kRing * kPieceBytes;
  }

  __device__ void StartWeights() {
#pragma unroll
    for (int i = 0; i < kRing; ++i) LoadPiece();
  }

  // The next piece for the registers; another one is asked for in its place.
  __device__ void TakePiece(uint4 (&chunk)[2]) {
    WaitCopies<kRing - 1>();
#pragma unroll
    for (int half = 0; half < 2; ++half) chunk[half] = LoadShared16(place_ + half * kHalfChunks);
    LoadPiece();
  }

  // The row of the tile that this thread copies pieces of.
  __device__ void FindRow(const int32_t* source, int* rows) {
    const int row = threadIdx.x / kRowThreads, sorted = tile_.begin + row;
    valid_ = row < tile_.count;
    const int from = !valid_ ? -1 : args_.x.by_sorted_row ? sorted : source[sorted];
    if (threadIdx.x % kRowThreads == 0 && row < kTokens) rows[row] = from;
    source_ = static_cast<const uint16_t*>(args_.x.data) + max(from, 0) * args_.x.row_stride +
              static_cast<int64_t>(first_) * kBlockDepth + threadIdx.x % kRowThreads * 8;
  }

  __device__ void FindScales() {
    const MatrixArgs& weights = args_.weights;
    scales_ = Scales();
    if (weights.step_groups != nullptr) step_groups_ = weights.step_groups + tile_.expert * weights.step_groups_stride;
    per_group_ = 1.0f / static_cast<float>(weights.group_steps);
  }

  // This thread's part of a slab, which it asked for as one group: since then came as many slabs but one as are on their way, and
  // the pieces of as many; of the first slabs fewer.
  __device__ void WaitSlab(int slab) const {
    constexpr int kSlabPieces = kSlabBlocks * kPieces;
    if (slab >= kAhead) {
      WaitCopies<kAhead * kSlabPieces + kAhead - 1>();
    } else if (slab > 0) {
      WaitCopies<kSlabPieces>();
    }
  }

  // Asks for rows and scales of a slab's blocks, where there are any.
  __device__ void LoadSlab(int slab) const {
    const int block = slab * kSlabBlocks, count = min(kSlabBlocks, blocks_ - block);
    if (count <= 0) return CommitCopies();
    const int piece = threadIdx.x % kRowThreads;
    const uint16_t* from = source_ + static_cast<int64_t>(block) * kBlockDepth;
    const uint32_t to =
        SharedAddress(shared_) + RowsOf(slab) + threadIdx.x / kRowThreads * Layout::kRowBytes + piece * 16;
    if (threadIdx.x < kTokens * kRowThreads) {
#pragma unroll
      for (int i = 0; i < kSlabBlocks * 8 / kRowThreads; ++i) {
        const int at = i * kRowThreads;
        if (piece + at < count * 8) CopyAsync16(to + at * 16, from + at * 8, valid_);
      }
    }
    if constexpr (kSlots > 0) LoadScales(first_ + block, count, StoredOf(slab));
    CommitCopies();
  }

  // step / steps of a group, without a division: exact below 2^22 steps, of which there are fewer in 2^26 inputs.
  __device__ int GroupOf(int step) const {
    if (step_groups_ != nullptr) return step_groups_[step];
    return min(static_cast<int>((static_cast<float>(step) + 0.5f) * per_group_), args_.weights.groups - 1);
  }

  // Bytes into the shared memory where a slab's rows and its stored scales are.
  __device__ static int RowsOf(int slab) { return Layout::kSlabs + slab % Layout::kSlabCount * Layout::kRows; }
  __device__ int StoredOf(int slab) const { return Layout::kStored + (slab % kAhead * Layout::kScaleCount << ScaleShift()); }

  // The stored scales of `count` blocks from `block` of the matrix on, to byte `place` of the shared memory.
  __device__ void LoadScales(int block, int count, int place) const {
    const int shift = ScaleShift();
    const uint32_t to = SharedAddress(shared_) + place;
    // 8 pieces of 16 bytes in a slot's 128 scales of one byte.
#pragma unroll 1
    for (int at = threadIdx.x; at < count * kSlots << (3 + shift); at += kTileThreads) {
      const int slot = at >> (3 + shift), piece = at & ((8 << shift) - 1);
      const int64_t group = GroupOf(block * kSteps + slot * kSlotSteps);
      CopyAsync16(to + at * 16, scales_ + (group * kTileRows << shift) + piece * 16);
    }
  }

  // A slab's scales as floats, in the order in which threads read them: each has four features' side by side.
  __device__ void WidenScales(int slab) const {
    const int count = min(kSlabBlocks, blocks_ - slab * kSlabBlocks);
    const uint8_t* const stored = shared_ + StoredOf(slab);
    const int feature = threadIdx.x, half = feature / kHalfRows, in_half = feature % kHalfRows;
    const int reader = in_half / 16 * 8 + in_half % 8, second = in_half / 8 % 2;
    float* const to = reinterpret_cast<float*>(shared_ + Layout::kScales) + reader * 4 + half * 2 + second;
    WithScale(args_.weights.scale, [&](const auto& decode) {
#pragma unroll 2
      for (int slot = 0; slot < count * kSlots; ++slot) {
        to[slot * kTileRows] = decode(stored, slot * kTileRows + feature);
      }
    });
  }

  // --- math ---

  __device__ void MultiplySlab(int slab) {
    const int lane = threadIdx.x % 32;
    const uint32_t slab_at = SharedAddress(shared_) + RowsOf(slab);
    // Four matrices of 8 rows x 8 inputs at a time: one step of 16 rows, or two steps of 8.
    uint32_t pairs = slab_at + (lane / 16 * 8 + lane % 8) * Layout::kRowBytes + lane / 8 % 2 * 16;
    uint32_t last = slab_at + ((kColumns - 1) * 8 + lane % 8) * Layout::kRowBytes + lane / 8 * 16;
    const float4* scales = reinterpret_cast<const float4*>(shared_ + Layout::kScales) + threadIdx.x / 32 * 8 + lane / 4;
    const int count = min(kSlabBlocks, blocks_ - slab * kSlabBlocks);
#pragma unroll 1
    for (int block = 0; block < count; ++block) {
      MultiplyBlock(pairs, last, scales);
      pairs += kBlockDepth * 2;
      last += kBlockDepth * 2;
      scales += kSlots * (kTileRows / 4);
    }
  }

  // `pairs`, `last`: shared addresses of what the thread loads of two columns, and of the last one where their number is odd.
  __device__ void MultiplyBlock(uint32_t pairs, uint32_t last, const float4* scales) {
    Sums part;
    uint32_t b_last[4];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint4 chunk[2];
      TakePiece(chunk);
#pragma unroll
      for (int in_piece = 0; in_piece < kPieceSteps; ++in_piece) {
        const int step = piece * kPieceSteps + in_piece;
        uint32_t a[2][4];
        DecodeStep(chunk, in_piece, a);
#pragma unroll
        for (int column = 0; column + 1 < kColumns; column += 2) {
          uint32_t b[4];
          LoadMatrix4(b, pairs + column * 8 * Layout::kRowBytes + step * kStepDepth * 2);
          MultiplyColumn(a, column, step, b[0], b[1], part);
          MultiplyColumn(a, column + 1, step, b[2], b[3], part);
        }
        if constexpr (kColumns % 2 != 0) {
          if (step % 2 == 0) LoadMatrix4(b_last, last + step * kStepDepth * 2);
          MultiplyColumn(a, kColumns - 1, step, b_last[step % 2 * 2], b_last[step % 2 * 2 + 1], part);
        }
        if (kSlots > 0 && step % kSlotSteps == kSlotSteps - 1) AddScaled(scales[step / kSlotSteps * (kTileRows / 4)], part);
      }
    }
  }

  // The operands of both halves in a step of a chunk.
  __device__ static void DecodeStep(const uint4 (&chunk)[2], int in_piece, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[half][reg] = DecodeSymmetric<kCodes>(chunk[half], in_piece, reg);
    }
  }

  // One tile of 8 rows in a step.
  __device__ void MultiplyColumn(const uint32_t (&a)[2][4], int column, int step, uint32_t b0, uint32_t b1, Sums& part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kSlots == 0) {
        Multiply(sums_[half][column], a[half], b0, b1);
      } else if (step % kSlotSteps == 0) {
        MultiplyFresh(part[half][column], a[half], b0, b1);
      } else {
        Multiply(part[half][column], a[half], b0, b1);
      }
    }
  }

  // `scale`: of the features g and g + 8 of half 0, then of half 1.
  __device__ void AddScaled(const float4 scale, const Sums& part) {
    const float scales[2][2] = {{scale.x, scale.y}, {scale.z, scale.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int at = 0; at < 4; ++at) sums_[half][column][at] += part[half][column][at] * scales[half][at / 2];
      }
    }
  }

  // --- store ---

  __device__ void WriteSums(float4* to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const float (&s)[4] = sums_[half][column];
        to[(half * kColumns + column) * kTileThreads] = make_float4(s[0], s[1], s[2], s[3]);
      }
    }
  }

  // The sums of all ranges, in their order. Past L1, which may hold what an earlier launch left at these addresses.
  __device__ void AddRanges(const float4* partials, int ranges) {
    constexpr int kVectors = 2 * kColumns;           // of a thread in a range
    constexpr int kAtOnce = 16 / kVectors * kVectors;  // loads under way, of whole ranges
    Clear();
#pragma unroll 1
    for (int first = 0; first < ranges * kVectors; first += kAtOnce) {
      float4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < ranges * kVectors) v[i] = __ldcg(partials + (first + i) * kTileThreads);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float (&s)[4] = sums_[i % kVectors / kColumns][i % kColumns];
        s[0] += v[i].x, s[1] += v[i].y, s[2] += v[i].z, s[3] += v[i].w;
      }
    }
  }

  // What whole sums of the thread's four features are multiplied by.
  __device__ void LastScales(float (&scale)[2][2]) const {
    const MatrixArgs& weights = args_.weights;
    const int feature = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      scale[0][second] = scale[1][second] = weights.globals[static_cast<int64_t>(tile_.expert) * 2 + second];
    }
    if (kSlots > 0 || weights.groups == 0) return;
    WithScale(weights.scale, [&](const auto& decode) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          scale[half][second] *= decode(Scales(), half * kHalfRows + feature + second * 8);
        }
      }
    });
  }

  const GemmArgs& args_;
  const Tile tile_;
  uint8_t* const shared_;
  int first_, blocks_;                      // the range: its first block of the matrix, and how many it has
  const uint8_t* codes_;                    // this thread's first chunk of the piece to ask for next
  int pieces_;                              // that are still to be asked for
  uint32_t place_;                          // in the ring, of the piece to be taken next
  const uint16_t* source_ = nullptr;        // this thread's first piece of its row
  bool valid_ = false;                      // there is such a row
  const uint8_t* scales_ = nullptr;
  const int32_t* step_groups_ = nullptr;
  float per_group_ = 0.0f;
  Sums sums_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_
