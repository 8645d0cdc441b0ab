// What needs the CUDA runtime, behind declarations that a build without CUDA answers too.
#ifndef MOED_KERNELS_CUDA_PREPARE_H_
#define MOED_KERNELS_CUDA_PREPARE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/moe_kernel.h"

namespace moed::cuda {

// Backend::Prepare on the process's GPU; `hopper`: with Hopper's own products. NOT_FOUND where there is none.
absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareOnGpu(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool,
                                                          bool hopper);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_PREPARE_H_
