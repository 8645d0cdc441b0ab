// The product of all schemes: expert weights in the packed layout times rows of bf16 terms, on mma.sync.
//
// A thread block of 4 warps owns one tile of rows of an expert and one row tile of 128 features: warp w the features 16 w to 16 w +
// 15 of both halves, so that gate and up of a feature end in the same thread. Blocks of 64 inputs come through a ring in shared
// memory by cp.async: each thread copies the chunks of weights that it alone reads, all share rows and scales. Sums of one slot
// (inputs under one scale) are made by the tensor cores and added, scaled, to float32 sums. A row's sums depend on that row only
// and on an order fixed by the weights and the kind of rows: every tile size gives the same bits.
//
// Rows of one term without scales of groups, the usual ones, run a loop of their own for each number of slots (Loop), and a kernel
// of their own where scales are powers of two.
#ifndef MOED_KERNELS_CUDA_GEMM_INL_CUH_
#define MOED_KERNELS_CUDA_GEMM_INL_CUH_

#include "kernels/cuda/call_block.h"
#include "kernels/cuda/decode-inl.cuh"
#include "kernels/cuda/epilogue-inl.cuh"
#include "kernels/cuda/tile-inl.cuh"

namespace moed::cuda {

// Bytes of one stage of the ring.
template <Codes kCodes, int kTokens>
struct StageLayout {
  static constexpr int kStages = BitsOf(kCodes) == 32 ? 3 : BitsOf(kCodes) <= 8 && kTokens <= 16 ? 6 : 4;
  static constexpr int kScales = BlockBytes(kCodes);
  static constexpr int kZeros = kScales + kSteps * kTileRows * 4;
  static constexpr int kRowScales = kZeros + kSteps * kTileRows;
  static constexpr int kRows = kRowScales + kSteps * kTokens * 4;
  static constexpr int kRowBytes = kBlockDepth * 2;
  static constexpr int kTermBytes = kTokens * kRowBytes;
  __host__ __device__ static int Bytes(int terms) { return kRows + terms * kTermBytes; }
};

// One thread block's share of a product. `kPowers`: rows of one term without scales of groups, and scales that are powers of two,
// of two slots a block at most: they multiply the bf16 operand, exactly, together with the power that moves the codes' bias, and
// sums are made by the tensor cores from the first input to the last.
template <Codes kCodes, int kTokens, bool kPowers>
class TileProduct {
 public:
  using Layout = StageLayout<kCodes, kTokens>;
  static constexpr int kColumns = kTokens / 8;  // tiles of 8 rows
  static constexpr int kPieces = (kTokens * 8 + kTileThreads - 1) / kTileThreads;  // of 16 bytes of a block's rows, for each thread

  __device__ TileProduct(const GemmArgs& args, const Tile& tile, int row_tile, uint8_t* ring, const int* rows)
      : args_(args),
        weights_(args.weights),
        tile_(tile),
        row_tile_(row_tile),
        ring_(ring),
        rows_(rows),
        stage_bytes_(Layout::Bytes(args.x.terms)),
        terms_(args.x.terms),
        blocks_(weights_.blocks),
        zero_(weights_.zero),
        grouped_(args.x.scales != nullptr && args.x.scale_steps > 0) {
    tile_weights_.Find<kCodes>(weights_, tile.expert, row_tile);
    if (grouped_) per_row_group_ = 1.0f / static_cast<float>(args.x.scale_steps);
    FindRows();
  }

  __device__ void Run() {
    Clear(sums_);
    if constexpr (kPowers) return RunLoop<Loop<1, Rows::kPlain>>();
    if constexpr (kTokens <= kMostTermRows) {
      if (terms_ > 1) return RunLoop<Loop<0, Rows::kTerms>>();
    }
    const int slots = grouped_ ? max(weights_.slots, RowSlots()) : weights_.slots;
    if (grouped_) {
      RunSlots<Rows::kGrouped>(slots);
    } else {
      RunSlots<Rows::kPlain>(slots);
    }
  }

  __device__ void Store() const {
    const TileStore store(args_, tile_, row_tile_, threadIdx.x, rows_);
    store.Store<kColumns>([this](int half, int column, int at) { return sums_[half][column][at]; });
  }

 private:
  using Sums = float[2][kColumns][4];

  // Rows of one term, with one scale at most; of one term with scales of groups; of several terms, which have no scales.
  enum class Rows { kPlain, kGrouped, kTerms };

  // `kShift`: log2 of a slot's steps.
  template <int kShift, Rows kRows>
  struct Loop {
    static constexpr int kSlotShift = kShift, kSlots = kSteps >> kShift;
    static constexpr bool kGrouped = kRows == Rows::kGrouped, kTerms = kRows == Rows::kTerms;
    static constexpr int kLast = (1 << kShift) - 1;  // step of a slot
  };

  template <Rows kRows>
  __device__ void RunSlots(int slots) {
    if (slots == 1) return RunLoop<Loop<2, kRows>>();
    if (slots == 2) return RunLoop<Loop<1, kRows>>();
    RunLoop<Loop<0, kRows>>();
  }

  template <typename L>
  __device__ void RunLoop() {
#pragma unroll
    for (int stage = 0; stage < Layout::kStages - 1; ++stage) Load<L>(stage);
    int stage = 0;
    for (int block = 0; block < blocks_; ++block) {
      WaitCopies<Layout::kStages - 2>();
      __syncthreads();
      Load<L>(block + Layout::kStages - 1);
      if constexpr (kPowers) {
        AccumulatePowers<L>(ring_ + stage * stage_bytes_);
      } else {
        Accumulate<L>(ring_ + stage * stage_bytes_);
      }
      stage = stage == Layout::kStages - 1 ? 0 : stage + 1;
    }
    WaitCopies<0>();
  }

  __device__ static void Clear(Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int at = 0; at < 4; ++at) sums[half][column][at] = 0.0f;
      }
    }
  }

  __device__ int RowSlots() const { return args_.x.scale_steps % kSteps == 0 ? 1 : args_.x.scale_steps % 2 == 0 ? 2 : kSteps; }

  // Where this thread's pieces of rows lie: piece p of 16 bytes of a block belongs to thread p mod 128.
  __device__ void FindRows() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = threadIdx.x + i * kTileThreads, row = at / 8;
      const int from = row < kTokens ? rows_[row] : -1;
      source_[i] = static_cast<const uint16_t*>(args_.x.data) + (from < 0 ? 0 : from) * args_.x.row_stride + at % 8 * 8;
      valid_ |= (from >= 0 ? 1u : 0u) << i;
    }
  }

  // --- load ---

  // Blocks are loaded in turn.
  template <typename L>
  __device__ void Load(int block) {
    if (block < blocks_) {
      const uint32_t stage = SharedAddress(ring_) + load_stage_ * stage_bytes_;
      LoadWeights(block, stage);
      LoadRows<L>(block, stage + Layout::kRows);
      if (tile_weights_.scales != nullptr) LoadScales<L>(block, stage);
      if constexpr (L::kGrouped) LoadRowScales<L>(block, stage + Layout::kRowScales);
      load_stage_ = load_stage_ == Layout::kStages - 1 ? 0 : load_stage_ + 1;
    }
    CommitCopies();
  }

  __device__ void LoadWeights(int block, uint32_t stage) const {
    const uint8_t* from = tile_weights_.codes + static_cast<int64_t>(block) * BlockBytes(kCodes) + threadIdx.x * kChunkBytes;
    const uint32_t to = stage + threadIdx.x * kChunkBytes;
#pragma unroll
    for (int chunk = 0; chunk < ChunksOf(kCodes) * 2; ++chunk) {
      CopyAsync16(to + chunk * kTileThreads * kChunkBytes, from + chunk * kTileThreads * kChunkBytes);
    }
  }

  // Rows of 128 bytes; the 16-byte pieces of row r are exchanged by r mod 8, so that eight rows' pieces lie in different banks.
  template <typename L>
  __device__ void LoadRows(int block, uint32_t rows) const {
    int64_t offset = static_cast<int64_t>(block) * kBlockDepth;
    for (int term = 0; term < (L::kTerms ? terms_ : 1); ++term) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int at = threadIdx.x + i * kTileThreads, piece = at % 8, row = at / 8;
        if (row >= kTokens) break;
        CopyAsync16(rows + row * Layout::kRowBytes + ((piece ^ (row % 8)) * 16), source_[i] + offset, (valid_ >> i & 1) != 0);
      }
      if (L::kTerms && term + 1 < terms_) offset += args_.x.term_stride, rows += Layout::kTermBytes;
    }
  }

  template <typename L>
  __device__ void LoadScales(int block, uint32_t stage) const {
    const int shift = 3 + tile_weights_.shift;  // 8 pieces of 16 bytes in a slot's 128 scales of one byte
    if (static_cast<int>(threadIdx.x) < L::kSlots << shift) {
      const int slot = threadIdx.x >> shift, piece = threadIdx.x & ((1 << shift) - 1);
      const int64_t group = tile_weights_.GroupOf(block * kSteps + (slot << L::kSlotShift));
      CopyAsync16(stage + Layout::kScales + threadIdx.x * 16,
                  tile_weights_.scales + (group * kTileRows << tile_weights_.shift) + piece * 16);
    }
    if (tile_weights_.zeros != nullptr && static_cast<int>(threadIdx.x) < L::kSlots * 8) {
      const int slot = threadIdx.x / 8, piece = threadIdx.x % 8;
      const int64_t group = tile_weights_.GroupOf(block * kSteps + (slot << L::kSlotShift));
      CopyAsync16(stage + Layout::kZeros + threadIdx.x * 16, tile_weights_.zeros + group * kTileRows + piece * 16);
    }
  }

  template <typename L>
  __device__ void LoadRowScales(int block, uint32_t scales) const {
    for (int at = threadIdx.x; at < kTokens * L::kSlots; at += kTileThreads) {
      const int slot = at / kTokens, row = at % kTokens, from = rows_[row];
      const int group = min(DividedStep(block * kSteps + (slot << L::kSlotShift), per_row_group_), args_.x.scale_stride - 1);
      CopyAsync4(scales + at * 4, args_.x.scales + (from < 0 ? 0 : from) * static_cast<int64_t>(args_.x.scale_stride) + group,
                 from >= 0);
    }
  }

  // --- math ---

  template <typename L>
  __device__ void Accumulate(const uint8_t* stage) {
    Sums part;
    ChunkReader<kCodes> reader[2];
    uint32_t zero[2][2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int slot = step >> L::kSlotShift;
      if ((step & L::kLast) == 0) {
        Clear(part);
        if constexpr (IsInteger(kCodes)) Zeros(stage + Layout::kZeros + slot * kTileRows, zero);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) reader[half].Load(stage + threadIdx.x * kChunkBytes, half, step);
      Fragment<kCodes> a[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) reader[half].Decode(step, zero[half], a[half]);
      MultiplyStep<L>(stage, step, a, part);
      if ((step & L::kLast) == L::kLast) AddScaled<L>(stage, slot, part);
    }
  }

  // The same with `kPowers`.
  template <typename L>
  __device__ void AccumulatePowers(const uint8_t* stage) {
    ChunkReader<kCodes> reader[2];
    uint32_t power[2][2];
    bool large = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint8_t* scales = stage + Layout::kScales + (step >> L::kSlotShift) * kTileRows;
      if ((step & L::kLast) == 0) large = Powers(scales, power);
      Fragment<kCodes> a[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reader[half].Load(stage + threadIdx.x * kChunkBytes, half, step);
        reader[half].template Decode<false>(step, power[half], a[half]);
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) a[half][0][reg] = MultiplyPair(a[half][0][reg], power[half][reg % 2]);
      }
      if (large) MultiplyLarge(scales, a);
      MultiplyStep<L>(stage, step, a, sums_);
    }
  }

  // Of the thread's four features in a slot.
  __device__ void Zeros(const uint8_t* zeros, uint32_t (&zero)[2][2]) const {
    const bool stored = tile_weights_.zeros != nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        zero[half][second] = ZeroOperand<kCodes>(stored ? zeros[ScaleInTile(half, second)] : zero_);
      }
    }
  }

  // The largest E8M0 code whose power of two is one of bf16's together with that of the bias.
  static constexpr uint32_t kMostPower = 254 - BiasPower(kCodes);

  // E8M0 scales of the thread's four features in a slot times the power of the bias, as pairs of bf16; larger ones than kMostPower
  // as that one. Whether a thread of the warp has such a scale.
  __device__ bool Powers(const uint8_t* scales, uint32_t (&power)[2][2]) const {
    uint32_t most = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t code = scales[ScaleInTile(half, second)];
        most = max(most, code);
        power[half][second] = (min(code, kMostPower) + BiasPower(kCodes)) * 0x00800080u;
      }
    }
    return __any_sync(~0u, most > kMostPower) != 0;
  }

  // What Powers left of large scales; 255 is NaN.
  __device__ static void MultiplyLarge(const uint8_t* scales, Fragment<kCodes> (&a)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const uint32_t code = scales[ScaleInTile(half, second)];
        const float left = code == 255 ? FastE8m0(code) : FastE8m0(max(code, kMostPower) - kMostPower + 127);
        const uint32_t pair = PackBf16(left, left);
#pragma unroll
        for (int reg = second; reg < 4; reg += 2) a[half][0][reg] = MultiplyPair(a[half][0][reg], pair);
      }
    }
  }

  // Products of a step's operand A of both halves, added to `part`.
  template <typename L>
  __device__ void MultiplyStep(const uint8_t* stage, int step, const Fragment<kCodes> (&a)[2], Sums& part) const {
    constexpr int kTerms = WeightTerms(kCodes);
#pragma unroll 1
    for (int term = 0; term < (L::kTerms ? terms_ : 1); ++term) {
      const uint32_t rows = SharedAddress(stage + Layout::kRows) + term * Layout::kTermBytes;
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        uint32_t b[4];
        LoadRowsOperand(rows, step, column, b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int t = 0; t < kTerms; ++t) {
            if (kTerms > 1 && t + term > 2) continue;  // below float32's last bit
            Multiply(part[half][column], a[half][t], b[0], b[1]);
            if constexpr (kColumns > 1) Multiply(part[half][column + 1], a[half][t], b[2], b[3]);
          }
        }
      }
    }
  }

  // Operand B of columns `column` and, where there is one, `column` + 1.
  __device__ static void LoadRowsOperand(uint32_t rows, int step, int column, uint32_t (&b)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kColumns > 1) {
      const int row = column * 8 + lane / 16 * 8 + lane % 8, piece = step * 2 + lane / 8 % 2;
      LoadMatrix4(b, rows + row * Layout::kRowBytes + ((piece ^ (row % 8)) * 16));
    } else {
      const int row = lane % 8, piece = step * 2 + lane / 8 % 2;
      uint32_t two[2];
      LoadMatrix2(two, rows + row * Layout::kRowBytes + ((piece ^ (row % 8)) * 16));
      b[0] = two[0], b[1] = two[1];
    }
  }

  __device__ void SlotScales(const uint8_t* scales, int slot, float (&scale)[2][2]) const {
    tile_weights_.Scales(scales + (slot * kTileRows << tile_weights_.shift), scale);
  }

  template <typename L>
  __device__ void AddScaled(const uint8_t* stage, int slot, const Sums& part) {
    float scale[2][2];
    SlotScales(stage + Layout::kScales, slot, scale);
    if constexpr (L::kGrouped) {
      AddScaledRows(stage, slot, part, scale);
    } else {
      AddScaledColumns(part, scale);
    }
  }

  __device__ void AddScaledColumns(const Sums& part, const float (&scale)[2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int at = 0; at < 4; ++at) sums_[half][column][at] += part[half][column][at] * scale[half][at / 2];
      }
    }
  }

  __device__ void AddScaledRows(const uint8_t* stage, int slot, const Sums& part, const float (&scale)[2][2]) {
    const float* row_scales = reinterpret_cast<const float*>(stage + Layout::kRowScales) + slot * kTokens;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const float2 row_scale = *reinterpret_cast<const float2*>(row_scales + column * 8 + threadIdx.x % 4 * 2);
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
  const MatrixArgs& weights_;
  const Tile tile_;
  const int row_tile_;
  uint8_t* const ring_;
  const int* const rows_;
  const int stage_bytes_;
  const int terms_, blocks_, zero_;
  const bool grouped_;            // rows have scales of groups
  float per_row_group_ = 0.0f;
  WeightTile tile_weights_;
  const uint16_t* source_[kPieces];
  uint32_t valid_ = 0;            // bit i: source_[i] is a row
  int load_stage_ = 0;
  Sums sums_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_GEMM_INL_CUH_
