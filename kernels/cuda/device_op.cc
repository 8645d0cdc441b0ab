#include "kernels/cuda/device_op.h"

#include "kernels/cuda/part_args.h"

namespace moed::cuda {
namespace {

PartWorkspace LayoutOf(const CudaMoe& moe, const DeviceOp& op) {
  return WorkspaceOf(moe.desc(), moe.plan(), moe.hopper(), op.rows, op.rows * op.top_k, op.x_dtype, 0);
}

}  // namespace

size_t DeviceOpBytes(const CudaMoe& moe, const DeviceOp& op) { return LayoutOf(moe, op).end; }

void PlanDeviceOp(const CudaMoe& moe, const DeviceOp& op, std::byte* workspace, CallBlock* block, LaunchPlan* plan) {
  *block = CallBlock();
  *plan = LaunchPlan();
  PartInput input;
  input.x = op.x;
  input.dtype = op.x_dtype;
  input.rows = input.row_capacity = op.rows;
  input.slot_capacity = op.rows * op.top_k;
  input.top_k = op.top_k;
  input.ids = op.ids;
  input.weights = op.weights;
  FillPart(moe, input, LayoutOf(moe, op), workspace, &block->part[0], &plan->part[0]);
  FillCombine(moe, input, block->part[0], op.out, op.out_dtype, &block->combine);
  plan->rows = plan->combine = static_cast<int32_t>(op.rows);
  plan->hidden = moe.desc().hidden;
}

}  // namespace moed::cuda
