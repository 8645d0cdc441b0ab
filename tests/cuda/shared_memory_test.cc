// Device memory of another process (CUDA IPC): a child owns it, this process runs a layer on it.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/whole_layers.h"
#include "tests/support/process.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::Gpu;
using testing::GpuLane;
using testing::HaveGpu;
using testing::LayerInput;
using testing::LayerRun;
using testing::LayerSpec;
using testing::RunWhole;
using testing::Skip;
using testing::WholeLayer;

constexpr size_t kBytes = size_t{4} << 20;
constexpr size_t kXAt = 256 + 2, kOutAt = size_t{1} << 20;  // x is bf16, aligned to 2 bytes only
constexpr int64_t kRows = 21;
constexpr char kFolder[] = "MOED_TEST_SHARED_MEMORY";  // where the two meet
constexpr std::chrono::seconds kPatience(60);

uint8_t Pattern(size_t at) { return static_cast<uint8_t>(at * 37 + at / 256); }

// Repeats `attempt` until it gives something.
template <typename Attempt>
auto Await(const Attempt& attempt) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  auto result = attempt();
  while (!result.has_value() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    result = attempt();
  }
  return result;
}

// A file appears with all of its bytes.
void Publish(const std::string& path, const std::string& bytes) {
  testing::WriteFile(path + ".part", bytes);
  std::filesystem::rename(path + ".part", path);
}

std::optional<std::string> Published(const std::string& path) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  return testing::ReadFile(path);
}

std::string TextOf(std::span<const uint8_t> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Of an allocation of this process.
SharedHandle HandleOf(void* memory) {
  cudaIpcMemHandle_t exported;
  REQUIRE(cudaIpcGetMemHandle(&exported, memory) == cudaSuccess);
  SharedHandle handle;
  std::memcpy(handle.data(), &exported, handle.size());
  return handle;
}

}  // namespace

// The child's part: owns the memory, and looks at it again when the other process says what it must then hold.
TEST_CASE("shared memory: the part of the process that owns the memory", "[.][shared_memory_owner]") {
  if (!HaveGpu()) return Skip("no GPU");
  const char* const folder = std::getenv(kFolder);
  REQUIRE(folder != nullptr);
  const std::optional<std::string> x = Published(absl::StrCat(folder, "/x"));
  REQUIRE(x.has_value());
  std::string want(kBytes, '\0');
  for (size_t at = 0; at < kBytes; ++at) want[at] = static_cast<char>(Pattern(at));
  want.replace(kXAt, x->size(), *x);
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, kBytes) == cudaSuccess);
  REQUIRE(cudaMemcpy(memory, want.data(), kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const SharedHandle handle = HandleOf(memory);
  std::printf("HANDLE %s\n", absl::BytesToHexString({reinterpret_cast<const char*>(handle.data()), handle.size()}).c_str());
  std::fflush(stdout);

  const std::optional<std::string> out = Await([&] { return Published(absl::StrCat(folder, "/out")); });
  REQUIRE(out.has_value());
  want.replace(kOutAt, out->size(), *out);
  std::string got(kBytes, '\0');
  REQUIRE(cudaMemcpy(got.data(), memory, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK((got == want));  // the output, and nothing beside it
  cudaFree(memory);
}

TEST_CASE("shared memory: a layer reads and writes the memory of another process, and nothing beside its rows") {
  if (!HaveGpu()) return Skip("no GPU");
  LayerSpec spec;
  spec.shared = spec.shared_gate = true;
  const WholeLayer layer(spec, 7001);
  const LayerInput input = layer.Input(kRows, DType::kBf16, 7002);
  const LayerRun want = RunWhole(layer.device(), input.Call(RoutingKind::kGate), DType::kF32, GpuLane());
  layer.Check(input, RoutingKind::kGate, want, DType::kF32);

  const testing::TempDir folder;
  Publish(folder.File("x"), TextOf(input.batch.x));
  const auto child =
      testing::Process::Start({"/proc/self/exe", "[shared_memory_owner]"}, {absl::StrCat(kFolder, "=", folder.path())});
  REQUIRE(child != nullptr);
  const auto told = Await([&]() -> std::optional<std::string> {
    const std::string text = child->Stdout();
    const size_t begin = text.find("HANDLE "), end = text.find('\n', begin);
    const bool whole = begin != std::string::npos && end != std::string::npos;
    if (whole) return absl::HexStringToBytes(text.substr(begin + 7, end - begin - 7));
    return child->Running() ? std::nullopt : std::optional<std::string>("");
  });
  INFO(child->Stdout() << child->Stderr());
  REQUIRE(told.has_value());
  SharedHandle handle;
  REQUIRE(told->size() == handle.size());
  std::memcpy(handle.data(), told->data(), handle.size());
  {
    const auto memory = Gpu().OpenShared(handle);
    INFO(memory.status());
    REQUIRE(memory.ok());
    CHECK((*memory)->bytes() >= kBytes);
    const auto again = Gpu().OpenShared(handle);  // as two requests that use it at once do
    INFO(again.status());
    CHECK(again.ok());
    std::byte* const base = static_cast<std::byte*>((*memory)->data());
    DeviceCall call = input.Call(RoutingKind::kGate);
    call.x.data = base + kXAt;
    call.x.place = Place::kDevice;
    const absl::Status status =
        layer.device().Forward(call, {base + kOutAt, DType::kF32, kRows, spec.hidden, Place::kDevice}, GpuLane(), nullptr);
    INFO(status);
    REQUIRE(status.ok());
    std::vector<uint8_t> got(want.bytes.size());
    REQUIRE(cudaMemcpy(got.data(), base + kOutAt, got.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(got == want.bytes);
  }
  Publish(folder.File("out"), TextOf(want.bytes));
  const std::optional<int> code = child->Wait(kPatience);
  INFO(child->Stdout() << child->Stderr());
  REQUIRE(code.has_value());
  CHECK(*code == 0);
  CHECK(Gpu().Health().ok());
  // Its owner is gone: the handle is none any more.
  CHECK(absl::IsInvalidArgument(Gpu().OpenShared(handle).status()));
  CHECK(RunWhole(layer.device(), input.Call(RoutingKind::kGate), DType::kF32, GpuLane()).bytes == want.bytes);
}

TEST_CASE("shared memory: what is no handle, and this process's own, is refused and leaves the device healthy") {
  if (!HaveGpu()) return Skip("no GPU");
  void* own = nullptr;
  REQUIRE(cudaMalloc(&own, kBytes) == cudaSuccess);
  SharedHandle garbage, changed = HandleOf(own);
  for (size_t at = 0; at < garbage.size(); ++at) garbage[at] = static_cast<std::byte>(Pattern(at) ^ 0x5A);
  for (std::byte& byte : changed) byte ^= std::byte{0xFF};
  for (const SharedHandle& handle : {SharedHandle{}, garbage, changed, HandleOf(own)}) {
    const absl::Status status = Gpu().OpenShared(handle).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(Gpu().Health().ok());
  }
  cudaFree(own);
}

}  // namespace moed
