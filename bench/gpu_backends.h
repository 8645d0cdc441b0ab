// The backends that the GPU benchmark runs, each as a maker of layers of random weights on the device. A backend is added by one
// file that implements GpuLayer and one line in gpu_backends.cc.
#ifndef MOED_BENCH_GPU_BACKENDS_H_
#define MOED_BENCH_GPU_BACKENDS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device_op.h"
#include "kernels/moe_kernel.h"

namespace moed::bench {

// An op that needs nothing but its launches.
class GpuOp {
 public:
  virtual ~GpuOp() = default;
  // All launches, on a stream that may be captured.
  virtual absl::Status Enqueue(cudaStream_t stream) const = 0;
};

// A layer in the memory of the GPU.
class GpuLayer {
 public:
  virtual ~GpuLayer() = default;
  virtual size_t WorkspaceBytes(const cuda::DeviceOp& op) const = 0;
  // Copies what the kernels of `op` read to the device and waits for it. The layer, the arrays of `op` and `workspace`
  // (WorkspaceBytes, aligned to 256; ops on one stream may share it) must outlive the result.
  virtual absl::StatusOr<std::unique_ptr<GpuOp>> Plan(const cuda::DeviceOp& op, std::byte* workspace) const = 0;
};

// What weights are made for.
struct GpuLayerSpec {
  MoeDesc desc;
  // Act-order: gate and up of an expert have the same order, as GPTQ leaves two that saw the same inputs. Down has its own.
  bool equal_orders = true;
};

struct GpuBackend {
  const char* name;
  // Whether it has `desc`.
  bool (*fits)(const MoeDesc& desc);
  // A layer whose weights follow from `seed`, of a size that makes outputs of order 1 from inputs of order 1. Fills on `stream`,
  // asynchronously. RESOURCE_EXHAUSTED names the bytes that are needed and free.
  absl::StatusOr<std::unique_ptr<GpuLayer>> (*make)(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream);
};

// In the order of the table.
std::span<const GpuBackend> GpuBackends();
// Null for a name that is not among them.
const GpuBackend* FindGpuBackend(std::string_view name);

// The makers: of cuda_generic, and with Hopper's own products.
absl::StatusOr<std::unique_ptr<GpuLayer>> MakeGenericLayer(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream);
absl::StatusOr<std::unique_ptr<GpuLayer>> MakeHopperLayer(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_BACKENDS_H_
