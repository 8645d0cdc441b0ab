// A server whose layers are on an accelerator, played by a puppet: calls at once, and health when the device fails.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <catch2/catch.hpp>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "kernels/backends.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "server/server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/puppet_accelerator.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using namespace testing;  // NOLINT: the builder's vocabulary
using Catch::Matchers::Contains;
using grpc::health::v1::HealthCheckResponse;

constexpr int64_t kHidden = 64;
constexpr std::chrono::seconds kSoon(1);  // what health promises

// A server on a puppet, open, and clients of it.
struct Bench {
  explicit Bench(const std::string& policy = "auto", int run_limit_s = 600) {
    CheckpointBuilder builder;
    AddModel({.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = kHidden, .intermediate = 64}, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
    EngineOptions options;
    options.threads = 2;
    options.device = ThisDevice();
    puppet.Describe(&options.device);
    options.policy = *Policy::Parse(policy);
    std::vector<const Backend*> backends = LinkedBackends();
    backends.insert(backends.begin(), &backend);
    engine = std::make_unique<Engine>(options, backends);
    REQUIRE(engine->Plan("m", dir.path()).ok());
    ServeOptions serve;
    serve.listen = {"127.0.0.1:0"};
    serve.health_listen = "127.0.0.1:0";
    serve.run_limit = run_limit_s;
    auto listening = Server::Listen(serve, engine.get());
    REQUIRE(listening.ok());
    server = *std::move(listening);
    REQUIRE(engine->Load("m", {}).ok());
    channel = grpc::CreateChannel(server->addresses()[0], grpc::InsecureChannelCredentials());
    moe = v1::Moe::NewStub(channel);
  }
  void Open() { REQUIRE(server->Open([] { return absl::OkStatus(); }).ok()); }

  // With the hidden states in the message unless `change` puts them elsewhere.
  grpc::Status Forward(int layer, int64_t rows, v1::ForwardResponse* answer,
                       const std::function<void(v1::ForwardRequest*)>& change = {}) {
    v1::ForwardRequest request = Request(layer, rows);
    if (change) change(&request);
    grpc::ClientContext context;
    return moe->Forward(&context, request, answer);
  }
  static v1::ForwardRequest Request(int layer, int64_t rows) {
    v1::ForwardRequest request;
    request.set_layer(layer);
    const std::vector<float> x = CaseHidden(rows, kHidden);
    v1::Tensor* hidden = request.mutable_hidden();
    hidden->set_dtype(v1::DTYPE_F32);
    hidden->add_shape(rows);
    hidden->add_shape(kHidden);
    hidden->set_data(x.data(), x.size() * sizeof(float));
    return request;
  }
  // With the bytes that `write` makes of the same request.
  grpc::Status Raw(int layer, int64_t rows, const std::function<std::string(v1::ForwardRequest*)>& write,
                   v1::ForwardResponse* answer) {
    v1::ForwardRequest request = Request(layer, rows);
    const grpc::Slice slice(write(&request));
    const grpc::ByteBuffer bytes(&slice, 1);
    grpc::ByteBuffer received;
    grpc::ClientContext context;
    std::promise<grpc::Status> done;
    grpc::GenericStub(channel).UnaryCall(&context, "/moe.v1.Moe/Forward", {}, &bytes, &received,
                                         [&](grpc::Status status) { done.set_value(status); });
    const grpc::Status status = done.get_future().get();
    if (!status.ok()) return status;
    grpc::ProtoBufferReader reader(&received);
    REQUIRE(answer->ParseFromZeroCopyStream(&reader));
    return status;
  }
  HealthCheckResponse::ServingStatus HealthOf(const std::string& address, const std::string& name) {
    const auto health =
        grpc::health::v1::Health::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(name);
    HealthCheckResponse response;
    REQUIRE(health->Check(&context, request, &response).ok());
    return response.status();
  }
  v1::ModelStatus Status() {
    grpc::ClientContext context;
    v1::StatusResponse response;
    REQUIRE(moe->Status(&context, v1::StatusRequest(), &response).ok());
    return response.models(0);
  }

  TempDir dir;
  PuppetAccelerator puppet;
  PuppetBackend backend{&puppet};
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Server> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Moe::Stub> moe;
};

}  // namespace

TEST_CASE("Two calls of layers on the accelerator compute at once, in pinned memory, and a drain waits for both") {
  Bench bench;
  bench.Open();
  v1::ForwardResponse alone[2];
  for (int i = 0; i < 2; ++i) REQUIRE(bench.Forward(i, 5, &alone[i]).ok());
  CHECK(alone[0].backend() == "cuda_puppet");
  bench.puppet.Block();
  std::vector<std::future<v1::ForwardResponse>> calls;
  for (int i = 0; i < 2; ++i) {  // of two layers: those of one might share a run
    calls.push_back(std::async(std::launch::async, [&bench, i] {
      v1::ForwardResponse answer;
      CHECK(bench.Forward(i, 5, &answer).ok());
      return answer;
    }));
  }
  REQUIRE(bench.puppet.WaitForBlocked(2));
  std::future<void> drain = std::async(std::launch::async, [&] { bench.server->Drain(); });
  CHECK(drain.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
  bench.puppet.Release();
  for (int i = 0; i < 2; ++i) CHECK(calls[i].get().output().data() == alone[i].output().data());
  drain.get();
  CHECK(bench.puppet.counts().pinned >= 4);  // hidden states and output of two
  CHECK(bench.puppet.counts().pinned <= 6);
  CHECK(bench.server->counters().finished == 4);
  CHECK(bench.server->counters().merged == 0);
}

TEST_CASE("Hidden states of layers on the accelerator come into pinned memory, those of others and in pieces do not") {
  Bench bench("auto,layers:1=require:cpu_generic");
  bench.Open();
  v1::ForwardResponse answer, in_pieces, refused;
  REQUIRE(bench.Forward(1, 5, &answer).ok());
  CHECK(bench.puppet.counts().pinned == 0);
  // Pieces of a message merge: here the shape comes apart from the data.
  const auto split = [](v1::ForwardRequest* request) {
    v1::ForwardRequest first;
    first.mutable_hidden()->set_dtype(request->hidden().dtype());
    *first.mutable_hidden()->mutable_shape() = request->hidden().shape();
    request->mutable_hidden()->clear_shape();
    request->mutable_hidden()->clear_dtype();
    return first.SerializeAsString() + request->SerializeAsString();
  };
  CHECK(bench.Raw(0, 5, split, &in_pieces).ok());
  CHECK(bench.puppet.counts().pinned == 1);  // the output
  REQUIRE(bench.Forward(0, 5, &answer).ok());
  CHECK(bench.puppet.counts().pinned >= 2);
  CHECK(answer.output().data() == in_pieces.output().data());
  // A layer that is none is refused before its hidden states are copied.
  const int pinned = bench.puppet.counts().pinned;
  CHECK(bench.Forward(7, 500, &refused).error_code() == grpc::StatusCode::NOT_FOUND);
  CHECK(bench.puppet.counts().pinned == pinned);
}

TEST_CASE("Large requests of many clients compute while their hidden states come, and each gets the answer of its own rows") {
  Bench bench;
  bench.Open();
  constexpr int kClients = 4, kCalls = 5;
  const auto rows_of = [](int client) { return int64_t{2500} + 977 * client; };  // 0.6 to 1.4 MB
  std::vector<std::string> alone;
  for (int client = 0; client < kClients; ++client) {
    v1::ForwardResponse answer;
    REQUIRE(bench.Forward(client % 2, rows_of(client), &answer).ok());
    alone.push_back(answer.output().data());
  }
  CHECK(bench.puppet.counts().incoming_parts >= kClients);
  std::atomic<int> wrong{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      for (int call = 0; call < kCalls; ++call) {
        v1::ForwardResponse answer;
        wrong += !bench.Forward(client % 2, rows_of(client), &answer).ok() || answer.output().data() != alone[client];
      }
    });
  }
  for (std::thread& client : clients) client.join();
  CHECK(wrong == 0);
  CHECK(bench.server->counters().accepted == kClients * (kCalls + 1));
}

TEST_CASE("A large request that expires in the queue, or meets a failed device, harms no other and leaves no memory behind") {
  constexpr int64_t kRows = 4000;
  auto bench = std::make_unique<Bench>();
  bench->Open();
  v1::ForwardResponse alone[2];
  for (int i = 0; i < 2; ++i) REQUIRE(bench->Forward(i, kRows, &alone[i]).ok());
  bench->puppet.Block();
  std::vector<std::future<v1::ForwardResponse>> calls;
  for (int i = 0; i < 2; ++i) {
    calls.push_back(std::async(std::launch::async, [&bench, i] {
      v1::ForwardResponse answer;
      CHECK(bench->Forward(i, kRows, &answer).ok());
      return answer;
    }));
  }
  REQUIRE(bench->puppet.WaitForBlocked(2));
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    v1::ForwardResponse answer;
    const grpc::Status late = bench->moe->Forward(&context, Bench::Request(0, kRows), &answer);
    CHECK(late.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  bench->puppet.Release();
  for (int i = 0; i < 2; ++i) CHECK(calls[i].get().output().data() == alone[i].output().data());
  bench->puppet.Fail("fell off the bus");
  for (int i = 0; i < 3; ++i) {
    v1::ForwardResponse answer;
    CHECK(bench->Forward(i % 2, kRows, &answer).error_code() == grpc::StatusCode::UNAVAILABLE);
  }
  bench->server->Drain();
  const WorkQueue::Counters counters = bench->server->counters();
  CHECK(counters.accepted == counters.finished + counters.expired + counters.cancelled);
  bench->channel.reset();
  bench->moe.reset();
  bench->server.reset();
  bench->engine.reset();
  CHECK(bench->puppet.counts().pinned_alive == 0);
}

TEST_CASE("The times of an answer add up to no more than the caller waited, and hold what a blocked device took") {
  Bench bench;
  bench.Open();
  bench.puppet.Block();
  const auto begin = std::chrono::steady_clock::now();
  auto call = std::async(std::launch::async, [&] {
    v1::ForwardResponse answer;
    CHECK(bench.Forward(0, 5, &answer).ok());
    return answer.timing();
  });
  REQUIRE(bench.puppet.WaitForBlocked(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  bench.puppet.Release();
  const v1::Timing timing = call.get();
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
  CHECK(timing.compute_us() >= 30000);
  for (const int64_t part : {timing.receive_us(), timing.queue_us(), timing.send_us()}) CHECK(part >= 0);
  CHECK(timing.receive_us() + timing.queue_us() + timing.compute_us() + timing.send_us() <= waited);
}

TEST_CASE("When the device fails, health is NOT_SERVING for every name within a second and stays so, and a drain goes as ever") {
  Bench bench("auto,layers:1=require:cpu_generic");
  bench.Open();
  const std::vector<std::string> names = {"", "m", "m/0", "m/1"};
  for (const std::string& name : names) CHECK(bench.HealthOf(bench.server->addresses()[0], name) == HealthCheckResponse::SERVING);
  bench.puppet.Fail("fell off the bus");
  const auto failed = std::chrono::steady_clock::now();
  while (bench.HealthOf(bench.server->addresses()[0], "") == HealthCheckResponse::SERVING &&
         std::chrono::steady_clock::now() - failed < 20 * kSoon) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (int look = 0; look < 2; ++look) {
    for (const std::string& name : names) {
      CHECK(bench.HealthOf(bench.server->addresses()[0], name) == HealthCheckResponse::NOT_SERVING);
      CHECK(bench.HealthOf(bench.server->health_address(), name) == HealthCheckResponse::NOT_SERVING);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // more than between two looks at the device
  }
  v1::ForwardResponse answer;
  const grpc::Status refused = bench.Forward(0, 5, &answer);
  CHECK(refused.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK_THAT(refused.error_message(), Contains("fell off the bus"));
  CHECK(bench.Forward(1, 5, &answer).ok());  // on the host
  const v1::ModelStatus status = bench.Status();
  CHECK(status.state() == v1::LAYER_STATE_FAILED);
  CHECK_THAT(status.error(), Contains("fell off the bus"));
  CHECK(status.layers(0).state() == v1::LAYER_STATE_FAILED);
  CHECK_THAT(status.layers(0).note(), Contains("fell off the bus"));
  CHECK(status.layers(1).state() == v1::LAYER_STATE_READY);
  bench.server->Drain();
  CHECK(bench.server->counters().waiting == 0);
}

TEST_CASE("While a run goes on beyond its limit health is NOT_SERVING for every name, and SERVING again when it has ended") {
  Bench bench("auto", 1);
  bench.Open();
  const auto becomes = [&](HealthCheckResponse::ServingStatus wanted) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (const std::string& address : {bench.server->addresses()[0], bench.server->health_address()}) {
      for (const char* name : {"", "m", "m/0", "m/1"}) {
        while (bench.HealthOf(address, name) != wanted && std::chrono::steady_clock::now() < give_up)
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        CHECK(bench.HealthOf(address, name) == wanted);
      }
    }
  };
  for (int round = 0; round < 2; ++round) {
    becomes(HealthCheckResponse::SERVING);
    bench.puppet.Block();
    auto call = std::async(std::launch::async, [&] {
      v1::ForwardResponse answer;
      return bench.Forward(0, 5, &answer).ok();
    });
    REQUIRE(bench.puppet.WaitForBlocked(1));
    becomes(HealthCheckResponse::NOT_SERVING);
    bench.puppet.Release();
    CHECK(call.get());
  }
  becomes(HealthCheckResponse::SERVING);
  bench.puppet.Fail("fell off the bus");
  becomes(HealthCheckResponse::NOT_SERVING);
}

TEST_CASE("B61: Pings every six seconds do not end a call that takes twenty, pings each second do") {
  Bench bench;
  bench.Open();
  bench.puppet.Block();
  // The server ends a connection at the third ping that comes too soon.
  const auto call = [&](int seconds, int layer) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, seconds * 1000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(bench.server->addresses()[0], grpc::InsecureChannelCredentials(), arguments);
    grpc::ClientContext context;
    v1::ForwardResponse answer;
    return v1::Moe::NewStub(channel)->Forward(&context, Bench::Request(layer, 5), &answer).error_code();
  };
  auto polite = std::async(std::launch::async, call, 6, 0);
  auto eager = std::async(std::launch::async, call, 1, 1);  // of another layer, so that it is a run of its own
  REQUIRE(bench.puppet.WaitForBlocked(2));
  CHECK(polite.wait_for(std::chrono::seconds(20)) == std::future_status::timeout);
  bench.puppet.Release();
  CHECK(polite.get() == grpc::StatusCode::OK);
  CHECK(eager.get() == grpc::StatusCode::UNAVAILABLE);  // the protection is on
}

TEST_CASE("Hidden states are read from device memory that a client shares, and the output is written there") {
  Bench bench("auto,layers:1=require:cpu_generic");
  bench.Open();
  v1::ForwardResponse plain;
  REQUIRE(bench.Forward(0, 5, &plain).ok());
  std::vector<float> memory(2 * 5 * kHidden + 4);  // 16 bytes, the input, the output
  const size_t bytes = 5 * kHidden * sizeof(float);
  const std::vector<float> x = CaseHidden(5, kHidden);
  std::memcpy(memory.data() + 4, x.data(), bytes);
  const SharedHandle handle = bench.puppet.Share(reinterpret_cast<std::byte*>(memory.data()), memory.size() * sizeof(float));
  const auto place = [&](v1::DeviceMemory* out, uint64_t offset) {
    out->set_cuda_ipc_handle(handle.data(), handle.size());
    out->set_offset(offset);
  };
  const auto both = [&](v1::ForwardRequest* request) {
    request->mutable_hidden()->clear_data();
    place(request->mutable_hidden()->mutable_device_memory(), 16);
    place(request->mutable_output_memory(), 16 + bytes);
  };
  v1::ForwardResponse answer;
  const grpc::Status status = bench.Forward(0, 5, &answer, both);
  INFO(status.error_message());
  REQUIRE(status.ok());
  CHECK(answer.output().data().empty());
  CHECK(answer.output().shape(0) == 5);
  CHECK(answer.output().shape(1) == kHidden);
  CHECK(answer.backend() == "cuda_puppet");
  CHECK(std::memcmp(memory.data() + 4 + 5 * kHidden, plain.output().data().data(), bytes) == 0);
  REQUIRE(bench.Forward(0, 5, &answer, [&](v1::ForwardRequest* request) {
    both(request);
    request->clear_output_memory();
  }).ok());
  CHECK(answer.output().data() == plain.output().data());
  CHECK(bench.puppet.counts().opened == 1);

  const auto refused = [&](int layer, int64_t rows, const std::function<void(v1::ForwardRequest*)>& change) {
    const grpc::Status got =
        bench.Forward(layer, rows, &answer, [&](v1::ForwardRequest* request) { both(request), change(request); });
    CHECK(got.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    return got.error_message();
  };
  CHECK_THAT(refused(1, 5, [](v1::ForwardRequest*) {}), Contains("hidden.device_memory") && Contains("cpu_generic"));
  CHECK_THAT(refused(0, 5, [&](v1::ForwardRequest* r) { r->mutable_output_memory()->set_offset(32 + bytes); }),
             Contains("output_memory: wanted a tensor within the " + std::to_string(memory.size() * sizeof(float)) + " bytes"));
  CHECK_THAT(refused(0, 5, [](v1::ForwardRequest* r) { r->mutable_output_memory()->set_cuda_ipc_handle(std::string(64, 'x')); }),
             Contains("output_memory: puppet: no such handle"));
}

TEST_CASE("A call that meets the failed device first gets the reason, and so do all after it") {
  Bench bench;
  bench.Open();
  bench.puppet.Fail("fell off the bus");
  for (int i = 0; i < 2; ++i) {
    v1::ForwardResponse answer;
    const grpc::Status refused = bench.Forward(i, 5, &answer);
    CHECK(refused.error_code() == grpc::StatusCode::UNAVAILABLE);
    CHECK(refused.error_message() == "puppet failed: fell off the bus");
  }
  CHECK(bench.Status().layers(1).state() == v1::LAYER_STATE_FAILED);
}

TEST_CASE("A server whose device failed before it opened does not open") {
  Bench bench;
  bench.puppet.Fail("fell off the bus");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto failed = std::chrono::steady_clock::now();
  absl::Status opened;
  while (bench.engine->Status()[0].state != LayerState::kFailed && std::chrono::steady_clock::now() - failed < 20 * kSoon) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  do {
    opened = bench.server->Open([] { return absl::CancelledError("announced"); });
  } while (absl::IsCancelled(opened) && std::chrono::steady_clock::now() - failed < 20 * kSoon);
  CHECK(absl::IsUnavailable(opened));
  CHECK_THAT(std::string(opened.message()), Contains("fell off the bus"));
  CHECK(bench.HealthOf(bench.server->addresses()[0], "") == HealthCheckResponse::NOT_SERVING);
}

}  // namespace moed
