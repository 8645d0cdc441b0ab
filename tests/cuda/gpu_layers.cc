#include "tests/cuda/gpu_layers.h"

#include <cuda_runtime_api.h>

#include <catch2/catch.hpp>

#include <cstring>

#include "kernels/convert.h"
#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/reference.h"
#include "tests/cuda/gpu.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"

namespace moed::testing {
namespace {

std::unique_ptr<PreparedMoe> PrepareOn(const Backend& backend, const MoeDesc& desc, const ExpertReader& experts) {
  const Verdict verdict = backend.Check(desc, ThisGpu());
  INFO(backend.Name() << ": " << Describe(desc.scheme) << ": " << (verdict.ok() ? "" : verdict.reasons[0].text));
  REQUIRE(verdict.ok());
  auto moe = backend.Prepare(desc, experts, Pool());
  INFO(moe.status());
  REQUIRE(moe.ok());
  CHECK((*moe)->ResidentBytes() == backend.PreparedBytes(desc));
  CHECK((*moe)->ExecutedScheme() == desc.scheme);
  return *std::move(moe);
}

}  // namespace

Accelerator& Gpu() {
  static Accelerator* const gpu = *cuda::TheAccelerator();
  return *gpu;
}

Lane& GpuLane() {
  static Lane* const lane = Gpu().NewLane()->release();
  return *lane;
}

void PoisonLane(size_t bytes) { PoisonLane(GpuLane(), bytes); }

void PoisonLane(Lane& lane, size_t bytes) {
  auto& cuda_lane = static_cast<cuda::CudaLane&>(lane);
  absl::StatusOr<std::byte*> workspace = cuda_lane.Workspace(bytes);
  REQUIRE(workspace.ok());
  REQUIRE(cudaMemsetAsync(*workspace, 0xFF, bytes, cuda_lane.stream()) == cudaSuccess);
  REQUIRE(cudaMemsetAsync(cuda_lane.device_arrays(), 0xFF, cuda::CudaLane::kArrayBytes, cuda_lane.stream()) == cudaSuccess);
}

absl::StatusOr<std::vector<float>> RunOnGpu(const PreparedMoe& moe, const MoeBatch& batch, DType dtype) {
  if (moe.accelerator() != nullptr)
    PoisonLane(moe.WorkspaceBytes(batch.x.rows, batch.top_k) + 4 * batch.x.bytes() + (size_t{1} << 20));
  ExecContext context;
  context.pool = &Pool();
  context.lane = &GpuLane();
  std::vector<uint8_t> out(static_cast<size_t>(batch.x.rows * batch.x.cols) * DTypeBytes(dtype), 0xFF);
  const MutableTensorView view = {out.data(), dtype, batch.x.rows, batch.x.cols};
  absl::Status status = moe.Run(batch, view, context);
  if (!status.ok()) return status;
  std::vector<float> result(static_cast<size_t>(batch.x.rows * batch.x.cols));
  for (int64_t row = 0; row < batch.x.rows; ++row) {
    RowToFloat({out.data(), dtype, batch.x.rows, batch.x.cols}, row, result.data() + row * batch.x.cols);
  }
  return result;
}

bool SameBits(const float* a, const float* b, int64_t n) { return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0; }

std::unique_ptr<PreparedMoe> JudgeOf(const MoeDesc& desc, const ExpertReader& experts) {
  return PrepareOn(cuda::ReferenceBackend(), desc, experts);
}

JudgedLayer::JudgedLayer(const MoeDesc& desc, uint64_t seed, const Backend& backend)
    : desc_(desc), experts_(desc, seed), moe_(PrepareOn(backend, desc, experts_)), judge_(JudgeOf(desc, experts_)) {}

double JudgedLayer::Compare(int64_t rows, DType dtype, double bound, uint64_t seed) const {
  const RandomBatch batch(desc_, rows, desc_.top_k, dtype, seed);
  return CompareBatch(batch.view(), bound);
}

double JudgedLayer::CompareBatch(const MoeBatch& batch, double bound) const {
  const auto got = RunOnGpu(*moe_, batch, DType::kF32);
  const auto want = RunOnGpu(*judge_, batch, DType::kF32);
  INFO(got.status() << " " << want.status());
  REQUIRE((got.ok() && want.ok()));
  const Judgement judgement = Judge(*got, *want, desc_.hidden, bound);
  INFO(Describe(desc_.scheme) << " E=" << desc_.num_experts << " H=" << desc_.hidden << " I=" << desc_.intermediate
                              << " M=" << batch.x.rows << " " << DTypeName(batch.x.dtype) << ": " << judgement.reason);
  CHECK(judgement.passed);
  return judgement.worst;
}

void JudgedLayer::CompareParts(const MoeBatch& batch, const std::vector<std::pair<int64_t, int64_t>>& parts) const {
  const auto together = RunOnGpu(*moe_, batch, DType::kF32);
  REQUIRE(together.ok());
  for (const auto& [first, rows] : parts) {
    const size_t slot = static_cast<size_t>(first * batch.top_k), slots = static_cast<size_t>(rows * batch.top_k);
    MoeBatch part = batch;
    part.x = batch.x.slice(first, rows);
    part.ids = batch.ids.subspan(slot, slots);
    part.weights = batch.weights.subspan(slot, slots);
    const auto alone = RunOnGpu(*moe_, part, DType::kF32);
    REQUIRE(alone.ok());
    INFO(Describe(desc_.scheme) << " rows " << first << " to " << first + rows - 1 << " of " << batch.x.rows);
    CHECK(SameBits(alone->data(), together->data() + first * desc_.hidden, rows * desc_.hidden));
  }
}

}  // namespace moed::testing
