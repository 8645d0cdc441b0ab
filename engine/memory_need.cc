#include "engine/memory_need.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

void AddLayer(const MemoryNeed::Part& other, MemoryNeed::Part* part) {
  part->weights += other.weights;
  part->workspace = std::max(part->workspace, other.workspace);
}

absl::Status CheckHost(const MemoryNeed::Part& need, uint64_t machine, uint64_t memory_limit) {
  const bool own_limit = memory_limit != 0 && (machine == 0 || memory_limit <= machine);
  const uint64_t limit = own_limit ? memory_limit : machine;
  if (limit == 0 || need.weights + need.workspace <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(need.weights, " bytes are needed for experts and ", need.workspace,
                                                   " for workspace, ", limit, " are allowed",
                                                   own_limit ? " (memory limit)" : " (memory of the machine)"));
}

absl::Status CheckGpu(const MemoryNeed::Part& need, uint64_t free, int lanes) {
  const uint64_t workspace = need.workspace * static_cast<uint64_t>(lanes);
  if (need.weights + workspace <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(need.weights, " bytes of GPU memory are needed for experts and ", workspace,
                                                   " for the workspace of ", lanes, " lanes, ", free, " are free"));
}

}  // namespace

void MemoryNeed::Add(const MemoryNeed& other) {
  AddLayer(other.host, &host);
  AddLayer(other.gpu, &gpu);
}

void MemoryNeed::AddPart(const Backend& backend, const MoeDesc& desc) {
  const Part part = {backend.PreparedBytes(desc), backend.WorkspaceBytes(desc)};
  if (!backend.OnGpu()) return AddLayer(part, &host);
  gpu.weights += part.weights;
  gpu.workspace += part.workspace;
}

absl::Status CheckFits(const MemoryNeed& need, const DeviceInfo& device, uint64_t memory_limit, int lanes) {
  absl::Status host = CheckHost(need.host, device.memory_bytes, memory_limit);
  return host.ok() ? CheckGpu(need.gpu, device.gpu_free_bytes, lanes) : host;
}

}  // namespace moed
