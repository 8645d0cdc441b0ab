// Layers of random weights straight in the packed layout: codes, scales, zero points, biases and orders.
#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "bench/gpu_backends.h"
#include "bench/gpu_kernels.h"
#include "bench/gpu_orders.h"
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
    status = cuda::CopyToDevice(memory.data(), &block, sizeof(block), "arguments of an op");
    if (!status.ok()) return status;
    return std::unique_ptr<GpuOp>(std::make_unique<GenericOp>(std::move(memory), plan));
  }

 private:
  const std::unique_ptr<cuda::CudaMoe> moe_;
};

// Zero points about the middle of the codes.
std::vector<uint8_t> RandomZeros(cuda::Codes codes, size_t count, uint64_t seed) {
  const int middle = codes == cuda::Codes::kInt4 ? 8 : 128, most = middle / 8;
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int> off(-most, most);
  std::vector<uint8_t> zeros(count);
  for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(middle + off(random));
  return zeros;
}

// Fills a layer's arrays, each from a seed of its own.
class Filler {
 public:
  Filler(const DeviceBuffer& arena, int64_t experts, uint64_t seed, cudaStream_t stream)
      : arena_(arena), experts_(experts), seed_(seed), stream_(stream) {}

  // Weights have the standard deviation 1 / sqrt(inputs), so that a product of Gaussian inputs is of order 1.
  // `order_seed`: of an order, where inputs have groups of `group` in an order of each expert's own.
  void Matrix(const PackedShape& shape, const MatrixOffsets& offsets, int64_t group, uint64_t order_seed) {
    const float deviation = 1.0f / std::sqrt(static_cast<float>(shape.cols));
    Add(LaunchFillCodes(shape.codes, deviation, Seed(), At(offsets.codes), Bytes(shape.code_bytes()), stream_));
    if (shape.groups > 0) {
      const int64_t scales = Bytes(shape.scale_bytes()) / ScaleBytes(shape.scale);
      Add(LaunchFillScales(shape.scale, deviation / CodeDeviation(shape.codes), Seed(), At(offsets.scales), scales, stream_));
    }
    if (shape.zero_points) Zeros(shape, offsets);
    if (shape.own_order) Order(shape, offsets, group, order_seed);
    if (shape.bias) {
      constexpr float kBiasDeviation = 0.1f;
      const int64_t biases = Bytes(shape.bias_bytes()) / static_cast<int64_t>(sizeof(float));
      Add(LaunchFillFloats(0.0f, kBiasDeviation, Seed(), Floats(offsets.bias), biases, stream_));
    }
    Add(LaunchFillFloats(1.0f, 0.0f, Seed(), Floats(offsets.globals), 2 * experts_, stream_));
  }

  const absl::Status& status() const { return status_; }

 private:
  // The same numbers over and over: a kernel reads each where it lies.
  void Zeros(const PackedShape& shape, const MatrixOffsets& offsets) {
    constexpr size_t kRepeated = size_t{1} << 16;
    const size_t all = static_cast<size_t>(Bytes(shape.zero_bytes()));
    const std::vector<uint8_t> zeros = RandomZeros(shape.codes, std::min(all, kRepeated), Seed());
    std::byte* const to = At(offsets.zeros);
    Add(cuda::CopyToDevice(to, zeros.data(), zeros.size(), "random zero points"));
    for (size_t done = zeros.size(); done < all; done *= 2) {
      Add(cudaMemcpyAsync(to + done, to, std::min(done, all - done), cudaMemcpyDeviceToDevice, stream_));
    }
  }

  void Order(const PackedShape& shape, const MatrixOffsets& offsets, int64_t group, uint64_t seed) {
    const absl::StatusOr<OrderTables> tables = RandomOrders(shape, group, static_cast<int>(experts_), seed);
    Add(tables.status());
    if (!tables.ok()) return;
    const auto copy = [this](size_t to, const std::vector<int32_t>& table) {
      Add(cuda::CopyToDevice(At(to), table.data(), table.size() * sizeof(int32_t), "random orders"));
    };
    copy(offsets.order, tables->orders);
    copy(offsets.step_groups, tables->step_groups);
  }

  std::byte* At(size_t offset) const { return arena_.data() + offset; }
  float* Floats(size_t offset) const { return reinterpret_cast<float*>(At(offset)); }
  int64_t Bytes(size_t of_expert) const { return static_cast<int64_t>(of_expert) * experts_; }
  uint64_t Seed() { return seed_ += 0xD1B54A32D192ED03ull; }
  void Add(cudaError_t error) { Add(ToStatus(error, "random weights")); }
  void Add(const absl::Status& status) { status_.Update(status); }

  const DeviceBuffer& arena_;
  const int64_t experts_;
  uint64_t seed_;
  const cudaStream_t stream_;
  absl::Status status_;
};

// What Filler knows nothing of.
bool HasMore(const PackedShape& shape) { return shape.ordered && !shape.own_order; }

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeLayer(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream, bool hopper) {
  const MoeDesc& desc = spec.desc;
  const cuda::LayerPlan plan = cuda::PlanOf(desc, {.uneven = false, .equal = spec.equal_orders});
  if (HasMore(plan.gate) || HasMore(plan.up) || HasMore(plan.down) || plan.gate_x.stored || plan.up_x.stored ||
      plan.down_h.stored) {
    return absl::UnimplementedError("random weights: no groups of odd sizes, no stored input scales");
  }
  const cuda::LayerOffsets offsets = cuda::OffsetsOf(plan, desc.num_experts);
  DeviceBuffer arena;
  absl::Status status = arena.Allocate(offsets.bytes, "weights of a layer");
  if (!status.ok()) return status;
  Filler filler(arena, desc.num_experts, seed, stream);
  const uint64_t orders = 3 * seed;  // of this copy: gate's, up's and down's
  const QuantScheme& scheme = desc.scheme;
  filler.Matrix(plan.gate, offsets.gate, scheme.gate.weights.group.cols, orders);
  if (!plan.paired) filler.Matrix(plan.up, offsets.up, scheme.up.weights.group.cols, spec.equal_orders ? orders : orders + 1);
  filler.Matrix(plan.down, offsets.down, scheme.down.weights.group.cols, orders + 2);
  status = filler.status();
  if (!status.ok()) return status;
  // No accelerator: it is asked for by calls with lanes only.
  return std::unique_ptr<GpuLayer>(
      std::make_unique<GenericLayer>(std::make_unique<cuda::CudaMoe>(desc, plan, std::move(arena), nullptr, hopper)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeGenericLayer(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream) {
  return MakeLayer(spec, seed, stream, false);
}

absl::StatusOr<std::unique_ptr<GpuLayer>> MakeHopperLayer(const GpuLayerSpec& spec, uint64_t seed, cudaStream_t stream) {
  return MakeLayer(spec, seed, stream, true);
}

}  // namespace moed::bench
