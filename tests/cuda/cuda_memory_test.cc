// Out of GPU memory: what Check, Prepare and calls say, and that the device goes on afterwards.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/cuda_memory.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/whole_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::Gpu;
using testing::GpuLane;
using testing::HaveGpu;
using testing::LayerInput;
using testing::LayerRun;
using testing::LayerSpec;
using testing::MakeDesc;
using testing::PlainScheme;
using testing::RunWhole;
using testing::Skip;
using testing::ThisGpu;
using testing::WholeLayer;

const Backend& Generic() { return *cuda::CudaBackends().back(); }

// Experts that must not be asked for: memory is refused before any weight is read.
class NoExperts : public ExpertReader {
 public:
  absl::Status Read(int, ExpertWeights*) const override { return absl::InternalError("an expert was read"); }
};

// Experts whose file is out of reach.
class LostExperts : public ExpertReader {
 public:
  absl::Status Read(int, ExpertWeights*) const override { return absl::UnavailableError("the file server is away"); }
};

// Takes the device's memory until no more than about `left` bytes can be had. Given back with the object.
class MemoryHog {
 public:
  explicit MemoryHog(size_t left) {
    for (size_t piece = size_t{1} << 30; piece >= (size_t{2} << 20); piece /= 2) {
      for (;;) {
        size_t free_bytes = 0, total = 0;
        REQUIRE(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
        if (free_bytes < left + piece) break;
        void* memory = nullptr;
        if (cudaMalloc(&memory, piece) != cudaSuccess) {
          cudaGetLastError();
          break;
        }
        pieces_.push_back(memory);
      }
    }
  }
  MemoryHog(const MemoryHog&) = delete;
  MemoryHog& operator=(const MemoryHog&) = delete;
  ~MemoryHog() {
    for (void* piece : pieces_) cudaFree(piece);
  }

 private:
  std::vector<void*> pieces_;
};

bool Names(const absl::Status& status, size_t bytes) {
  return status.message().find(absl::StrCat(bytes)) != std::string_view::npos;
}

}  // namespace

TEST_CASE("cuda memory: a layer that is larger than what is free is refused by Check with both numbers", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = MakeDesc(8, 2, 1024, 1024, PlainScheme(ElementType::kBf16));
  DeviceInfo device = ThisGpu();
  const size_t needed = Generic().PreparedBytes(desc);
  CHECK(needed >= size_t{8} * 3 * 1024 * 1024 * 2);
  device.gpu_free_bytes = needed;
  CHECK(Generic().Check(desc, device).ok());
  device.gpu_free_bytes = needed - 1;
  const Verdict verdict = Generic().Check(desc, device);
  REQUIRE(verdict.reasons.size() == 1);
  CHECK(verdict.reasons[0].code == "memory");
  CHECK(verdict.reasons[0].text.find(absl::StrCat(needed)) != std::string::npos);
  CHECK(verdict.reasons[0].text.find(absl::StrCat(needed - 1)) != std::string::npos);

  // What the accelerator says of itself is what Check is asked with.
  DeviceInfo described;
  Gpu().Describe(&described);
  CHECK(described.has_gpu);
  CHECK(described.gpu_name == Gpu().Name());
  CHECK(described.gpu_free_bytes > 0);
  CHECK(Generic().Check(desc, described).ok());
}

TEST_CASE("cuda memory: Prepare of a layer that no device holds names the bytes and reads no weight") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = MakeDesc(4096, 2, 8192, 8192, PlainScheme(ElementType::kBf16));
  const size_t needed = Generic().PreparedBytes(desc);
  const auto moe = Generic().Prepare(desc, NoExperts(), testing::Pool());
  INFO(moe.status());
  CHECK(absl::IsResourceExhausted(moe.status()));
  CHECK(Names(moe.status(), needed));
  CHECK(Gpu().Health().ok());
}

TEST_CASE("cuda memory: with the device full, loading and growing fail with the bytes, calls go on, and later all is well") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(LayerSpec(), 5001);
  const LayerInput few = layer.Input(4, DType::kF32, 5002), many = layer.Input(1000, DType::kF32, 5003);
  const LayerRun want_few = RunWhole(layer.device(), few.Call(RoutingKind::kGate), DType::kF32, GpuLane());
  const LayerRun want_many = RunWhole(layer.device(), many.Call(RoutingKind::kGate), DType::kF32, GpuLane());
  layer.Check(few, RoutingKind::kGate, want_few, DType::kF32);
  layer.Check(many, RoutingKind::kGate, want_many, DType::kF32);
  auto made = Gpu().NewLane();
  REQUIRE(made.ok());
  const std::unique_ptr<Lane> lane = *std::move(made);
  const auto run = [&](const LayerInput& input) {
    LayerRun result;
    result.bytes.assign(input.batch.x.size(), 0xFF);
    const DeviceCall call = input.Call(RoutingKind::kGate);
    result.status = layer.device().Forward(call, {result.bytes.data(), DType::kF32, call.x.rows, call.x.cols}, *lane, nullptr);
    return result;
  };
  REQUIRE(run(few).bytes == want_few.bytes);
  {
    const MemoryHog hog(0);
    size_t free_bytes = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
    // Bf16 experts of 6 MiB each: at least 64 MiB more than is left.
    const int experts = static_cast<int>(free_bytes / (size_t{6} << 20)) + 12;
    const MoeDesc desc = MakeDesc(experts, 2, 1024, 1024, PlainScheme(ElementType::kBf16));
    const size_t needed = Generic().PreparedBytes(desc);
    REQUIRE(needed >= free_bytes + (size_t{64} << 20));
    const absl::Status refused = Generic().Prepare(desc, NoExperts(), testing::Pool()).status();
    INFO(refused);
    CHECK(absl::IsResourceExhausted(refused));
    CHECK(Names(refused, needed));
    CHECK(refused.message().find(" are free") != std::string_view::npos);
    CHECK_FALSE(Generic().Check(desc, ThisGpu()).ok());
    CHECK(Gpu().Health().ok());
    CHECK(run(few).bytes == want_few.bytes);

    // Its workspace has to grow by more than can be had; the small call then needs a new one, and may find room for it or not.
    const LayerRun large = run(many);
    INFO(large.status);
    CHECK((large.status.ok() ? large.bytes == want_many.bytes : absl::IsResourceExhausted(large.status)));
    const LayerRun small = run(few);
    CHECK((small.status.ok() ? small.bytes == want_few.bytes : absl::IsResourceExhausted(small.status)));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }
  CHECK(Gpu().Health().ok());
  CHECK(run(few).bytes == want_few.bytes);
  CHECK(run(many).bytes == want_many.bytes);
}

TEST_CASE("cuda memory: a reader that is unavailable is not taken for a device that failed", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const MoeDesc desc = MakeDesc(4, 2, 64, 64, PlainScheme(ElementType::kBf16));
  const absl::Status status = Generic().Prepare(desc, LostExperts(), testing::Pool()).status();
  CHECK(absl::IsUnavailable(status));
  CHECK(status.message() == "the file server is away");
  CHECK(Gpu().Health().ok());
  const testing::RandomExperts experts(desc, 5101);
  CHECK(Generic().Prepare(desc, experts, testing::Pool()).ok());
}

TEST_CASE("cuda memory: buffers own what they hold, empty ones hold nothing, and errors are told once") {
  if (!HaveGpu()) return Skip("no GPU");
  cuda::DeviceBuffer device;
  CHECK(device.Allocate(0, "nothing").ok());
  CHECK(device.data() == nullptr);
  CHECK(device.Allocate(1000, "bytes").ok());
  CHECK(device.size() == 1000);
  const std::vector<uint8_t> values = {1, 2, 3, 4, 5};
  std::vector<uint8_t> back(values.size());
  CHECK(cuda::CopyToDevice(device.data(), values.data(), values.size(), "copy").ok());
  CHECK(cudaMemcpy(back.data(), device.data(), back.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(back == values);
  cuda::DeviceBuffer moved = std::move(device);
  CHECK(moved.size() == 1000);
  const absl::Status refused = moved.Allocate(size_t{1} << 50, "too much");
  INFO(refused);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(Names(refused, size_t{1} << 50));
  CHECK(moved.data() == nullptr);
  CHECK(moved.size() == 0);
  const cudaError_t wrong = cudaMemcpy(back.data(), values.data(), values.size(), static_cast<cudaMemcpyKind>(77));
  CHECK(cudaPeekAtLastError() == wrong);
  const absl::Status told = cuda::ToStatus(wrong, "a copy");
  CHECK(absl::IsUnavailable(told));
  CHECK(told.message().substr(0, 8) == "a copy: ");
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  const auto pinned = Gpu().AllocatePinned(12345);
  REQUIRE(pinned.ok());
  CHECK((*pinned)->bytes().size() == 12345);
  std::fill((*pinned)->bytes().begin(), (*pinned)->bytes().end(), std::byte{7});
}

}  // namespace moed
