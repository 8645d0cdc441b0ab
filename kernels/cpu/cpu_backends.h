// The CPU backends: one per instruction set over the same packed layout.
#ifndef MOED_KERNELS_CPU_CPU_BACKENDS_H_
#define MOED_KERNELS_CPU_CPU_BACKENDS_H_

#include <vector>

#include "kernels/moe_kernel.h"

namespace moed::cpu {

// In priority order: tiles, then dot products, then float32 arithmetic by vector width, cpu_generic last. Instances have no state and live for ever.
std::vector<const Backend*> CpuBackends();

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CPU_BACKENDS_H_
