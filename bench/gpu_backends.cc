#include "bench/gpu_backends.h"

#include <algorithm>

#include "kernels/cuda/layer_plan.h"

namespace moed::bench {
namespace {

bool FitsAll(const MoeDesc&) { return true; }

bool FitsHopper(const MoeDesc& desc) { return cuda::FitsHopper(desc.scheme); }

constexpr GpuBackend kBackends[] = {{"cuda_wna16", FitsHopper, MakeHopperLayer},
                                    {"cuda_generic", FitsAll, MakeGenericLayer}};

}  // namespace

std::span<const GpuBackend> GpuBackends() { return kBackends; }

const GpuBackend* FindGpuBackend(std::string_view name) {
  const auto at = std::find_if(std::begin(kBackends), std::end(kBackends), [&](const GpuBackend& one) { return one.name == name; });
  return at == std::end(kBackends) ? nullptr : at;
}

}  // namespace moed::bench
