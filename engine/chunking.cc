#include "engine/chunking.h"

#include "kernels/activation_quant.h"

namespace moed {

int64_t ChunkRows(const Backend& backend, MoeDesc desc, int64_t max_tokens) {
  desc.max_tokens = max_tokens;
  if (SpansRows(desc.scheme)) return max_tokens;
  const uint64_t budget = backend.OnGpu() ? kGpuWorkspaceBudget : kWorkspaceBudget;
  while (desc.max_tokens > 1 && backend.WorkspaceBytes(desc) > budget) desc.max_tokens /= 2;
  return desc.max_tokens;
}

}  // namespace moed
