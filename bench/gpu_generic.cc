// Layers of cuda_generic: random codes, scales and biases straight in the packed layout.
#include <cmath>
#include <utility>

#include "bench/gpu_backends.h"
#include "bench/gpu_kernels.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {
namespace {

using cuda::DeviceBuffer;
using cuda::DeviceOp;
using cuda::MatrixOffsets;
using cuda::PackedShape;
using cuda::ToStatus;

class GenericOp : public GpuOp {
 public:
  GenericOp(DeviceBuffer block, const cuda::LaunchPlan& plan) : block_(std::move(block)), plan_(plan) {}
  absl::Status Enqueue(cudaStream_t stream) const override {
    return ToStatus(cuda::Enqueue(plan_, reinterpret_cast<cuda::CallBlock*>(block_.data()), stream), "launch of an op");
  }

 private:
  const DeviceBuffer block_;
  const cuda::LaunchPlan plan_;
};

class GenericLayer : public GpuLayer {
 public:
  explicit GenericLayer(std::unique_ptr<cuda::CudaMoe> moe) : moe_(std::move(moe)) {}

  size_t WorkspaceBytes(const DeviceOp& op) const override { return cuda::DeviceOpBytes(*moe_, op); }

  absl::StatusOr<std::unique_ptr<GpuOp>> Plan(const DeviceOp& op, std::byte* workspace) const override {
    cuda::CallBlock block;
    cuda::LaunchPlan plan;
    cuda::PlanDeviceOp(*moe_, op, workspace, &block, &plan);
    DeviceBuffer memory;
    absl::Status status = memory.Allocate(sizeof(block), "arguments of an op");
    if (!status.ok()) return status;
    status = ToStatus(cudaMemcpy(memory.data(), &block, sizeof(block), cudaMemcpyHostToDevice), "arguments of an op");
    if (!status.ok()) return status;
    return std::unique_ptr<GpuOp>(std::make_unique<GenericOp>(std::move(memory), plan));
  }

 private:
  const std::unique_ptr<cuda::CudaMoe> moe_;
};

// Fills a layer's arrays, each from a seed of its own.
class Filler {
 public:
  Filler(const DeviceBuffer& arena, int64_t experts, uint64_t seed, cudaStream_t stream)
      : arena_(arena), experts_(experts), seed_(seed), stream_(stream) {}

  // Weights have the standard deviation 1 / sqrt(inputs), so that a product of Gaussian inputs is of order 1.
  void Matrix(const PackedShape& shape, const MatrixOffsets& offsets) {
    const float deviation = 1.0f / std::sqrt(static_cast<float>(shape.cols));
    Add(LaunchFillCodes(shape.codes, deviation, Seed(), At(offsets.codes), Bytes(shape.code_bytes()), stream_));
    if (shape.groups > 0) {
      const int64_t scales = Bytes(shape.scale_bytes()) / ScaleBytes(shape.scale);
      Add(LaunchFillScales(shape.scale, deviation / CodeDeviation(shape.codes), Seed(), At(offsets.scales), scales, stream_));
    }
    if (shape.bias) {
      constexpr float kBiasDeviation = 0.1f;
      const int64_t biases = Bytes(shape.bias_bytes()) / static_cast<int64_t>(sizeof(float));
      Add(LaunchFillFloats(0.0f, kBiasDeviation, Seed(), Floats(offsets.bias), biases, stream_));
    }
    Add(LaunchFillFloats(1.0f, 0.0f, Seed(), Floats(offsets.globals), 2 * experts_, stream_));
  }

  absl::Status status() const { return ToStatus(error_, "random weights"); }

 private:
  std::byte* At(size_t offset) const { return arena_.data() + offset; }
  float* Floats(size_t offset) const { return reinterpret_cast<float*>(At(offset)); }
  int64_t Bytes(size_t of_expert) const { return static_cast<int64_t>(of_expert) * experts_; }
  uint64_t Seed() { return seed_ += 0xD1B54A32D192ED03ull; }
  void Add(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  const DeviceBuffer& arena_;
  const int64_t experts_;
  uint64_t seed_;
  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

// What Filler knows nothing of.
bool HasMore(const PackedShape& shape) { return shape.zero_points || shape.ordered; }

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeLayer(const MoeDesc& desc, uint64_t seed, cudaStream_t stream, bool hopper) {
  const cuda::LayerPlan plan = cuda::PlanOf(desc);
  if (HasMore(plan.gate) || HasMore(plan.up) || HasMore(plan.down) || plan.gate_x.stored || plan.up_x.stored ||
      plan.down_h.stored) {
    return absl::UnimplementedError("random weights: no zero points, no groups of odd sizes, no stored input scales");
  }
  const cuda::LayerOffsets offsets = cuda::OffsetsOf(plan, desc.num_experts);
  DeviceBuffer arena;
  absl::Status status = arena.Allocate(offsets.bytes, "weights of a layer");
  if (!status.ok()) return status;
  Filler filler(arena, desc.num_experts, seed, stream);
  filler.Matrix(plan.gate, offsets.gate);
  if (!plan.paired) filler.Matrix(plan.up, offsets.up);
  filler.Matrix(plan.down, offsets.down);
  status = filler.status();
  if (!status.ok()) return status;
  // No accelerator: it is asked for by calls with lanes only.
  return std::unique_ptr<GpuLayer>(
      std::make_unique<GenericLayer>(std::make_unique<cuda::CudaMoe>(desc, plan, std::move(arena), nullptr, hopper)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeGenericLayer(const MoeDesc& desc, uint64_t seed, cudaStream_t stream) {
  return MakeLayer(desc, seed, stream, false);
}

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeHopperLayer(const MoeDesc& desc, uint64_t seed, cudaStream_t stream) {
  return MakeLayer(desc, seed, stream, true);
}

}  // namespace moed::bench
