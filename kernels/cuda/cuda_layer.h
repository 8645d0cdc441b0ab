// Whole layers on CUDA: gate, router, routed and shared experts in one sequence of launches.
#ifndef MOED_KERNELS_CUDA_CUDA_LAYER_H_
#define MOED_KERNELS_CUDA_CUDA_LAYER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/accelerator.h"
#include "kernels/cuda/cuda_device.h"

namespace moed::cuda {

// INVALID_ARGUMENT when the parts do not belong to `device` or to each other.
absl::StatusOr<std::unique_ptr<DeviceLayer>> MakeCudaLayer(const DeviceLayerParts& parts, CudaDevice* device);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_LAYER_H_
