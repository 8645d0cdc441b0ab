#include "kernels/backends.h"

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"

namespace moed {

std::vector<const Backend*> LinkedBackends() {
  std::vector<const Backend*> backends = cpu::CpuBackends();
  backends.push_back(&cpu::ReferenceBackend());
  return backends;
}

absl::StatusOr<Accelerator*> LinkedAccelerator() { return absl::NotFoundError("moed was built without CUDA"); }

DeviceInfo LinkedDevice() {
  DeviceInfo device = ThisDevice();
  const absl::StatusOr<Accelerator*> accelerator = LinkedAccelerator();
  if (accelerator.ok()) (*accelerator)->Describe(&device);
  return device;
}

}  // namespace moed
