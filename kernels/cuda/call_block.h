// What the kernels of one call read: plain structs in device memory, so that a captured graph serves any call and any layer of the
// same shape. Filled on the host (cuda_moe), copied to the device before the launches; all pointers are the device's.
#ifndef MOED_KERNELS_CUDA_CALL_BLOCK_H_
#define MOED_KERNELS_CUDA_CALL_BLOCK_H_

#include <cstdint>

#include "kernels/activation_kind.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/router.h"
#include "kernels/quant.h"
#include "kernels/tensor.h"

namespace moed::cuda {

// A group of up to `tokens` sorted rows [begin, begin + count) of one expert. Read and written as a whole.
struct alignas(kTileBytes) Tile {
  int32_t expert, begin, count, unused;
};
static_assert(sizeof(Tile) == kTileBytes);

// Token sort: which rows each expert has. S: slots of the call, rows x top_k.
struct SortArgs {
  int32_t rows = 0;
  int32_t top_k = 0;
  int32_t experts = 0;
  int32_t tile_rows = 0;          // of a Tile, at most
  // What an expert has beyond whole tiles is a tile of another list where it is at most so many rows; 0: there is none.
  int32_t rest_rows = 0;
  int32_t rest_first = 0;         // where that list begins in `tiles`
  const int32_t* ids = nullptr;   // [rows, top_k], -1 is "no expert"; null: every row goes to expert 0
  // [experts], batched experts: expert e has rows [e * max_m, e * max_m + counts[e]); then ids is null.
  const int32_t* counts = nullptr;
  int32_t max_m = 0;
  int32_t* count = nullptr;       // scratch [SortScratch]
  int32_t* source = nullptr;      // [S] sorted row -> row of x
  int32_t* slot = nullptr;        // [S] sorted row -> slot
  int32_t* expert = nullptr;      // [S] sorted row -> expert
  int32_t* rank = nullptr;        // [S] sorted row -> its index among the rows of its expert
  int32_t* position = nullptr;    // [S] slot -> sorted row, -1 without an expert; not written for batched experts
  Tile* tiles = nullptr;
  int32_t* totals = nullptr;      // [3]: sorted rows, tiles, and with rest_rows tiles of the other list
  uint32_t* absmax = nullptr;     // [2] bits of the largest magnitudes of x and h, set to 0 here
  uint32_t* finished = nullptr;   // [kFewRowsCounters] GemmArgs::finished, set to 0 here; null: none
};

// What the elements of an Operand are.
enum class OperandKind : uint8_t {
  kBf16,
  kBytes,  // codes of 8 bits, int8 or E4M3 as those of the weights, each step in the order of BytePosition (packed_layout.h)
};

// Rows of one product, as the sum of `terms` matrices (one, of bytes): values, or codes that `scales` multiply.
//
// Hopper's products read sorted rows in panels, so that a tile's rows are contiguous in each block of 64 inputs and lie as wgmma
// wants them in shared memory: [blocks][rows][64], the 16-byte piece p of a panel's row at p ^ (rank of the row mod 8).
struct Operand {
  void* data = nullptr;        // [terms][rows][depth], or one term in panels
  OperandKind kind = OperandKind::kBf16;
  int64_t row_stride = 0;      // elements
  int64_t panel_stride = 0;    // elements from a block's panel to the next one's; 0: no panels
  int64_t term_stride = 0;
  int32_t terms = 1;
  float* scales = nullptr;     // [rows][scale_stride]; null: none
  int32_t scale_stride = 0;
  int32_t scale_steps = 0;     // steps of a scale's group; 0: one scale a row
  bool by_sorted_row = false;  // else by row of x
};

// Making an Operand: rows of x or h, weighted, quantized and put in the order of the weights' positions.
struct StageArgs {
  const void* x = nullptr;          // [.., cols] with rows `x_stride` elements apart
  DType dtype = DType::kF32;
  int64_t x_stride = 0;
  int64_t cols = 0;
  int64_t depth = 0;
  bool from_source = false;         // sorted row r reads x row source[r]; else row r reads row r
  bool scatter = false;             // row r is a token's, and is stored as every sorted row of its slots; it has one scale at most
  int32_t top_k = 0;                // with `scatter`
  const float* weights = nullptr;   // [S] of slots, multiplied in first; null: none
  ActivationScheme scheme;
  int32_t group = 0;                // inputs of a scale's group; 0: the row
  bool scaled_values = false;       // the operand holds code x scale, its scales stay null
  float* scratch = nullptr;         // [rows][groups] scales while the row is made; may be Operand::scales
  const float* stored = nullptr;    // [E] static or global scale; null: 1
  const uint32_t* absmax = nullptr; // of the request, for scales that span rows
  const int32_t* order = nullptr;   // [depth] input at each position, or null
  int64_t order_stride = 0;         // 0: one order for all experts
  int32_t rows = 0;                 // when not by sorted row
  Operand out;
};

// A packed matrix of a layer (packed_layout.h); strides between experts in elements of the array's own type.
struct MatrixArgs {
  const uint8_t* codes = nullptr;
  int64_t codes_stride = 0;
  const uint8_t* scales = nullptr;
  int64_t scales_stride = 0;  // bytes
  const uint8_t* zeros = nullptr;
  int64_t zeros_stride = 0;
  const float* bias = nullptr;
  int64_t bias_stride = 0;
  const float* globals = nullptr;  // [E][2]
  const int32_t* step_groups = nullptr;
  int64_t step_groups_stride = 0;
  int32_t rows = 0;   // features
  int32_t blocks = 0;
  int32_t row_tiles = 0;
  int32_t groups = 0;
  int32_t group_steps = 0;
  int32_t slots = 1;
  int32_t zero = 0;   // of every code without zero points
  ScaleType scale = ScaleType::kNone;
};

// What a product's epilogue makes of its sums.
enum class Epilogue : uint8_t {
  kGateUp,  // paired: h = act(gate, up), for activations of the sigmoid
  kStore,   // sums, bias included, as float32 or bf16; of a paired matrix in the order of its row tiles
};

struct GemmArgs {
  MatrixArgs weights;
  Operand x;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation;
  float* out = nullptr;            // [sorted][out_stride]; null: out_bf16
  uint16_t* out_bf16 = nullptr;    // h as the next operand; features up to out_stride are written. Hopper's products: or sums
  int64_t out_stride = 0;
  int64_t out_panel_stride = 0;    // of out_bf16 in panels (Operand)
  // Where inputs are cut into ranges (GemmLaunch): float32 sums [tile][row tile][range][sums of a thread / 4][128 threads][4], and
  // how many ranges of a tile and row tile are done [tile][row tile], 0 before a product and after it.
  float* partials = nullptr;
  uint32_t* finished = nullptr;
  bool tiles_early = false;  // a kernel stands between the sort and this product: see launch_after-inl.cuh
};

// h = act(gate, up) of sums that products stored: where gate and up are two products, and for activations that those do not make.
struct ActivateArgs {
  const float* gate = nullptr;  // [sorted][stride]
  const float* up = nullptr;    // null: both lie in `gate` as a paired matrix has them, 128 for each 64 features (PairedRow)
  int64_t stride = 0;
  int64_t cols = 0;             // features
  Activation activation;
  float* out = nullptr;         // [sorted][out_stride]; null: out_bf16, features up to out_stride are written
  uint16_t* out_bf16 = nullptr;
  int64_t out_stride = 0;
  int64_t out_panel_stride = 0;
};

// Scales that span the request: the largest magnitude of a matrix's rows.
struct AbsMaxArgs {
  const void* x = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0, cols = 0;
  bool sorted = false;             // rows [0, sorted rows); else [0, rows)
  bool from_source = false;
  const float* weights = nullptr;  // [S] of slots, with `sorted`
  int32_t rows = 0;
  uint32_t* absmax = nullptr;
};

// One PreparedMoe of the call: the routed experts or the shared one.
struct PartArgs {
  SortArgs sort;
  AbsMaxArgs x_absmax, h_absmax;
  StageArgs stage_gate, stage_up, stage_down;
  GemmArgs gate, up, down;  // `gate` is gate and up together where they are paired
  ActivateArgs activate;
};

// What a product stored: sums of sorted rows.
struct SumRows {
  const void* data = nullptr;  // [sorted][stride] float32, or bf16
  int64_t stride = 0;          // elements
  bool bf16 = false;
};

// The sum over slots: out[t] = sum_j weights[t, j] y[position[t, j]] + factor[t] shared[t], rounded once.
struct CombineArgs {
  int32_t rows = 0;
  int32_t top_k = 0;
  int64_t cols = 0;
  SumRows y;
  const int32_t* position = nullptr;
  const float* weights = nullptr;   // null: 1
  SumRows shared;                   // of rows of x, or none
  const float* factor = nullptr;    // [rows] or null: 1
  void* out = nullptr;
  DType dtype = DType::kBf16;
  // Batched experts: sorted row r goes to out row source[r], unweighted.
  const int32_t* source = nullptr;
  const int32_t* totals = nullptr;
};

// Parts: routed, then shared.
struct CallBlock {
  RouterArgs router;
  PartArgs part[2];
  CombineArgs combine;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CALL_BLOCK_H_
