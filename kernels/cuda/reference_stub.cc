// The reference of a build without the CUDA toolkit: it can be asked, and says no.
#include "kernels/cuda/reference_layer.h"

namespace moed::cuda {

bool ReferenceIsBuilt() { return false; }

absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareReference(const MoeDesc&, const ExpertReader&, WorkerPool&) {
  return absl::UnimplementedError("cuda_reference: built without CUDA");
}

}  // namespace moed::cuda
