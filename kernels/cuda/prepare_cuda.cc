#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/prepare.h"

namespace moed::cuda {

absl::StatusOr<Accelerator*> TheAccelerator() {
  // Never destroyed: CUDA's own state is gone before static objects are.
  static const auto* const device = new absl::StatusOr<std::unique_ptr<CudaDevice>>(CudaDevice::Open());
  if (!device->ok()) return device->status();
  return static_cast<Accelerator*>((*device)->get());
}

absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareOnGpu(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool,
                                                          bool hopper) {
  absl::StatusOr<Accelerator*> accelerator = TheAccelerator();
  if (!accelerator.ok()) return accelerator.status();
  return PrepareCudaMoe(desc, reader, pool, *accelerator, hopper);
}

}  // namespace moed::cuda
