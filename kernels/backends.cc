#include "kernels/backends.h"

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"

namespace moed {

std::vector<const Backend*> LinkedBackends() {
  std::vector<const Backend*> backends = cpu::CpuBackends();
  backends.push_back(&cpu::ReferenceBackend());
  return backends;
}

}  // namespace moed
