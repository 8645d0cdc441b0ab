// What is linked into this program: the backends in priority order, the accelerator, and the device that they run on.
// All functions may be called from any thread.
#ifndef MOED_KERNELS_BACKENDS_H_
#define MOED_KERNELS_BACKENDS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device_info.h"
#include "kernels/moe_kernel.h"

namespace moed {

// Best first; `reference` is last and never chosen automatically. Instances have no state and live for ever.
std::vector<const Backend*> LinkedBackends();

// The CUDA part of the build: "CUDA 13.0, sm_90a" (architectures separated by ", "), or "built without CUDA".
std::string CudaBuild();

// The accelerator of this machine, made by the first call; lives for ever. NOT_FOUND with the reason when the program or the
// machine has none.
absl::StatusOr<Accelerator*> LinkedAccelerator();

// The machine this process runs on, with its accelerator where there is one: ThisDevice() and what Accelerator::Describe adds.
DeviceInfo LinkedDevice();

}  // namespace moed

#endif  // MOED_KERNELS_BACKENDS_H_
