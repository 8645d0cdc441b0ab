// A device that fails, in a process of its own: what is running and what comes later says so, and the process ends in good order.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/cuda/cuda_backends.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/trap.h"
#include "tests/cuda/whole_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/process.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::Gpu;
using testing::HaveGpu;
using testing::LayerInput;
using testing::LayerSpec;
using testing::Skip;
using testing::WholeLayer;

using Clock = std::chrono::steady_clock;

// Ends the context; returns how long the accelerator took to notice, at most five seconds.
std::chrono::milliseconds KillDevice() {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const Clock::time_point start = Clock::now();
  CHECK(testing::LaunchTrap(stream) == cudaSuccess);
  while (Gpu().Health().ok() && Clock::now() - start < std::chrono::seconds(5)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
}

absl::Status Forward(const WholeLayer& layer, const LayerInput& input, Lane& lane, void* out, Place place) {
  const DeviceCall call = input.Call(RoutingKind::kGate);
  return layer.device().Forward(call, {out, DType::kF32, call.x.rows, call.x.cols, place}, lane, nullptr);
}

absl::Status RunRouted(const WholeLayer& layer, const LayerInput& input, Lane& lane, void* out) {
  ExecContext context;
  context.lane = &lane;
  const MoeBatch batch = input.batch.view();
  return layer.routed().Run(batch, {out, DType::kF32, batch.x.rows, batch.x.cols}, context);
}

}  // namespace

// The child's part. Everything that it made is destroyed on the lost device before it ends.
TEST_CASE("device loss: the part of the process that loses its device", "[.][device_loss]") {
  if (!HaveGpu()) return Skip("no GPU");
  LayerSpec spec;
  spec.shared = spec.shared_gate = true;
  const WholeLayer layer(spec, 6001);
  const LayerInput input = layer.Input(64, DType::kF32, 6002);
  auto busy = Gpu().NewLane(), idle = Gpu().NewLane();
  REQUIRE((busy.ok() && idle.ok()));
  const auto pinned = Gpu().AllocatePinned(input.batch.x.size());
  REQUIRE(pinned.ok());
  std::vector<uint8_t> out(input.batch.x.size()), other(out.size());
  REQUIRE(layer.device().WarmUp(**busy).ok());
  REQUIRE(Forward(layer, input, **busy, out.data(), Place::kHost).ok());
  REQUIRE(Forward(layer, input, **idle, (*pinned)->bytes().data(), Place::kHost).ok());

  std::atomic<bool> stop = false;
  absl::Status running;
  std::thread runner([&] {
    while (running.ok() && !stop) running = Forward(layer, input, **busy, out.data(), Place::kHost);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::chrono::milliseconds noticed = KillDevice();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  stop = true;
  runner.join();
  CHECK(noticed < std::chrono::seconds(1));
  const absl::Status first = Gpu().Health();
  INFO(first);
  REQUIRE(absl::IsUnavailable(first));

  const MoeDesc desc = testing::MakeDesc(2, 1, 64, 64, testing::PlainScheme(ElementType::kBf16));
  const testing::RandomExperts experts(desc, 6003);
  const absl::Status later[] = {running,
                                Forward(layer, input, **busy, out.data(), Place::kHost),
                                Forward(layer, input, **idle, other.data(), Place::kHost),
                                Forward(layer, input, **idle, (*pinned)->bytes().data(), Place::kHost),
                                RunRouted(layer, input, **idle, other.data()),
                                layer.device().WarmUp(**idle),
                                Gpu().NewLane().status(),
                                Gpu().AllocatePinned(4096).status(),
                                Gpu().Assemble(layer.parts()).status(),
                                Gpu().OpenShared(SharedHandle{}).status(),
                                cuda::CudaBackends().back()->Prepare(desc, experts, testing::Pool()).status(),
                                Gpu().Health()};
  for (const absl::Status& status : later) {
    INFO(&status - later << ": " << status);
    CHECK(status == first);
  }
  DeviceInfo info;
  Gpu().Describe(&info);
  CHECK(info.gpu_free_bytes == 0);
}

TEST_CASE("device loss: everything is UNAVAILABLE with the first reason, and the process can still end") {
  if (!HaveGpu()) return Skip("no GPU");
  const testing::Finished child = testing::RunToEnd({"/proc/self/exe", "[device_loss]"}, {}, std::chrono::seconds(120));
  INFO(child.out << child.err);
  CHECK(child.exit_code == 0);
  CHECK(child.out.find("All tests passed") != std::string::npos);
  CHECK(Gpu().Health().ok());  // the child's device alone was lost
}

}  // namespace moed
