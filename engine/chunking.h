// How many rows are computed at once.
#ifndef MOED_ENGINE_CHUNKING_H_
#define MOED_ENGINE_CHUNKING_H_

#include <cstdint>

#include "kernels/moe_kernel.h"

namespace moed {

// Workspace that one layer's call may take; larger calls go in chunks. On the GPU a chunk must be large to be fast.
inline constexpr uint64_t kWorkspaceBudget = uint64_t{256} << 20;
inline constexpr uint64_t kGpuWorkspaceBudget = uint64_t{2} << 30;

// The largest number of rows, at most `max_tokens` and at least 1, whose workspace on `backend` stays within the budget:
// max_tokens halved as often as needed. `max_tokens` itself for a layer whose activation scales span the request: it is never
// computed in chunks, and its workspace is what all rows need.
int64_t ChunkRows(const Backend& backend, MoeDesc desc, int64_t max_tokens);

}  // namespace moed

#endif  // MOED_ENGINE_CHUNKING_H_
