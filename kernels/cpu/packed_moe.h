// The CPU forward over packed experts, for any KernelTable.
#ifndef MOED_KERNELS_CPU_PACKED_MOE_H_
#define MOED_KERNELS_CPU_PACKED_MOE_H_

#include <memory>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_layer.h"
#include "kernels/moe_kernel.h"

namespace moed::cpu {

// Workspace of a call of `tokens` rows with `top_k` slots each on up to `threads` workers.
size_t PackedWorkspaceBytes(const MoeDesc& desc, int64_t tokens, int top_k);

// A prepared layer that runs on `kernels`.
std::unique_ptr<PreparedMoe> MakePackedMoe(MoeDesc desc, const KernelTable& kernels, std::unique_ptr<PackedLayer> layer);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_PACKED_MOE_H_
