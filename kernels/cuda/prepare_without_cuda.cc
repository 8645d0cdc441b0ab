// The answers of a build without CUDA.
#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/prepare.h"

namespace moed::cuda {

absl::StatusOr<Accelerator*> TheAccelerator() { return absl::NotFoundError("moed was built without CUDA"); }

absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareOnGpu(const MoeDesc&, const ExpertReader&, WorkerPool&, bool) {
  return absl::NotFoundError("moed was built without CUDA");
}

}  // namespace moed::cuda
