#include "engine/fused_experts.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

// Input features that are read at once where the file has them as rows: few enough that the cache lines of one band, a line
// for each row, stay in a 32 KiB first-level cache while they are taken apart.
constexpr int64_t kBand = 128;

// Where one projection [N, K] lies in the slice of one expert.
struct Slice {
  TensorRef tensor;
  bool columns = false;  // the slice is [K, width] and output feature n is column first + n * step; else rows, step 1
  int64_t first = 0;
  int64_t step = 1;
  int64_t width = 0;  // columns of the slice; rows: K
};

// Where a bias [N] lies in the slice of one expert.
struct BiasSlice {
  TensorRef tensor;
  int64_t first = 0;
  int64_t step = 1;
};

struct Layer {
  int64_t experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  WeightScheme scheme;
  Slice gate, up, down;
  bool biases = false;
  BiasSlice gate_bias, up_bias, down_bias;
};

// Takes columns apart: to[n * cols + k] = from[k * width + n * step] for n < rows and k < band. T has the element's size.
template <typename T>
void Scatter(const uint8_t* from, int64_t width, int64_t step, int64_t rows, int64_t band, int64_t cols, uint8_t* to) {
  for (int64_t n = 0; n < rows; ++n) {
    uint8_t* out = to + n * cols * static_cast<int64_t>(sizeof(T));
    const uint8_t* in = from + n * step * static_cast<int64_t>(sizeof(T));
    for (int64_t k = 0; k < band; ++k) {
      std::memcpy(out + k * static_cast<int64_t>(sizeof(T)), in + k * width * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
}

class FusedReader : public ExpertReader {
 public:
  explicit FusedReader(Layer layer) : layer_(std::move(layer)), element_bytes_(ElementBits(layer_.scheme.element) / 8) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    Prepare(layer_.intermediate, layer_.hidden, &out->gate);
    Prepare(layer_.intermediate, layer_.hidden, &out->up);
    Prepare(layer_.hidden, layer_.intermediate, &out->down);
    if (layer_.gate.columns) {
      // Both lie in the same rows of the file, which are read once.
      MOED_RETURN_IF_ERROR(ReadColumns(expert, layer_.hidden, {{&layer_.gate, &out->gate}, {&layer_.up, &out->up}}));
    } else {
      MOED_RETURN_IF_ERROR(ReadRows(expert, layer_.gate, &out->gate));
      MOED_RETURN_IF_ERROR(ReadRows(expert, layer_.up, &out->up));
    }
    if (layer_.down.columns) {
      MOED_RETURN_IF_ERROR(ReadColumns(expert, layer_.intermediate, {{&layer_.down, &out->down}}));
    } else {
      MOED_RETURN_IF_ERROR(ReadRows(expert, layer_.down, &out->down));
    }
    if (!layer_.biases) return absl::OkStatus();
    MOED_RETURN_IF_ERROR(ReadBias(expert, layer_.gate_bias, layer_.intermediate, &out->gate.bias));
    MOED_RETURN_IF_ERROR(ReadBias(expert, layer_.up_bias, layer_.intermediate, &out->up.bias));
    return ReadBias(expert, layer_.down_bias, layer_.hidden, &out->down.bias);
  }

 private:
  using Target = std::pair<const Slice*, LinearWeights*>;

  void Prepare(int64_t rows, int64_t cols, LinearWeights* out) const {
    out->scheme = layer_.scheme;
    out->rows = rows;
    out->cols = cols;
    out->scales.clear();
    out->zero_points.clear();
    out->group_index.clear();
    out->bias.clear();
    out->global_scale = 1.0f;
    out->input_scale = 1.0f;
    out->codes.resize(static_cast<size_t>(rows * cols * element_bytes_));
  }

  // Every expert has an even share of the tensor.
  uint64_t Start(int expert, const TensorRef& tensor) const {
    return tensor.info->bytes / static_cast<uint64_t>(layer_.experts) * static_cast<uint64_t>(expert);
  }

  absl::Status ReadRows(int expert, const Slice& slice, LinearWeights* out) const {
    const uint64_t offset = Start(expert, slice.tensor) + static_cast<uint64_t>(slice.first * slice.width * element_bytes_);
    return AtTensor(slice.tensor, slice.tensor.file->Read(*slice.tensor.info, offset, out->codes));
  }

  // All targets lie in the tensor of the first one.
  absl::Status ReadColumns(int expert, int64_t cols, const std::vector<Target>& targets) const {
    const Slice& lead = *targets.front().first;
    const int64_t row_bytes = lead.width * element_bytes_;
    std::vector<uint8_t> band(static_cast<size_t>(std::min(cols, kBand) * row_bytes));
    for (int64_t k = 0; k < cols; k += kBand) {
      const int64_t count = std::min(cols - k, kBand);
      const std::span<uint8_t> part(band.data(), static_cast<size_t>(count * row_bytes));
      const uint64_t offset = Start(expert, lead.tensor) + static_cast<uint64_t>(k * row_bytes);
      MOED_RETURN_IF_ERROR(AtTensor(lead.tensor, lead.tensor.file->Read(*lead.tensor.info, offset, part)));
      for (const auto& [slice, out] : targets) {
        const uint8_t* from = part.data() + slice->first * element_bytes_;
        uint8_t* to = out->codes.data() + k * element_bytes_;
        const auto scatter = element_bytes_ == 2 ? Scatter<uint16_t> : Scatter<uint32_t>;
        scatter(from, slice->width, slice->step, out->rows, count, cols, to);
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadBias(int expert, const BiasSlice& slice, int64_t rows, std::vector<float>* out) const {
    const StDtype dtype = slice.tensor.info->dtype;
    const size_t bytes = static_cast<size_t>(StDtypeBits(dtype)) / 8;
    std::vector<uint8_t> raw(slice.tensor.info->bytes / static_cast<uint64_t>(layer_.experts));
    MOED_RETURN_IF_ERROR(
        AtTensor(slice.tensor, slice.tensor.file->Read(*slice.tensor.info, Start(expert, slice.tensor), raw)));
    out->resize(static_cast<size_t>(rows));
    for (int64_t n = 0; n < rows; ++n) {
      (*out)[n] = ElementAsFloat(dtype, raw.data() + static_cast<size_t>(slice.first + n * slice.step) * bytes);
    }
    return absl::OkStatus();
  }

  const Layer layer_;
  const int64_t element_bytes_;
};

// The two ways in which the experts' matrices can stand in a tensor.
struct Orientations {
  bool rows = false;     // a plain [N, K] per expert
  bool columns = false;  // its transpose
};

Orientations Fits(const TensorRef& tensor, const Shape& rows, const Shape& columns) {
  return {tensor.info->shape == rows, tensor.info->shape == columns};
}

// Whether the experts of gate_up_proj and down_proj are stored transposed. `own`: what the family does.
absl::StatusOr<bool> IsTransposed(const ModelConfig& config, const TensorRef& gate_up, const TensorRef& down, bool own) {
  const int64_t experts = config.num_experts, hidden = config.hidden, width = config.intermediate;
  const Shape gate_up_shapes[] = {{experts, 2 * width, hidden}, {experts, hidden, 2 * width}};
  const Shape down_shapes[] = {{experts, hidden, width}, {experts, width, hidden}};
  const Orientations first = Fits(gate_up, gate_up_shapes[0], gate_up_shapes[1]);
  const Orientations second = Fits(down, down_shapes[0], down_shapes[1]);
  if (!first.rows && !first.columns) return CheckShape(gate_up, {gate_up_shapes[own], gate_up_shapes[!own]});
  if (!second.rows && !second.columns) return CheckShape(down, {down_shapes[own], down_shapes[!own]});
  const bool first_transposed = first.rows && first.columns ? own : first.columns;
  const bool second_transposed = second.rows && second.columns ? own : second.columns;
  if (first_transposed != second_transposed) {
    return TensorError(
        down, absl::StrCat("shape is ", ShapeText(down.info->shape), ", want ", ShapeText(down_shapes[first_transposed]),
                           " beside a gate_up_proj of ", ShapeText(gate_up.info->shape), " (", FamilyName(config.family),
                           " stores experts ", own ? "transposed" : "as rows", " where a shape leaves it open)"));
  }
  return first_transposed;
}

// Gate and up in one tensor, side by side or in turn.
absl::Status PlacePair(const ModelConfig& config, const TensorRef& gate_up, const TensorRef& down, FusedLayout layout,
                       Layer* out) {
  const int64_t hidden = config.hidden, width = config.intermediate;
  bool transposed = true;
  if (layout == FusedLayout::kInterleavedColumns) {
    MOED_RETURN_IF_ERROR(CheckShape(gate_up, {{config.num_experts, hidden, 2 * width}}));
    MOED_RETURN_IF_ERROR(CheckShape(down, {{config.num_experts, width, hidden}}));
  } else if (layout == FusedLayout::kLinear) {
    transposed = false;
    MOED_RETURN_IF_ERROR(CheckShape(gate_up, {{config.num_experts, 2 * width, hidden}}));
    MOED_RETURN_IF_ERROR(CheckShape(down, {{config.num_experts, hidden, width}}));
  } else {
    const absl::StatusOr<bool> found = IsTransposed(config, gate_up, down, layout == FusedLayout::kColumns);
    if (!found.ok()) return found.status();
    transposed = *found;
  }
  const bool in_turn = layout == FusedLayout::kInterleavedColumns;
  const int64_t pair_width = transposed ? 2 * width : hidden;
  out->gate = {gate_up, transposed, 0, in_turn ? 2 : 1, pair_width};
  out->up = {gate_up, transposed, in_turn ? 1 : width, in_turn ? 2 : 1, pair_width};
  out->down = {down, transposed, 0, 1, transposed ? hidden : width};
  return absl::OkStatus();
}

// dbrx: the rows of all experts one after another; w2 is stored transposed.
absl::Status PlaceStacked(const ModelConfig& config, const TensorRef& gate, const TensorRef& up, const TensorRef& down,
                          Layer* out) {
  const Shape shape = {config.num_experts * config.intermediate, config.hidden};
  for (const TensorRef& tensor : {gate, up, down}) MOED_RETURN_IF_ERROR(CheckShape(tensor, {shape}));
  out->gate = {gate, false, 0, 1, config.hidden};
  out->up = {up, false, 0, 1, config.hidden};
  out->down = {down, true, 0, 1, config.hidden};
  return absl::OkStatus();
}

absl::Status PlaceBiases(const ModelConfig& config, const TensorRef& gate_up, const TensorRef& down, Layer* out) {
  for (const TensorRef& tensor : {gate_up, down}) MOED_RETURN_IF_ERROR(CheckFloat(tensor));
  MOED_RETURN_IF_ERROR(CheckShape(gate_up, {{config.num_experts, 2 * config.intermediate}}));
  MOED_RETURN_IF_ERROR(CheckShape(down, {{config.num_experts, config.hidden}}));
  out->biases = true;
  out->gate_bias = {gate_up, 0, 2};
  out->up_bias = {gate_up, 1, 2};
  out->down_bias = {down, 0, 1};
  return absl::OkStatus();
}

// All tensors must be of one floating-point type.
absl::Status CheckTypes(const std::vector<TensorRef>& tensors) {
  for (const TensorRef& tensor : tensors) {
    MOED_RETURN_IF_ERROR(CheckFloat(tensor));
    if (tensor.info->dtype == tensors.front().info->dtype) continue;
    return TensorError(tensor, absl::StrCat("dtype is ", StDtypeName(tensor.info->dtype), ", want that of the gate, ",
                                            StDtypeName(tensors.front().info->dtype)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FusedPlan> PlanFusedExperts(const ModelConfig& config, TensorFinder& finder, const ExpertNaming& naming) {
  if (config.expert_biases && naming.layout != FusedLayout::kInterleavedColumns) {
    return absl::InvalidArgumentError(
        absl::StrCat(naming.root, "*: fused experts with biases, of which only the layout of gpt_oss is known"));
  }
  const FusedNames names = FusedNamesOf(naming);
  std::vector<TensorRef> tensors = {finder.Want(names.gate)};
  if (names.up != names.gate) tensors.push_back(finder.Want(names.up));
  tensors.push_back(finder.Want(names.down));
  TensorRef gate_up_bias, down_bias;
  if (config.expert_biases) {
    gate_up_bias = finder.Want(names.gate_up_bias);
    down_bias = finder.Want(names.down_bias);
  }
  FusedPlan plan;
  const auto absent = [](const TensorRef& tensor) { return !tensor; };
  if (std::any_of(tensors.begin(), tensors.end(), absent)) return plan;
  if (config.expert_biases && (!gate_up_bias || !down_bias)) return plan;

  Layer layer;
  layer.experts = config.num_experts;
  layer.hidden = config.hidden;
  layer.intermediate = config.intermediate;
  MOED_RETURN_IF_ERROR(CheckTypes(tensors));
  layer.scheme.element = FloatElementType(tensors[0].info->dtype);
  MOED_RETURN_IF_ERROR(naming.layout == FusedLayout::kStacked
                           ? PlaceStacked(config, tensors[0], tensors[1], tensors[2], &layer)
                           : PlacePair(config, tensors[0], tensors[1], naming.layout, &layer));
  if (config.expert_biases) {
    MOED_RETURN_IF_ERROR(PlaceBiases(config, gate_up_bias, down_bias, &layer));
    tensors.insert(tensors.end(), {gate_up_bias, down_bias});
  }
  for (const TensorRef& tensor : tensors) plan.file_bytes += tensor.info->bytes;
  LinearScheme linear;
  linear.weights = layer.scheme;
  plan.scheme = UniformScheme(linear);
  plan.reader = std::make_shared<FusedReader>(std::move(layer));
  return plan;
}

}  // namespace moed
