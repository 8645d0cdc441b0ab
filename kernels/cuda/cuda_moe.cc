#include "kernels/cuda/cuda_moe.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/cuda_device.h"

namespace moed::cuda {

CudaMoe::CudaMoe(MoeDesc desc, LayerPlan plan, DeviceBuffer arena, Accelerator* accelerator, bool hopper, std::string note)
    : desc_(std::move(desc)),
      plan_(plan),
      offsets_(OffsetsOf(plan_, desc_.num_experts)),
      arena_(std::move(arena)),
      accelerator_(accelerator),
      hopper_(hopper),
      note_(std::move(note)) {}

const float* CudaMoe::stored(int projection) const {
  return reinterpret_cast<const float*>(arena_.data() + offsets_.stored) + static_cast<int64_t>(projection) * desc_.num_experts;
}

const int32_t* CudaMoe::order(const PackedShape& shape, const MatrixOffsets& offsets, int64_t* stride) const {
  *stride = shape.own_order ? shape.depth() : 0;
  if (!shape.ordered) return nullptr;
  return reinterpret_cast<const int32_t*>(arena_.data() + (shape.own_order ? offsets.order : offsets.common_order));
}

MatrixArgs CudaMoe::MatrixOf(const PackedShape& shape, const MatrixOffsets& offsets, const WeightScheme& scheme) const {
  const auto at = [this](size_t offset) { return reinterpret_cast<const uint8_t*>(arena_.data() + offset); };
  MatrixArgs args;
  args.codes = at(offsets.codes);
  args.codes_stride = static_cast<int64_t>(shape.code_bytes());
  args.scales = at(offsets.scales);
  args.scales_stride = static_cast<int64_t>(shape.scale_bytes());
  if (shape.zero_points) args.zeros = at(offsets.zeros);
  args.zeros_stride = static_cast<int64_t>(shape.zero_bytes());
  if (shape.bias) args.bias = reinterpret_cast<const float*>(at(offsets.bias));
  args.bias_stride = static_cast<int64_t>(shape.bias_bytes() / sizeof(float));
  args.globals = reinterpret_cast<const float*>(at(offsets.globals));
  if (shape.own_order) args.step_groups = reinterpret_cast<const int32_t*>(at(offsets.step_groups));
  args.step_groups_stride = shape.blocks * kSteps;
  args.rows = static_cast<int32_t>(shape.rows);
  args.blocks = static_cast<int32_t>(shape.blocks);
  args.row_tiles = static_cast<int32_t>(shape.row_tiles);
  args.groups = static_cast<int32_t>(shape.groups);
  args.group_steps = shape.group_steps;
  args.slots = shape.slots;
  if (IsInteger(scheme.element)) args.zero = 1 << (ElementBits(scheme.element) - 1);
  args.scale = shape.scale;
  return args;
}

absl::Status CudaMoe::Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const {
  absl::Status status = ValidateBatch(desc_, batch, out);
  if (status.ok()) status = CheckPlaces(batch.x, out, batch.top_k);
  if (!status.ok() || batch.x.rows == 0) return status;
  if (context.lane == nullptr) return absl::FailedPreconditionError("a layer on the GPU needs a lane of its accelerator");
  CallInput input;
  input.x = batch.x;
  input.top_k = batch.top_k;
  input.ids = batch.ids;
  input.weights = batch.weights;
  return RunCall({this, nullptr, nullptr}, input, out, *static_cast<CudaLane*>(context.lane), context.pool);
}

absl::Status CudaMoe::RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const {
  absl::Status status = ValidateBatchedExperts(desc_, batch, out);
  if (status.ok()) status = CheckPlaces(batch.x, out, 1);
  if (!status.ok() || std::all_of(batch.counts.begin(), batch.counts.end(), [](int32_t count) { return count == 0; }))
    return status;
  if (context.lane == nullptr) return absl::FailedPreconditionError("a layer on the GPU needs a lane of its accelerator");
  CallInput input;
  input.x = batch.x;
  input.top_k = 1;
  input.counts = batch.counts;
  input.max_m = batch.max_m;
  return RunCall({this, nullptr, nullptr}, input, out, *static_cast<CudaLane*>(context.lane), context.pool);
}

size_t CudaMoe::WorkspaceBytes(int64_t tokens, int top_k) const {
  return LargestWorkspace(desc_, plan_, hopper_, tokens, tokens * top_k);
}

size_t CudaMoe::BatchedWorkspaceBytes(int64_t rows) const { return LargestWorkspace(desc_, plan_, hopper_, rows, rows); }

}  // namespace moed::cuda
