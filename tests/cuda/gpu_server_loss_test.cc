// A whole server whose device is lost under its calls, in a process of its own: what callers and health tell, and that it drains.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/gpu_server.h"
#include "tests/cuda/health_watch.h"
#include "tests/cuda/trap.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using namespace testing;  // NOLINT: servers, clients and health
using Catch::Matchers::Contains;
using Clock = std::chrono::steady_clock;
using grpc::health::v1::HealthCheckResponse;

constexpr std::chrono::seconds kSoon(1);    // what health promises
constexpr std::chrono::seconds kGrace(10);  // of a drain

bool WaitUntil(const std::function<bool()>& done, std::chrono::seconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  while (!done() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return done();
}

// A thread that makes one call after the other until one fails, or patience ends.
class Caller {
 public:
  explicit Caller(std::function<grpc::Status()> call)
      : thread_([this, call = std::move(call)] {
          const Clock::time_point end = Clock::now() + kPatience;
          while ((last_ = call()).ok() && Clock::now() < end) ++answered_;
        }) {}
  ~Caller() {
    if (thread_.joinable()) thread_.join();
  }
  int answered() const { return answered_; }
  // How the last call ended.
  grpc::Status Join() {
    thread_.join();
    return last_;
  }

 private:
  std::atomic<int> answered_{0};
  grpc::Status last_;
  std::thread thread_;  // last: uses the others
};

// Rows of few and of many, in both types, on both layers, and self-checks: more calls at once than there are lanes.
std::vector<std::unique_ptr<Caller>> StartCallers(const GpuClient& client) {
  const v1::ForwardRequest requests[] = {GateRequest(1, 1, DType::kBf16), GateRequest(2, 37, DType::kF32),
                                         GateRequest(1, 300, DType::kBf16), GateRequest(2, 2000, DType::kF32)};
  std::vector<std::unique_ptr<Caller>> callers;
  for (const v1::ForwardRequest& request : requests) {
    callers.push_back(std::make_unique<Caller>([&client, request] {
      v1::ForwardResponse answer;
      return client.Forward(request, &answer);
    }));
  }
  callers.push_back(std::make_unique<Caller>([&client] { return client.SelfCheck(); }));
  return callers;
}

// Ends the context of the process; returns when that began.
Clock::time_point KillDevice() {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const Clock::time_point start = Clock::now();
  CHECK(LaunchTrap(stream) == cudaSuccess);
  return start;
}

void CheckFailed(const grpc::Status& status) {
  INFO(status.error_message());
  CHECK(status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK_THAT(status.error_message(), Contains(Gpu().Name() + " failed: "));
}

// Calls of every kind on the device that failed.
void CheckLaterCalls(const GpuClient& client) {
  for (const int layer : kServedLayers) {
    v1::ForwardRequest request = GateRequest(layer, 5, DType::kF32);
    v1::ForwardResponse answer;
    CheckFailed(client.Forward(request, &answer));
    request.mutable_hidden()->clear_data();
    request.mutable_hidden()->mutable_device_memory()->set_cuda_ipc_handle(std::string(64, 'x'));
    CheckFailed(client.Forward(request, &answer));
  }
  CheckFailed(client.SelfCheck());
  CHECK(client.Explain().layers_size() == 2);
  const v1::StatusResponse status = client.Status();
  REQUIRE((status.models_size() == 1 && status.models(0).layers_size() == 2));
  CHECK(status.models(0).state() == v1::LAYER_STATE_FAILED);
  CHECK_THAT(status.models(0).error(), Contains(" failed: "));
  for (const v1::LayerStatus& layer : status.models(0).layers()) {
    CHECK(layer.state() == v1::LAYER_STATE_FAILED);
    CHECK_THAT(layer.note(), Contains(" failed: "));
  }
}

// SERVING, and once NOT_SERVING after `lost`, in time; then the drain ended it.
void CheckWatch(HealthWatch* watch, Clock::time_point lost) {
  CHECK_FALSE(watch->Finish().ok());
  const std::vector<HealthWatch::Change> changes = watch->changes();
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].status == HealthCheckResponse::SERVING);
  CHECK(changes[0].when < lost);
  CHECK(changes[1].status == HealthCheckResponse::NOT_SERVING);
  CHECK(changes[1].when - lost < kSoon);
}

}  // namespace

// The server's part. Everything that it made is destroyed on the lost device before it ends.
TEST_CASE("part of another process: a server that loses its device", "[.][gpu_server_loss]") {
  if (!HaveGpu()) return Skip("no GPU");
  GpuServer served;
  const GpuClient client(served.address());
  std::vector<std::unique_ptr<HealthWatch>> watches;
  std::vector<std::pair<std::string, std::string>> health;  // address and name
  for (const std::string& address : {served.address(), served.server->health_address()}) {
    for (const std::string& name : HealthNamesOf("m", kServedLayers)) {
      health.emplace_back(address, name);
      watches.push_back(std::make_unique<HealthWatch>(address, name));
    }
  }
  const auto all_are = [&](HealthCheckResponse::ServingStatus status) {
    return std::all_of(health.begin(), health.end(), [&](const auto& at) { return HealthOf(at.first, at.second) == status; });
  };
  CHECK(all_are(HealthCheckResponse::SERVING));
  const auto told = [](const auto& watch) { return !watch->changes().empty(); };
  REQUIRE(WaitUntil([&] { return std::all_of(watches.begin(), watches.end(), told); }, kPatience));
  const std::vector<std::unique_ptr<Caller>> callers = StartCallers(client);
  const auto under_way = [](const auto& caller) { return caller->answered() >= 2; };
  CHECK(WaitUntil([&] { return std::all_of(callers.begin(), callers.end(), under_way); }, kPatience));

  const Clock::time_point lost = KillDevice();
  CHECK(WaitUntil([&] { return all_are(HealthCheckResponse::NOT_SERVING); }, 5 * kSoon));
  CHECK(Clock::now() - lost < kSoon);
  for (const std::unique_ptr<Caller>& caller : callers) CheckFailed(caller->Join());
  CheckLaterCalls(client);
  CHECK(all_are(HealthCheckResponse::NOT_SERVING));

  const Clock::time_point drain = Clock::now();
  served.server->Drain();
  CHECK(Clock::now() - drain < kGrace);
  CHECK(served.server->counters().waiting == 0);
  for (const std::unique_ptr<HealthWatch>& watch : watches) CheckWatch(watch.get(), lost);
  v1::ForwardResponse answer;
  CHECK(client.Forward(GateRequest(1, 5, DType::kF32), &answer).error_code() == grpc::StatusCode::UNAVAILABLE);
}

TEST_CASE("gpu server loss: health falls within a second, all calls are UNAVAILABLE, and the server drains and ends") {
  if (!HaveGpu()) return Skip("no GPU");
  RunApart("[gpu_server_loss]");
  CHECK(Gpu().Health().ok());  // the child's device alone was lost
}

}  // namespace moed
