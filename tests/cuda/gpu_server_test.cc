// A whole server on the GPU's own backends: its answers, and device memory of clients in other processes (CUDA IPC). A server whose
// clients break the contract runs in a process of its own.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backends.h"
#include "server/wire.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_server.h"
#include "tests/cuda/health_watch.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/judge.h"
#include "tests/support/process.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using namespace testing;  // NOLINT: the builder's vocabulary
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using Clock = std::chrono::steady_clock;
using grpc::health::v1::HealthCheckResponse;

constexpr char kAddress[] = "MOED_TEST_GPU_SERVER";  // of the server, for a client in a process of its own

// Where a client's tensors lie in its memory: aligned to 16 bytes and no more.
constexpr size_t kBytes = size_t{4} << 20, kXAt = 256 + 16, kOutAt = (size_t{2} << 20) + 16;

void AddLogits(int64_t rows, v1::ForwardRequest* request) {
  const std::vector<float> logits = CaseLogits(rows, kServedExperts);
  v1::Tensor* tensor = request->mutable_router_logits();
  tensor->set_dtype(v1::DTYPE_F32);
  tensor->add_shape(rows);
  tensor->add_shape(kServedExperts);
  tensor->set_data(logits.data(), logits.size() * sizeof(float));
}

// What the engine, whose backend is the CPU's reference, gives for the request.
std::vector<float> Want(Engine* reference, const v1::ForwardRequest& request) {
  const ModelTable models(reference->Status());
  const absl::StatusOr<CheckedForward> checked = CheckForward(request, models);
  REQUIRE(checked.ok());
  const int64_t rows = request.hidden().shape(0);
  std::vector<float> out(static_cast<size_t>(rows * kServedHidden));
  ForwardInfo info;
  REQUIRE(reference->Forward("m", checked->call, {out.data(), DType::kF32, rows, kServedHidden}, &info).ok());
  CHECK(info.backend == "reference");
  return out;
}

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  bytes.copy(reinterpret_cast<char*>(values.data()), values.size() * sizeof(float));
  return values;
}

void CheckAgainst(Engine* reference, const GpuClient& client, const v1::ForwardRequest& request, double bound) {
  const v1::ForwardResponse answer = client.Ask(request);
  CHECK_THAT(answer.backend(), StartsWith("cuda_"));
  const Judgement judgement = Judge(Floats(answer.output().data()), Want(reference, request), kServedHidden, bound);
  INFO("layer " << request.layer() << ", " << request.hidden().shape(0) << " rows of " << v1::DType_Name(request.hidden().dtype())
                << ": " << judgement.reason << ", worst " << judgement.worst);
  CHECK(judgement.passed);
}

// Memory of this process's GPU that a server reads and writes.
class Exported {
 public:
  Exported() {
    REQUIRE(cudaMalloc(&memory_, kBytes) == cudaSuccess);
    cudaIpcMemHandle_t exported;
    REQUIRE(cudaIpcGetMemHandle(&exported, memory_) == cudaSuccess);
    handle_.assign(reinterpret_cast<const char*>(&exported), sizeof(exported));
  }
  ~Exported() { cudaFree(memory_); }
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;

  const std::string& handle() const { return handle_; }
  void Write(const std::string& bytes) {
    REQUIRE(cudaMemcpy(memory_, bytes.data(), kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  std::string Read() const {
    std::string bytes(kBytes, '\0');
    REQUIRE(cudaMemcpy(bytes.data(), memory_, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    return bytes;
  }

 private:
  void* memory_ = nullptr;
  std::string handle_;
};

std::string Pattern() {
  std::string bytes(kBytes, '\0');
  for (size_t at = 0; at < kBytes; ++at) bytes[at] = static_cast<char>(at * 37 + at / 256);
  return bytes;
}

void Place(const std::string& handle, uint64_t offset, v1::DeviceMemory* memory) {
  memory->set_cuda_ipc_handle(handle);
  memory->set_offset(offset);
}

// The same request with its tensors in device memory.
v1::ForwardRequest InMemory(v1::ForwardRequest request, const std::string& handle, bool hidden = true, bool output = true) {
  if (hidden) {
    request.mutable_hidden()->clear_data();
    Place(handle, kXAt, request.mutable_hidden()->mutable_device_memory());
  }
  if (output) Place(handle, kOutAt, request.mutable_output_memory());
  return request;
}

// The request with its tensors in `memory` gives there the bits that it gives by messages, and leaves all else as it was.
void CheckShared(const GpuClient& client, const v1::ForwardRequest& request, Exported* memory) {
  const std::string want = client.Ask(request).output().data();
  REQUIRE(want.size() <= kBytes - kOutAt);
  std::string held = Pattern();
  held.replace(kXAt, request.hidden().data().size(), request.hidden().data());
  memory->Write(held);
  INFO("layer " << request.layer() << ", " << request.hidden().shape(0) << " rows");
  CHECK(client.Ask(InMemory(request, memory->handle(), true, false)).output().data() == want);
  CHECK((memory->Read() == held));
  const v1::ForwardResponse answer = client.Ask(InMemory(request, memory->handle()));
  CHECK(answer.output().data().empty());
  CHECK(answer.output().shape(0) == request.hidden().shape(0));
  CHECK_THAT(answer.backend(), StartsWith("cuda_"));
  held.replace(kOutAt, want.size(), want);
  CHECK((memory->Read() == held));
  CHECK(client.Ask(InMemory(request, memory->handle(), false, true)).output().data().empty());
  CHECK((memory->Read() == held));
}

// Each of these is wrong in one place.
void CheckRefusals(const GpuClient& client, Exported* memory) {
  const v1::ForwardRequest plain = GateRequest(1, 5, DType::kF32);
  const size_t out_bytes = 5 * kServedHidden * sizeof(float);
  std::string garbage(64, '\0'), changed = memory->handle();
  for (size_t at = 0; at < garbage.size(); ++at) garbage[at] = static_cast<char>((at * 37) ^ 0x5A);
  for (char& byte : changed) byte = static_cast<char>(~byte);
  memory->Write(Pattern());
  const auto refuse = [&](const std::string& text, const std::function<void(v1::ForwardRequest*, v1::DeviceMemory*)>& change) {
    v1::ForwardRequest request = InMemory(plain, memory->handle());
    change(&request, request.mutable_hidden()->mutable_device_memory());
    v1::ForwardResponse answer;
    const grpc::Status status = client.Forward(request, &answer);
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK_THAT(status.error_message(), Contains(text));
  };
  refuse("hidden.device_memory: CUDA IPC handle", [&](auto*, auto* hidden) { hidden->set_cuda_ipc_handle(garbage); });
  refuse("output_memory: CUDA IPC handle", [&](auto* r, auto*) { r->mutable_output_memory()->set_cuda_ipc_handle(changed); });
  refuse("64 bytes, got 63", [&](auto*, auto* hidden) { hidden->mutable_cuda_ipc_handle()->pop_back(); });
  refuse("a multiple of 16", [](auto*, auto* hidden) { hidden->set_offset(kXAt + 8); });
  refuse("hidden.device_memory: wanted a tensor within", [](auto*, auto* hidden) { hidden->set_offset(uint64_t{0} - 16); });
  refuse("hidden.device_memory: wanted a tensor within", [](auto* r, auto*) {
    r->mutable_hidden()->set_shape(0, 8192);  // 8 MiB
    r->clear_output_memory();
  });
  refuse("output_memory: wanted a tensor within the 4194304 bytes",
         [&](auto* r, auto*) { r->mutable_output_memory()->set_offset(kBytes - out_bytes + 16); });
  refuse("no byte of hidden", [](auto* r, auto*) { r->mutable_output_memory()->set_offset(kXAt + 16); });
  refuse("one of data, device_memory and session_memory", [&](auto* r, auto*) { r->mutable_hidden()->set_data(plain.hidden().data()); });
  CHECK((memory->Read() == Pattern()));
}

// A program that runs the hidden cases of this tag as a client of the server.
std::unique_ptr<Process> StartClient(const std::string& tag, const GpuServer& server) {
  auto child = Process::Start({"/proc/self/exe", tag}, {kAddress + ("=" + server.address())});
  REQUIRE(child != nullptr);
  return child;
}

void CheckEnded(Process* child) {
  const std::optional<int> code = child->Wait(kPatience);
  INFO(child->Stdout() << child->Stderr());
  REQUIRE(code.has_value());
  CHECK(*code == 0);
  CHECK_THAT(child->Stdout(), Contains("All tests passed"));
}

// The server's address, in a client's process.
std::string AddressFromParent() {
  const char* const address = std::getenv(kAddress);
  REQUIRE(address != nullptr);
  return address;
}

}  // namespace

TEST_CASE("gpu server: calls over a unix socket give the reference's rows, and every report names the GPU's backend") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuServer server;
  const GpuClient client(server.address());
  ServeOptions options = ServedOptions(server.dir.path());
  options.policy = "require:reference";
  options.gpu = "none";
  const std::unique_ptr<Engine> reference = ServedEngine(options);
  REQUIRE(reference->Load("m", {}).ok());
  for (const int layer : kServedLayers) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const int64_t rows : {1, 37, 300}) {
        v1::ForwardRequest request = GateRequest(layer, rows, dtype);
        const double bound = dtype == DType::kF32 ? 3e-5 : 0.01;
        CheckAgainst(reference.get(), client, request, bound);
        request.set_return_routing(true);
        const v1::TopK used = client.Ask(request).routing();
        request.set_return_routing(false);
        AddLogits(rows, &request);
        CheckAgainst(reference.get(), client, request, bound);
        *request.mutable_top_k() = used;
        CheckAgainst(reference.get(), client, request, bound);
      }
    }
  }

  const v1::StatusResponse status = client.Status();
  CHECK(status.host().gpu() == (*LinkedAccelerator())->Name());
  const v1::ExplainResponse explanation = client.Explain();
  CHECK(explanation.fits());
  REQUIRE((status.models_size() == 1 && status.models(0).layers_size() == 2 && explanation.layers_size() == 2));
  CHECK(status.models(0).state() == v1::LAYER_STATE_READY);
  for (int at = 0; at < 2; ++at) {
    const std::string& backend = status.models(0).layers(at).backend();
    CHECK((backend == "cuda_wna16" || backend == "cuda_generic"));
    CHECK(explanation.layers(at).choice() == backend);
    CHECK_THAT(explanation.layers(at).shared_choice(), StartsWith("cuda_"));
    CHECK(explanation.layers(at).note().find("quarantined") == std::string::npos);
    CHECK(client.Ask(GateRequest(kServedLayers[at], 3, DType::kBf16)).backend() == backend);
  }
}

// A client's part: memory used as the contract asks, requests that are wrong in one place, and memory that comes to lie where the
// client freed what the server still keeps open.
TEST_CASE("part of another process: a client that shares its memory", "[.][gpu_server_client]") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuClient client(AddressFromParent());
  {
    Exported memory;
    for (const int layer : kServedLayers) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        for (const int64_t rows : {1, 37, 300}) CheckShared(client, GateRequest(layer, rows, dtype), &memory);
      }
    }
    CheckRefusals(client, &memory);
    CheckShared(client, GateRequest(1, 37, DType::kBf16), &memory);
  }
  for (int round = 0; round < 3; ++round) {
    Exported memory, beside;
    CheckShared(client, GateRequest(1, 5, DType::kF32), &memory);
    CheckShared(client, GateRequest(2, 5, DType::kF32), &beside);
  }
}

TEST_CASE("gpu server: hidden states and output of another process stay in its device memory, and what is wrong is refused") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuServer server;
  const GpuClient client(server.address());
  const std::string want = client.Ask(GateRequest(1, 37, DType::kF32)).output().data();
  const auto child = StartClient("[gpu_server_client]", server);
  CheckEnded(child.get());
  // What is left open of the client's memory, now that it is gone, harms nobody.
  CHECK(client.Ask(GateRequest(1, 37, DType::kF32)).output().data() == want);
  for (const std::string& name : HealthNamesOf("m", kServedLayers)) {
    CHECK(HealthOf(server.address(), name) == HealthCheckResponse::SERVING);
  }
}

// A client's part: calls until it is killed.
TEST_CASE("part of another process: a client that is killed", "[.][gpu_server_killed]") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuClient client(AddressFromParent());
  Exported memory;
  const v1::ForwardRequest request = GateRequest(1, 300, DType::kBf16);
  CheckShared(client, request, &memory);
  std::printf("CALLING\n");
  std::fflush(stdout);
  const Clock::time_point end = Clock::now() + kPatience;
  while (Clock::now() < end) client.Ask(InMemory(request, memory.handle()));
}

// A client's part: calls with memory that it has freed, against the contract. It gets an answer or a refusal.
TEST_CASE("part of another process: a client that frees too early", "[.][gpu_server_freed]") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuClient client(AddressFromParent());
  const v1::ForwardRequest request = GateRequest(1, 37, DType::kF32);
  std::string freed;
  {
    Exported memory;
    CheckShared(client, request, &memory);
    freed = memory.handle();
  }
  for (int call = 0; call < 3; ++call) {
    v1::ForwardResponse answer;
    const grpc::Status status = client.Forward(InMemory(request, freed), &answer);
    INFO(status.error_message());
    CHECK((status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT));
  }
  Exported memory;
  CheckShared(client, request, &memory);
}

// The server's part.
TEST_CASE("part of another process: a server whose clients die or free too early", "[.][gpu_server_bad_clients]") {
  if (!HaveGpu()) return Skip("no GPU");
  const GpuServer server;
  const GpuClient client(server.address());
  const std::string want = client.Ask(GateRequest(2, 37, DType::kF32)).output().data();
  const auto killed = StartClient("[gpu_server_killed]", server);
  const Clock::time_point end = Clock::now() + kPatience;
  while (killed->Stdout().find("CALLING") == std::string::npos && killed->Running() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  killed->Signal(SIGKILL);
  const std::optional<int> code = killed->Wait(kPatience);
  INFO(killed->Stdout() << killed->Stderr());
  CHECK(code == 128 + SIGKILL);  // and not by itself, before
  CHECK(client.Ask(GateRequest(2, 37, DType::kF32)).output().data() == want);
  const auto freed = StartClient("[gpu_server_freed]", server);
  CheckEnded(freed.get());
  CHECK(client.Ask(GateRequest(2, 37, DType::kF32)).output().data() == want);
  CHECK(HealthOf(server.address(), "") == HealthCheckResponse::SERVING);
}

TEST_CASE("gpu server: a client that is killed in its calls, and one that frees its memory too early, harm nobody else") {
  if (!HaveGpu()) return Skip("no GPU");
  RunApart("[gpu_server_bad_clients]");
}

}  // namespace moed
