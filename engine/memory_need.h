// What layers take of the host's memory and of the GPU's, and whether it is there. Pure functions.
#ifndef MOED_ENGINE_MEMORY_NEED_H_
#define MOED_ENGINE_MEMORY_NEED_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/moe_kernel.h"

namespace moed {

// Calls on the GPU that run at once unless told otherwise (EngineOptions::lanes).
inline constexpr int kDefaultLanes = 2;

struct MemoryNeed {
  // Bytes of one memory. Weights add up; workspace is that of the layer that takes most, for one call.
  struct Part {
    uint64_t weights = 0;
    uint64_t workspace = 0;
    bool operator==(const Part&) const = default;
  };
  Part host;
  Part gpu;

  // Another layer, or the layers of another model, beside these.
  void Add(const MemoryNeed& other);
  // Another part of the same layer, routed or shared experts, as `backend` prepares and runs it, in the memory that it takes. On
  // the host one part runs after the other; a call on the GPU has workspace for both.
  void AddPart(const Backend& backend, const MoeDesc& desc);
};

// RESOURCE_EXHAUSTED with the needed and the free bytes of the memory that is too small; else OK. On the host one call computes
// at a time, within `memory_limit` (0: none) and the memory of `device`; on the GPU each of `lanes` has its own workspace, within
// gpu_free_bytes. Memory of the host that is unknown (0) is not checked.
absl::Status CheckFits(const MemoryNeed& need, const DeviceInfo& device, uint64_t memory_limit, int lanes);

}  // namespace moed

#endif  // MOED_ENGINE_MEMORY_NEED_H_
