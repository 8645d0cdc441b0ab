// The product where experts have few rows: reading weights is all that takes time. For rows of one bf16 term without scales.
//
// A thread block of 4 warps owns one tile of 8 to 32 rows of an expert, one row tile of 128 features (warp w the features 16 w to
// 16 w + 15 of both halves), and one range of the blocks of 64 inputs. Each thread copies the chunks that it alone needs into a
// ring of its own in shared memory, by cp.async, so that no barrier stands between (registers would do as a ring, but the compiler
// gives all loads into them one scoreboard, and each turn waits for the last of them). Rows of a slab of blocks follow the same
// way, a slab or two ahead, and are shared; so are scales, which threads read into registers well ahead and store as floats when
// their turn comes: one barrier a slab. Sums of a slot are made by the tensor cores from zero and added, scaled, to float32 sums;
// under one scale for all inputs the tensor cores add up the range.
//
// The integer units, at half the rate of others, are what a loop of these runs out of first: a slab's blocks are unrolled, so that
// places in the ring are constants.
//
// With several ranges (gridDim.z) each thread block leaves its sums in GemmArgs::partials, and the last of a tile and row tile to
// finish adds them up in the order of the ranges. So results depend on the number of ranges, which the host chooses, and not on
// time.
#ifndef MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_
#define MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_

#include <utility>

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode_scaled-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/few_rows_slab-inl.cuh"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {

// One thread block's share of a product. `kSlotSteps`: steps that share a scale, 1 to 8, or 0 where a feature has one scale or
// none; `kZeros`: there is a zero point with each; `kPowers`: scales are powers of two, which multiply weights exactly instead of
// sums.
template <Codes kCodes, int kTokens, int kSlotSteps, bool kZeros, bool kPowers>
class FewRowsProduct {
 public:
  using Layout = SlabLayout<kTokens, kSlotSteps, kZeros>;
  static constexpr bool kPasses = kSlotSteps > 0, kScaled = kPasses && !kPowers;
  static_assert(!kZeros || (kScaled && IsInteger(kCodes)));
  static_assert(!kPowers || (kPasses && !IsInteger(kCodes)));

  __device__ FewRowsProduct(const GemmArgs& args, const Tile& tile, uint8_t* shared)
      : args_(args), tile_(tile), shared_(KeptAddress(shared)) {
    const MatrixArgs& weights = args.weights;
    const int range = blockIdx.z, ranges = gridDim.z;
    const int pairs = (weights.blocks + 1) / 2;  // a scale's steps are those of two blocks at most
    first_ = range * pairs / ranges * 2;
    blocks_ = min((range + 1) * pairs / ranges * 2, weights.blocks) - first_;
    codes_ = weights.codes + tile.expert * weights.codes_stride +
             (static_cast<int64_t>(blockIdx.y) * weights.blocks + first_) * BlockBytes(kCodes) + threadIdx.x * kChunkBytes;
    pieces_ = blocks_ * kPieces;
  }

  // Fills `rows` [kTokens]: row of x of each row of the tile, -1 where it has none. Visible to all after Run. `source`: as in
  // SortArgs.
  __device__ void Run(const int32_t* source, int* rows) {
    StartWeights();
    FindRow(source, rows);
    if constexpr (kPasses) FindScales();
    BeginAfterEarlier();
#pragma unroll
    for (int slab = 0; slab < kAhead; ++slab) LoadSlab(slab);
    if constexpr (kPasses) PassScales(0);
    Clear();
    WaitCopies<kAhead - 1>();
    for (int slab = 0; slab * kSlabBlocks < blocks_; ++slab) {
      WaitSlab(slab);
      __syncthreads();  // everyone's part is there, and nobody reads the slab before
      LoadSlab(slab + kAhead);
      MultiplySlab(slab);
      if (kPasses && slab % kPassed == kPassed - 1) PassScales(slab / kPassed + 1);
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
  static constexpr int kUnit = kPasses ? kSlotSteps : kSlabBlocks * kSteps;  // steps that share a scale
  static constexpr int kSlots = Layout::kSlots;                    // of a slab
  // Scales are passed on for at least four slots at once, one a warp, so for some slabs together.
  static constexpr int kTurns = kSlots > 4 ? kSlots / 4 : 1;
  static constexpr int kPassed = Layout::kPassed;                  // slabs
  static constexpr uint32_t kMiddle = IsInteger(kCodes) ? MiddleTerm<kCodes>() : 0;
  static constexpr int kSlotBytes = kTileRows * 4;                 // of a slot's scales as floats
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

  // The expert's scales of this row tile.
  __device__ const uint8_t* Scales() const {
    const MatrixArgs& weights = args_.weights;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * weights.groups * kTileRows;
    return weights.scales + tile_.expert * weights.scales_stride + first * ScaleBytesOf(weights.scale);
  }

  // --- load ---

  // Asks for piece `piece` of those that are still to be asked for, if there is one, in its place of the ring.
  __device__ void LoadPiece(int piece) {
    if (piece < pieces_) {
      const uint32_t to = shared_ + threadIdx.x * kChunkBytes + piece % kRing * kPieceBytes;
      const uint8_t* const from = codes_ + piece * kPieceBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) CopyAsync16(to + half * kHalfChunks, from + half * kHalfChunks);
    }
    CommitCopies();
  }
  __device__ void PassPieces(int count) {
    pieces_ -= count;
    codes_ += count * kPieceBytes;
  }

  __device__ void StartWeights() {
#pragma unroll
    for (int i = 0; i < kRing; ++i) LoadPiece(i);
    PassPieces(kRing);
  }

  // Piece `piece` of a slab for the registers; another one is asked for in its place. Since the first ones of a slab were, a slab
  // of rows was asked for as well.
  __device__ void TakePiece(int piece, uint4 (&chunk)[2]) {
    if (piece < kRing) {
      WaitCopies<kRing>();
    } else {
      WaitCopies<kRing - 1>();
    }
    const uint32_t from = shared_ + threadIdx.x * kChunkBytes + piece % kRing * kPieceBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) chunk[half] = LoadShared16(from + half * kHalfChunks);
    LoadPiece(piece);
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
    if constexpr (kZeros)
      zeros_ = weights.zeros + tile_.expert * weights.zeros_stride + static_cast<int64_t>(blockIdx.y) * weights.groups * kTileRows;
    if (weights.step_groups != nullptr) step_groups_ = weights.step_groups + tile_.expert * weights.step_groups_stride;
    per_group_ = 1.0f / static_cast<float>(weights.group_steps);
    scale_bytes_ = ScaleBytesOf(weights.scale);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) group_[i] = GroupAt(0, i);
    ReadScales(0);
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
    const uint32_t to = shared_ + RowsOf(slab) + threadIdx.x / kRowThreads * Layout::kRowBytes + piece * 16;
    if (threadIdx.x < kTokens * kRowThreads) {
#pragma unroll
      for (int i = 0; i < kSlabBlocks * 8 / kRowThreads; ++i) {
        const int at = i * kRowThreads;
        if (piece + at < count * 8) CopyAsync16(to + at * 16, from + at * 8, valid_);
      }
    }
    CommitCopies();
  }

  // step / steps of a group, without a division: exact below 2^22 steps, of which there are fewer in 2^26 inputs.
  __device__ int GroupOf(int step) const {
    if (step_groups_ != nullptr) return step_groups_[step];
    return min(static_cast<int>((static_cast<float>(step) + 0.5f) * per_group_), args_.weights.groups - 1);
  }

  // Where a slab's rows are in the shared memory, and its scales, which a thread has four features' of in a slot.
  __device__ static int RowsOf(int slab) { return Layout::kSlabs + slab % Layout::kSlabCount * Layout::kRows; }
  __device__ static int ScalesOf(int slab) {
    return Layout::kScales + slab / kPassed % 2 * Layout::kScaleBytes + slab % kPassed * kSlots * kSlotBytes;
  }

  // The group of the thread's slot `i` of pass `pass` of scales: four slots at a time, by warps; a lane is one that reads.
  __device__ int GroupAt(int pass, int i) const {
    const int step = ((pass * kTurns + i) * 4 + static_cast<int>(threadIdx.x / 32)) * kSlotSteps;
    return step < blocks_ * kSteps ? GroupOf(first_ * kSteps + step) : 0;
  }

  // The thread's scales of a pass as they are stored. What their place depends on is asked for a pass before.
  __device__ void ReadScales(int pass) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int64_t first = static_cast<int64_t>(group_[i]) * kTileRows + threadIdx.x % 32 * 4;
      LoadFour(scales_ + first * scale_bytes_, scale_bytes_, raw_[i]);
      if constexpr (kZeros) raw_zeros_[i] = __ldg(reinterpret_cast<const uint32_t*>(zeros_ + first));
      group_[i] = GroupAt(pass + 1, i);
    }
  }

  // Stores the scales of a pass that were read as floats, in the order in which threads read them, and reads the next one's.
  __device__ void PassScales(int pass) {
    const uint32_t to = shared_ + Layout::kScales + pass % 2 * Layout::kScaleBytes + threadIdx.x * 16;
    WithFourScales(args_.weights.scale, [&](const auto& decode) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        uint32_t scales[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float scale = decode(raw_[i], j), factor = scale * ScaleFactor<kCodes>(j);
          scales[j] = kPowers ? PackBf16(factor, factor) : __float_as_uint(scale);
        }
        StoreShared16(to + i * kTileThreads * 16, make_uint4(scales[0], scales[1], scales[2], scales[3]));
      }
    });
    if constexpr (kZeros) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        uint32_t terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) terms[j] = ZeroTerm(raw_zeros_[i] >> (8 * j) & 0xFFu);
        StoreShared16(to + i * kTileThreads * 16 + Layout::kZeroTerms, make_uint4(terms[0], terms[1], terms[2], terms[3]));
      }
    }
    ReadScales(pass + 1);
  }

  // --- math ---

  __device__ void MultiplySlab(int slab) {
    const int lane = threadIdx.x % 32;
    const uint32_t slab_at = shared_ + RowsOf(slab);
    // Four matrices of 8 rows x 8 inputs at a time: one step of 16 rows, or two steps of 8.
    const uint32_t pairs = slab_at + (lane / 16 * 8 + lane % 8) * Layout::kRowBytes + lane / 8 % 2 * 16;
    const uint32_t last = slab_at + ((kColumns - 1) * 8 + lane % 8) * Layout::kRowBytes + lane / 8 * 16;
    const uint32_t scales = shared_ + ScalesOf(slab) + (threadIdx.x / 32 * 8 + lane / 4) * 16;
    const int count = blocks_ - slab * kSlabBlocks;
    Sums part;
    [&]<int... kBlock>(std::integer_sequence<int, kBlock...>) {
      ((kBlock < count ? MultiplyBlock<kBlock>(pairs, last, scales, kBlock + 1 == count, part) : void()), ...);
    }(std::make_integer_sequence<int, kSlabBlocks>());
    PassPieces(kSlabBlocks * kPieces);
  }

  // `pairs`, `last`: shared addresses of what the thread loads of two columns, and of the last one where their number is odd, in
  // the slab's first block; `scales` of that as well. `ends`: it is the last block. `part`: sums of a slot.
  template <int kBlock>
  __device__ void MultiplyBlock(uint32_t pairs, uint32_t last, uint32_t scales, bool ends, Sums& part) {
    uint32_t b_last[4];
    uint32_t term[2][2] = {{kMiddle, kMiddle}, {kMiddle, kMiddle}};
    uint4 chunk[2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step % kPieceSteps == 0) TakePiece(kBlock * kPieces + step / kPieceSteps, chunk);
      const int in_slab = kBlock * kSteps + step, at = in_slab * kStepDepth * 2;
      const uint32_t of_slot = scales + (kPasses ? in_slab / kUnit * kSlotBytes : 0);
      if ((kZeros || kPowers) && (step == 0 || in_slab % kUnit == 0)) ReadTerms(of_slot, term);
      uint32_t a[2][4];
      DecodeStep(chunk, step % kPieceSteps, term, a);
#pragma unroll
      for (int column = 0; column + 1 < kColumns; column += 2) {
        uint32_t b[4];
        LoadMatrix4(b, pairs + column * 8 * Layout::kRowBytes + at);
        MultiplyColumn(a, column, in_slab, b[0], b[1], part);
        MultiplyColumn(a, column + 1, in_slab, b[2], b[3], part);
      }
      if constexpr (kColumns % 2 != 0) {
        if (step % 2 == 0) LoadMatrix4(b_last, last + at);
        MultiplyColumn(a, kColumns - 1, in_slab, b_last[step % 2 * 2], b_last[step % 2 * 2 + 1], part);
      }
      if (!kScaled) continue;
      if (in_slab % kUnit == kSlotSteps - 1 || (step == kSteps - 1 && ends)) AddScaled(LoadShared16(of_slot), part);
    }
  }

  // What makes weights of the codes of a slot, by feature: zero points, or scales that are powers. `scales`: the thread's of the
  // slot.
  __device__ static void ReadTerms(uint32_t scales, uint32_t (&term)[2][2]) {
    const uint4 four = LoadShared16(scales + (kZeros ? Layout::kZeroTerms : 0));
    term[0][0] = four.x, term[0][1] = four.y, term[1][0] = four.z, term[1][1] = four.w;
  }

  // The operands of both halves in a step of a chunk. `term`: [half][feature g, or g + 8].
  __device__ static void DecodeStep(const uint4 (&chunk)[2], int in_piece, const uint32_t (&term)[2][2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        a[half][reg] = FieldOf<kCodes>(chunk[half], in_piece, reg);
        if constexpr (kPowers) {
          a[half][reg] = MultiplyPair(a[half][reg], term[half][reg % 2]);
        } else if constexpr (kCodes != Codes::kBf16) {
          a[half][reg] = UnscaledOf<kCodes>(a[half][reg], reg, term[half][reg % 2]);
        }
      }
    }
  }

  // One tile of 8 rows in a step of a slab.
  __device__ void MultiplyColumn(const uint32_t (&a)[2][4], int column, int step, uint32_t b0, uint32_t b1, Sums& part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!kScaled) {
        Multiply(sums_[half][column], a[half], b0, b1);
      } else if (step % kUnit == 0) {
        MultiplyFresh(part[half][column], a[half], b0, b1);
      } else {
        Multiply(part[half][column], a[half], b0, b1);
      }
    }
  }

  // `scale`: of the features g and g + 8 of half 0, then of half 1.
  __device__ void AddScaled(const uint4 scale, const Sums& part) {
    const float scales[2][2] = {{Bits(scale.x), Bits(scale.y)}, {Bits(scale.z), Bits(scale.w)}};
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
    const int reader = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      scale[0][second] = scale[1][second] =
          weights.globals[static_cast<int64_t>(tile_.expert) * 2 + second] * LiftOf<kCodes>();
    }
    if (kPasses || weights.groups == 0) return;
    WithScale(weights.scale, [&](const auto& decode) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          scale[half][second] *= decode(Scales(), reader * 4 + half * 2 + second);
        }
      }
    });
  }

  const GemmArgs& args_;
  const Tile tile_;
  const uint32_t shared_;                   // address
  int first_, blocks_;                      // the range: its first block of the matrix, and how many it has
  const uint8_t* codes_;                    // this thread's first chunk of the piece to ask for next
  int pieces_;                              // that are still to be asked for
  const uint16_t* source_ = nullptr;        // this thread's first piece of its row
  bool valid_ = false;                      // there is such a row
  const uint8_t* scales_ = nullptr;
  const uint8_t* zeros_ = nullptr;
  const int32_t* step_groups_ = nullptr;
  float per_group_ = 0.0f;
  int scale_bytes_ = 0;
  // Of the pass whose scales are to be stored next: as they are stored in the matrix; and the groups of the one after it.
  uint32_t raw_[kTurns][4] = {}, raw_zeros_[kTurns] = {};
  int group_[kTurns];
  Sums sums_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_FEW_ROWS_INL_CUH_
