#include "kernels/backends.h"

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/build_info.h"

namespace moed {

std::vector<const Backend*> LinkedBackends() {
  std::vector<const Backend*> backends = cpu::CpuBackends();
  backends.push_back(&cpu::ReferenceBackend());
  return backends;
}

std::string CudaBuild() { return cuda::BuildInfo(); }

}  // namespace moed
