// The backends that are linked into this program, in priority order.
#ifndef MOED_KERNELS_BACKENDS_H_
#define MOED_KERNELS_BACKENDS_H_

#include <string>
#include <vector>

#include "kernels/moe_kernel.h"

namespace moed {

// Best first; `reference` is last and never chosen automatically. Instances have no state and live for ever.
std::vector<const Backend*> LinkedBackends();

// The CUDA part of the build: "CUDA 13.0, sm_90a" (architectures separated by ", "), or "built without CUDA".
std::string CudaBuild();

}  // namespace moed

#endif  // MOED_KERNELS_BACKENDS_H_
