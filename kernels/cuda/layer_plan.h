// What a layer looks like on the GPU, from its description alone: packed matrices, how inputs become operands, and the bytes of
// both. Pure functions of plain values; no CUDA.
#ifndef MOED_KERNELS_CUDA_LAYER_PLAN_H_
#define MOED_KERNELS_CUDA_LAYER_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/packed_layout.h"
#include "kernels/moe_kernel.h"

namespace moed::cuda {

// How the input of a product becomes its operand (call_block.h).
struct OperandPlan {
  bool quantized = false;
  bool spans_rows = false;      // one scale for all rows of the request
  bool scaled_values = false;   // groups of scales do not fall on steps: the operand holds code x scale, in three terms
  bool by_sorted_row = false;   // differs between experts: one row for each slot, not each token
  bool stored = false;          // each expert has a scale of its own in the file
  int32_t group = 0;            // inputs of a scale's group; 0: the row
  int64_t groups = 1;           // scales of a row
  int32_t scale_steps = 0;      // steps of a scale's group, 0: one a row; where not scaled_values
  bool bytes = false;           // codes are multiplied as bytes, where Hopper's products do not run (bytes-inl.cuh)

  // bf16 terms of the operand whose values come in `value_terms`.
  int terms(int value_terms) const { return scaled_values ? 3 : quantized ? 1 : value_terms; }
  bool has_scales() const { return quantized && !scaled_values; }
  bool operator==(const OperandPlan&) const = default;
};

struct LayerPlan {
  bool paired = true;  // gate and up are one matrix and share their operand
  bool activates_apart = false;  // the activation is a launch of its own, not in the product of gate and up
  // Gate's and up's features lie in the order of down's positions, so that h needs no gathering: feature i is the input of down
  // that position i holds, and none where that holds none.
  bool ordered_features = false;
  PackedShape gate, up, down;  // `up` is unused when paired
  OperandPlan gate_x, up_x, down_h;

  // Whether the first product may write the second one's operand itself, as bf16.
  bool direct_h() const { return !down_h.quantized && (!down.ordered || ordered_features); }
  // Floats of a row of h, gate's sums and y.
  int64_t h_stride() const { return ordered_features ? down.positions : down.cols; }
  int64_t gate_stride() const { return gate.row_tiles * kTileRows; }  // up's as well
  bool operator==(const LayerPlan&) const = default;
};

// What only the bytes of weights in act-order tell.
struct OrderTraits {
  bool uneven = false;  // groups may have any sizes
  bool equal = true;    // an expert's gate and up have the same order
};
LayerPlan PlanOf(const MoeDesc& desc, OrderTraits orders = {});

// The plans that the weights of a layer may need, the most special one first; one only without act-order.
std::vector<LayerPlan> PlansOf(const MoeDesc& desc);

// Whether the scales of a matrix can multiply the operands of gemm-inl.cuh and few_rows-inl.cuh exactly, for rows of one term
// without scales of groups: E8M0, of groups of whole half blocks, without a global scale.
bool ScalesArePowers(const PackedShape& shape, const WeightScheme& scheme);

// Steps of a slot of a product of bytes: 8, 2 or 1, inputs that lie in one group of the weights and in one of the rows; 0 for int8,
// which has one scale of each. `scale_steps`: of the rows' groups, 0 for one scale a row.
int32_t ByteSlotSteps(const PackedShape& shape, int32_t scale_steps);

// Offsets of a layer's arrays in its one piece of device memory. Arrays of experts follow each other by expert.
struct MatrixOffsets {
  size_t codes = 0, scales = 0, zeros = 0, bias = 0, order = 0, step_groups = 0, globals = 0, common_order = 0;
};
struct LayerOffsets {
  MatrixOffsets gate, up, down;
  size_t stored = 0;  // float [3][E]: input scales of gate, up, down
  size_t bytes = 0;   // of the whole layer
};
LayerOffsets OffsetsOf(const LayerPlan& plan, int num_experts);

// bf16 numbers whose sum is a hidden state of `dtype`, exactly.
constexpr int TermsOf(DType dtype) { return dtype == DType::kF32 ? 3 : dtype == DType::kF16 ? 2 : 1; }
// The same for h, which is bf16 unless x is f32.
constexpr int TermsOfH(DType dtype) { return dtype == DType::kF32 ? 3 : 1; }

// Tiles that `slots` sorted rows of at most `experts` experts make, at most.
int64_t TileCapacity(int64_t slots, int64_t experts, int64_t tile_rows);

// Blocks of the token sort, each with a chunk of the call's slots; 1: in one kernel.
int32_t SortBlocks(int64_t slots, int64_t experts);
// Elements of SortArgs::count.
int64_t SortScratch(int64_t slots, int64_t experts);

// Rows of a tile for a call: few enough that tiles are full, many enough that weights are read once.
// `terms`: some operand has several terms.
int32_t TileRowsFor(int64_t slots, int64_t experts, bool terms);

// Whether groups of inputs end within two blocks: a stage of the ring of Hopper's products has several then.
bool HasManyGroups(const PackedShape& shape);

// Rows of an expert on average, as measured on an H200 (docs/performance.md), that the product for few rows is for at most: more
// where groups are many, which slow the other product.
inline constexpr int64_t kMostFewRows = 12, kMostFewRowsOfMany = 26;

// What the weights of a layer's projections are.
struct WeightKinds {
  bool codes = false;  // of some projection
  bool zeros = false;  // of some projection, codes with zero points of their own
  bool many = false;   // of some projection, codes in groups that end within two blocks (GemmLaunch::many)
  bool whole = false;  // of some projection, 8-bit codes with one scale for all inputs, or none
  bool bf16 = false;
};
WeightKinds KindsOf(const LayerPlan& plan);

// The same for Hopper's own products, which do not have every size for every kind of weights and of results (`words`: float32).
// Where experts have many rows, what whole tiles leave may have tiles of its own, of `rests` rows at most (SortArgs::rest_rows),
// or 0.
struct HopperTileRows {
  int32_t rows = 0, rests = 0;
};
HopperTileRows HopperTileRowsFor(int64_t slots, int64_t experts, WeightKinds kinds, bool words);

// The same for the product for few rows, and 0 where experts have too many.
int32_t FewRowsTileRowsFor(int64_t slots, int64_t experts, WeightKinds kinds);

// Ranges that this product cuts the inputs of a matrix into, for `tiles` tiles of `rows` rows at most, of which `expected` are
// likely: those that let the multiprocessors finish together soonest, each of kFewestRangeBlocks blocks of inputs or more. Above 1
// there are at most kFewRowsCounters tiles by row tiles, and as many sums as kFewRowsBlocks thread blocks of 16 rows have.
inline constexpr int kFewestRangeBlocks = 4;
int32_t FewRowsRanges(int64_t tiles, int64_t expected, int32_t rows, const PackedShape& shape);

// Steps that share a scale in that product: 8, 4, 2 or 1, or 0 where a feature has one scale for all inputs, or none, and no zero
// point.
int32_t FewRowsSlotSteps(const PackedShape& shape);

// Tiles of `rows` rows that random routing makes of `slots` slots.
int64_t ExpectedTilesOf(int64_t slots, int64_t experts, int32_t rows);

// Whether every product of the layer can be one of Hopper's own: weights of 16 bits and less times inputs that are not quantized.
bool FitsHopper(const QuantScheme& scheme);

// Whether Hopper's products round weights of the layer: code times scale, where a feature has scales of several groups.
bool HopperRounds(const QuantScheme& scheme);

// Device memory of one part's call: offsets of its arrays, 256 bytes aligned.
struct PartWorkspace {
  size_t count = 0, source = 0, slot = 0, expert = 0, rank = 0, position = 0, tiles = 0, totals = 0, absmax = 0;
  size_t finished = 0, partials = 0;  // of layers that may run the product for few rows
  size_t gate_x = 0, gate_scales = 0, up_x = 0, up_scales = 0, gate_out = 0, up_out = 0, h = 0, h_operand = 0, h_scales = 0, y = 0;
  size_t end = 0;
};
// `rows` of x in `dtype`, `slots` sorted rows at most. `hopper`: Hopper's products may run, whose x lies by sorted row.
PartWorkspace WorkspaceOf(const MoeDesc& desc, const LayerPlan& plan, bool hopper, int64_t rows, int64_t slots, DType dtype,
                          size_t begin);
// Bytes of the largest of them, whatever the dtype of x.
size_t LargestWorkspace(const MoeDesc& desc, const LayerPlan& plan, bool hopper, int64_t rows, int64_t slots);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_LAYER_PLAN_H_
