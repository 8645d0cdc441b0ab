// A layer's experts in GPU memory, and the calls that run on them.
//
// Immutable once prepared: any number of lanes may use it at once.
#ifndef MOED_KERNELS_CUDA_CUDA_MOE_H_
#define MOED_KERNELS_CUDA_CUDA_MOE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/call_block.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/layer_plan.h"
#include "kernels/moe_kernel.h"

namespace moed::cuda {

class CudaMoe : public PreparedMoe {
 public:
  // Takes over packed weights: `arena` as OffsetsOf(plan, E) says.
  // `hopper`: with Hopper's own products where a call has the rows for them. `note`: as Note gives it.
  CudaMoe(MoeDesc desc, LayerPlan plan, DeviceBuffer arena, Accelerator* accelerator, bool hopper, std::string note = "");

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override;
  absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const override;
  Accelerator* accelerator() const override { return accelerator_; }
  size_t WorkspaceBytes(int64_t tokens, int top_k) const override;
  size_t BatchedWorkspaceBytes(int64_t rows) const override;
  size_t ResidentBytes() const override { return arena_.size(); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }
  std::string Note() const override { return note_; }

  const MoeDesc& desc() const { return desc_; }
  const LayerPlan& plan() const { return plan_; }
  bool hopper() const { return hopper_; }

  // The packed matrices and each expert's stored input scales, as kernels read them.
  MatrixArgs gate() const { return MatrixOf(plan_.gate, offsets_.gate, desc_.scheme.gate.weights); }
  MatrixArgs up() const { return MatrixOf(plan_.up, offsets_.up, desc_.scheme.up.weights); }
  MatrixArgs down() const { return MatrixOf(plan_.down, offsets_.down, desc_.scheme.down.weights); }
  const float* stored(int projection) const;  // 0 gate, 1 up, 2 down
  // The order of a matrix's positions: null where they are inputs; `stride` between experts, 0 for a common one.
  const int32_t* order(const PackedShape& shape, const MatrixOffsets& offsets, int64_t* stride) const;
  const LayerOffsets& offsets() const { return offsets_; }

 private:
  MatrixArgs MatrixOf(const PackedShape& shape, const MatrixOffsets& offsets, const WeightScheme& scheme) const;

  const MoeDesc desc_;
  const LayerPlan plan_;
  const LayerOffsets offsets_;
  const DeviceBuffer arena_;
  Accelerator* const accelerator_;
  const bool hopper_;
  const std::string note_;
};

// Reads all experts, packs them with `pool`, and streams them into GPU memory through a ring of pinned buffers.
// RESOURCE_EXHAUSTED names the bytes that are needed and free; other errors as Backend::Prepare.
absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareCudaMoe(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool,
                                                            Accelerator* accelerator, bool hopper);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_MOE_H_
