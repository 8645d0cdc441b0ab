// The reference backend: exact weights, double accumulation. The judge of every other backend.
//
// Runs every weight scheme that DequantizeRow defines, on any host, slowly. Chosen only by name.
#ifndef MOED_KERNELS_CPU_REFERENCE_H_
#define MOED_KERNELS_CPU_REFERENCE_H_

#include "kernels/moe_kernel.h"

namespace moed::cpu {

// The one instance; it has no state.
const Backend& ReferenceBackend();

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_REFERENCE_H_
