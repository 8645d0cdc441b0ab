#include "kernels/backends.h"

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/build_info.h"
#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/reference.h"

namespace moed {

std::vector<const Backend*> LinkedBackends() {
  std::vector<const Backend*> backends = cuda::CudaBackends();
  for (const Backend* backend : cpu::CpuBackends()) backends.push_back(backend);
  backends.push_back(&cuda::ReferenceBackend());
  backends.push_back(&cpu::ReferenceBackend());
  return backends;
}

std::string CudaBuild() { return cuda::BuildInfo(); }

absl::StatusOr<Accelerator*> LinkedAccelerator() { return cuda::TheAccelerator(); }

DeviceInfo LinkedDevice() {
  DeviceInfo device = ThisDevice();
  const absl::StatusOr<Accelerator*> accelerator = LinkedAccelerator();
  if (accelerator.ok()) {
    (*accelerator)->Describe(&device);
  } else {
    device.gpu_absence = std::string(accelerator.status().message());
  }
  return device;
}

}  // namespace moed
