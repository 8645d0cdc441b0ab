#include "kernels/cuda/packed_layout.h"

#include <algorithm>

namespace moed::cuda {
namespace {

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// How the inputs of a matrix with groups become positions.
void LayOutGroups(const WeightScheme& scheme, bool uneven, PackedShape* shape) {
  const int64_t group = scheme.group.cols > 0 ? scheme.group.cols : shape->cols;
  const int64_t padded = RoundUp(group, kStepDepth);
  shape->groups = GroupCount(shape->cols, scheme.group.cols);
  shape->own_order = scheme.act_order;
  const bool padding = shape->groups > 1 && padded != group;
  shape->ordered = scheme.act_order || padding;
  if (padding) shape->positions = (shape->groups - 1) * padded + (shape->cols - (shape->groups - 1) * group);
  shape->group_steps = static_cast<int32_t>(std::min<int64_t>(padded / kStepDepth, INT32_MAX));
  shape->slots = shape->groups == 1 || padded % kBlockDepth == 0 ? 1 : padded % (kBlockDepth / 2) == 0 ? 2 : kSteps;
  if (!scheme.act_order || !uneven) return;
  shape->positions = shape->cols + (kStepDepth - 1) * shape->groups;
  shape->slots = kSteps;
}

}  // namespace

Codes CodesOf(ElementType element) {
  switch (element) {
    case ElementType::kF32: return Codes::kF32;
    case ElementType::kBf16: return Codes::kBf16;
    case ElementType::kF16: return Codes::kF16;
    case ElementType::kInt4: return Codes::kInt4;
    case ElementType::kInt8: return Codes::kInt8;
    case ElementType::kFp4E2m1: return Codes::kFp4;
    case ElementType::kFp8E4m3:
    case ElementType::kFp6E2m3:
    case ElementType::kFp6E3m2: return Codes::kFp8;
  }
  return Codes::kF32;
}

PackedShape ShapeOf(const WeightScheme& scheme, int64_t rows, int64_t cols, bool paired, bool bias, bool uneven) {
  PackedShape shape;
  shape.codes = CodesOf(scheme.element);
  shape.paired = paired;
  shape.rows = rows;
  shape.cols = shape.positions = cols;
  shape.bias = bias;
  shape.scale = scheme.scale;
  shape.zero_points = scheme.zero_points;
  const int64_t tile_rows = paired ? kHalfRows : kTileRows;
  shape.row_tiles = (rows + tile_rows - 1) / tile_rows;
  if (!IsUnquantized(scheme.element)) LayOutGroups(scheme, uneven, &shape);
  shape.blocks = (shape.positions + kBlockDepth - 1) / kBlockDepth;
  return shape;
}

}  // namespace moed::cuda
