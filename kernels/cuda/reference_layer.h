// The half of the reference that needs the CUDA toolkit, as the other half sees it. A build without one links a stub.
#ifndef MOED_KERNELS_CUDA_REFERENCE_LAYER_H_
#define MOED_KERNELS_CUDA_REFERENCE_LAYER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/moe_kernel.h"

namespace moed::cuda {

// Whether this build has the kernels.
bool ReferenceIsBuilt();

// Backend::Prepare of the reference. UNIMPLEMENTED unless ReferenceIsBuilt.
absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareReference(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_REFERENCE_LAYER_H_
