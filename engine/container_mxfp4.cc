#include "engine/container_mxfp4.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"
#include "engine/weights_reader.h"

namespace moed {
namespace {

constexpr int64_t kBlock = 32;

// One fused matrix [E, N, K].
struct FusedMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  TensorRef blocks;
  TensorRef scales;
  TensorRef bias;
};

struct Layer {
  int64_t experts = 0;
  WeightScheme scheme;
  FusedMatrix gate_up;
  FusedMatrix down;
};

// The share of one expert.
absl::Status ReadShare(const TensorRef& tensor, int64_t experts, int expert, std::vector<uint8_t>* out) {
  out->resize(tensor.info->bytes / static_cast<uint64_t>(experts));
  return AtTensor(tensor, tensor.file->Read(*tensor.info, out->size() * static_cast<uint64_t>(expert), *out));
}

class Reader : public ExpertReader {
 public:
  explicit Reader(Layer layer) : layer_(std::move(layer)) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    LinearWeights both;
    MOED_RETURN_IF_ERROR(ReadMatrix(layer_.gate_up, expert, &both));
    SplitInterleaved(both, &out->gate, &out->up);
    return ReadMatrix(layer_.down, expert, &out->down);
  }

 private:
  absl::Status ReadMatrix(const FusedMatrix& matrix, int expert, LinearWeights* out) const {
    out->scheme = layer_.scheme;
    out->rows = matrix.rows;
    out->cols = matrix.cols;
    out->zero_points.clear();
    out->group_index.clear();
    out->bias.clear();
    out->global_scale = 1.0f;
    out->input_scale = 1.0f;
    MOED_RETURN_IF_ERROR(ReadShare(matrix.blocks, layer_.experts, expert, &out->codes));
    MOED_RETURN_IF_ERROR(ReadShare(matrix.scales, layer_.experts, expert, &out->scales));
    const absl::Status valid = CheckScaleValues(ScaleType::kE8m0, out->scales);
    if (!valid.ok()) return AtTensor(matrix.scales, InExpert(valid, expert));
    if (!matrix.bias) return absl::OkStatus();
    std::vector<uint8_t> raw;
    MOED_RETURN_IF_ERROR(ReadShare(matrix.bias, layer_.experts, expert, &raw));
    const StDtype dtype = matrix.bias.info->dtype;
    const size_t bytes = static_cast<size_t>(StDtypeBits(dtype)) / 8;
    for (size_t at = 0; at < raw.size(); at += bytes) out->bias.push_back(ElementAsFloat(dtype, raw.data() + at));
    return absl::OkStatus();
  }

  static absl::Status InExpert(const absl::Status& status, int expert) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert ", expert, ": ", std::string(status.message().data(), status.message().size())));
  }

  const Layer layer_;
};

absl::StatusOr<FusedMatrix> FindMatrix(TensorFinder& finder, const std::string& name, int64_t experts, int64_t rows,
                                       int64_t cols, bool bias) {
  FusedMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.blocks = finder.Want(name + "_blocks");
  matrix.scales = finder.Want(name + "_scales");
  if (bias) matrix.bias = finder.Want(name + "_bias");
  MOED_RETURN_IF_ERROR(CheckDtype(matrix.blocks, {StDtype::kU8}));
  MOED_RETURN_IF_ERROR(CheckDtype(matrix.scales, {StDtype::kU8, StDtype::kF8E8m0}));
  MOED_RETURN_IF_ERROR(CheckFloat(matrix.bias));
  MOED_RETURN_IF_ERROR(CheckShape(matrix.blocks, {Shape{experts, rows, cols / kBlock, kBlock / 2}}));
  MOED_RETURN_IF_ERROR(CheckShape(matrix.scales, {Shape{experts, rows, cols / kBlock}}));
  MOED_RETURN_IF_ERROR(CheckShape(matrix.bias, {Shape{experts, rows}}));
  return matrix;
}

}  // namespace

bool HasFusedMxfp4(const TensorFinder& finder, const std::string& root) {
  return finder.Exists(root + "gate_up_proj_blocks") || finder.Exists(root + "down_proj_blocks");
}

absl::StatusOr<FusedPlan> PlanFusedMxfp4(const ModelConfig& config, TensorFinder& finder, const DeclaredScheme& declared,
                                         const std::string& root) {
  if (config.hidden % kBlock != 0 || config.intermediate % kBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat(root, "*: MXFP4 in blocks of ", kBlock,
                                                   " needs sizes that are multiples of it, got H = ", config.hidden,
                                                   ", I = ", config.intermediate));
  }
  FusedPlan plan;
  Layer layer;
  layer.experts = config.num_experts;
  layer.scheme = declared.linear.weights;
  layer.scheme.element = ElementType::kFp4E2m1;
  layer.scheme.scale = ScaleType::kE8m0;
  layer.scheme.group = {1, kBlock};
  absl::StatusOr<FusedMatrix> gate_up =
      FindMatrix(finder, root + "gate_up_proj", layer.experts, 2 * config.intermediate, config.hidden, config.expert_biases);
  if (!gate_up.ok()) return gate_up.status();
  absl::StatusOr<FusedMatrix> down =
      FindMatrix(finder, root + "down_proj", layer.experts, config.hidden, config.intermediate, config.expert_biases);
  if (!down.ok()) return down.status();
  for (const FusedMatrix* matrix : {&*gate_up, &*down}) {
    if (!matrix->blocks || !matrix->scales || (config.expert_biases && !matrix->bias)) return plan;
    plan.file_bytes +=
        matrix->blocks.info->bytes + matrix->scales.info->bytes + (matrix->bias ? matrix->bias.info->bytes : 0);
  }
  layer.gate_up = *std::move(gate_up);
  layer.down = *std::move(down);
  LinearScheme linear = declared.linear;
  linear.weights = layer.scheme;
  plan.scheme = UniformScheme(linear);
  plan.reader = std::make_shared<Reader>(std::move(layer));
  return plan;
}

}  // namespace moed
