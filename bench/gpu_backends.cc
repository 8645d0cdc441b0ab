#include "bench/gpu_backends.h"

#include "kernels/cuda/layer_plan.h"

namespace moed::bench {
namespace {

bool FitsAll(const MoeDesc&) { return true; }

bool FitsHopper(const MoeDesc& desc) { return cuda::FitsHopper(desc.scheme); }

constexpr GpuBackend kBackends[] = {{"cuda_wna16", FitsHopper, MakeHopperLayer},
                                    {"cuda_generic", FitsAll, MakeGenericLayer}};

}  // namespace

std::span<const GpuBackend> GpuBackends() { return kBackends; }

}  // namespace moed::bench
