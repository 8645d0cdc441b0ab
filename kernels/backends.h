// The backends that are linked into this program, in priority order.
#ifndef MOED_KERNELS_BACKENDS_H_
#define MOED_KERNELS_BACKENDS_H_

#include <vector>

#include "kernels/moe_kernel.h"

namespace moed {

// Best first; `reference` is last and never chosen automatically. Instances have no state and live for ever.
std::vector<const Backend*> LinkedBackends();

}  // namespace moed

#endif  // MOED_KERNELS_BACKENDS_H_
