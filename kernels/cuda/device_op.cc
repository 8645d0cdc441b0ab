#include "kernels/cuda/device_op.h"

#include "kernels/cuda/part_args.h"

namespace moed::cuda {
namespace {

// Of the launches. Rows of batched experts are only staged by sorted row.
int64_t RowsOf(const DeviceOp& op) { return op.counts != nullptr ? op.counted : op.rows; }
int64_t SlotsOf(const DeviceOp& op) { return op.counts != nullptr ? op.counted : op.rows * op.top_k; }

PartWorkspace LayoutOf(const CudaMoe& moe, const DeviceOp& op) {
  return WorkspaceOf(moe.desc(), moe.plan(), moe.hopper(), RowsOf(op), SlotsOf(op), op.x_dtype, 0);
}

}  // namespace

size_t DeviceOpBytes(const CudaMoe& moe, const DeviceOp& op) { return LayoutOf(moe, op).end; }

void PlanDeviceOp(const CudaMoe& moe, const DeviceOp& op, std::byte* workspace, CallBlock* block, LaunchPlan* plan) {
  *block = CallBlock();
  *plan = LaunchPlan();
  PartInput input;
  input.x = op.x;
  input.dtype = op.x_dtype;
  input.rows = op.rows;
  input.row_capacity = RowsOf(op);
  input.slot_capacity = SlotsOf(op);
  input.top_k = op.top_k;
  input.ids = op.ids;
  input.weights = op.weights;
  input.counts = op.counts;
  input.max_m = op.max_m;
  FillPart(moe, input, LayoutOf(moe, op), workspace, &block->part[0], &plan->part[0]);
  FillCombine(moe, input, block->part[0], op.out, op.out_dtype, &block->combine);
  plan->rows = plan->combine = static_cast<int32_t>(RowsOf(op));
  plan->hidden = moe.desc().hidden;
}

}  // namespace moed::cuda
