#include "bench/gpu_backends.h"

namespace moed::bench {
namespace {

bool FitsAll(const MoeDesc&) { return true; }

constexpr GpuBackend kBackends[] = {{"cuda_generic", FitsAll, MakeGenericLayer}};

}  // namespace

std::span<const GpuBackend> GpuBackends() { return kBackends; }

}  // namespace moed::bench
