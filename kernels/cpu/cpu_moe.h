// The CPU forward of a layer, for any kernels and any LayerStore.
#ifndef MOED_KERNELS_CPU_CPU_MOE_H_
#define MOED_KERNELS_CPU_CPU_MOE_H_

#include <memory>

#include "kernels/cpu/layer_store.h"
#include "kernels/cpu/operands.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// A prepared layer that runs on `kernels`.
std::unique_ptr<PreparedMoe> MakeCpuMoe(MoeDesc desc, const CpuKernels& kernels, std::unique_ptr<LayerStore> store);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_CPU_MOE_H_
