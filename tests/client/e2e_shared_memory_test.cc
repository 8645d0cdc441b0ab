// Sessions of shared memory through real processes: every transport gives the same bits and the same refusals, and the end of a
// client or a server is noticed on the other side, by nobody else.
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Catch::Matchers::Contains;
using client::DType;
using client::Transport;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr Transport kTransports[] = {Transport::kRpc, Transport::kSharedMemory, Transport::kRing};
constexpr int64_t kHidden = 256, kExperts = 16, kTopK = 4;
constexpr int kLayer = 2;

std::string Model() { return CheckedInModel("ct-w4a16-g32-sym").path; }

std::unique_ptr<client::MoeClient> Connect(const std::string& address, Transport transport, size_t session_bytes = 32 << 20) {
  auto client = client::MoeClient::Connect(address, {.own_connection = true, .transport = transport, .session_bytes = session_bytes});
  REQUIRE(client.ok());
  return *std::move(client);
}

enum class Kind { kGate, kIds, kLogits };

// A random call. Its spans point into itself: not to be moved.
struct Call {
  std::vector<uint8_t> bytes;
  std::vector<int32_t> ids;
  std::vector<float> weights, logits;
  client::ForwardCall call;

  Call(int64_t rows, DType dtype, Kind kind, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> value;
    std::vector<float> x(static_cast<size_t>(rows * kHidden));
    for (float& v : x) v = value(random);
    bytes = client::FromFloats(dtype, x);
    call.layer = kLayer;
    call.hidden = {dtype, rows, kHidden, bytes};
    call.return_routing = true;
    call.request_id = "request " + std::to_string(seed);
    if (kind == Kind::kIds) {
      for (int64_t i = 0; i < rows * kTopK; ++i) ids.push_back(static_cast<int32_t>(random() % (kExperts + 1)) - 1);
      weights.assign(ids.size(), 0.25f);
      call.top_k = kTopK;
      call.ids = ids, call.weights = weights;
    } else if (kind == Kind::kLogits) {
      logits.resize(static_cast<size_t>(rows * kExperts));
      for (float& v : logits) v = value(random);
      call.num_experts = kExperts;
      call.router_logits = logits;
    }
  }
  Call(const Call&) = delete;
};

// Mappings of sessions' memory that a process has.
int Regions(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:moed") != std::string::npos;
  return count;
}

}  // namespace

TEST_CASE("Every transport gives the same bits, whatever the rows, dtypes and routing") {
  RunningServer server({Model()});
  uint32_t seed = 0;
  for (const int64_t rows : {0, 1, 33, 300}) {
    for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
      for (const Kind kind : {Kind::kGate, Kind::kIds, Kind::kLogits}) {
        Call call(rows, dtype, kind, ++seed);
        if (seed % 2 == 0) call.call.output_dtype = DType::kF32;
        CAPTURE(rows, client::DTypeName(dtype), static_cast<int>(kind));
        std::vector<client::ForwardResult> results;
        for (const Transport transport : kTransports) {
          const auto result = Connect(server.unix_socket(), transport)->Forward(call.call);
          INFO(client::TransportName(transport) << ": " << result.status().ToString());
          REQUIRE(result.ok());
          results.push_back(*result);
        }
        const client::ForwardResult& want = results.front();
        for (const client::ForwardResult& got : results) {
          CHECK(got.data == want.data);
          CHECK(got.dtype == want.dtype);
          CHECK((got.rows == rows && got.columns == kHidden));
          CHECK(got.top_k == kTopK);
          CHECK(got.ids == want.ids);
          CHECK(got.weights == want.weights);
          CHECK(got.backend == want.backend);
          CHECK(got.scheme == want.scheme);
          CHECK(got.generation == want.generation);
        }
      }
    }
  }
}

TEST_CASE("Hidden states in one byte an element give the bits of the bf16 values that they stand for, on every transport") {
  RunningServer server({Model()});
  for (const int64_t rows : {0, 1, 33}) {
    for (const DType dtype : {DType::kF8E4m3, DType::kI8}) {
      Call call(rows, DType::kF32, Kind::kIds, 9);
      const std::vector<float> x = client::ToFloats(DType::kF32, call.bytes);
      const client::PackedRows packed = client::PackRows(dtype, x, kHidden);
      std::vector<float> values(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const uint8_t code = packed.codes[i];
        const float magnitude = (code & 0x78) == 0 ? std::ldexp(static_cast<float>(code & 7), -9)
                                                   : std::ldexp(static_cast<float>(8 + (code & 7)), (code >> 3 & 15) - 10);
        const float plain = dtype == DType::kI8 ? static_cast<float>(static_cast<int8_t>(code)) : code & 0x80 ? -magnitude : magnitude;
        values[i] = plain * packed.scales[i / kHidden];
        const float bound = dtype == DType::kI8 ? packed.scales[i / kHidden] / 2 : std::max(std::fabs(x[i]) / 16, packed.scales[i / kHidden] / 1024);
        REQUIRE(std::fabs(values[i] - x[i]) <= bound * 1.001f);
      }
      const std::vector<uint8_t> bf16 = client::FromFloats(DType::kBf16, values);
      client::ForwardCall want_call = call.call, packed_call = call.call;
      want_call.hidden = {DType::kBf16, rows, kHidden, bf16};
      packed_call.hidden = {dtype, rows, kHidden, packed.codes};
      packed_call.hidden_scales = packed.scales;
      const auto want = Connect(server.unix_socket(), Transport::kRpc)->Forward(want_call);
      REQUIRE(want.ok());
      for (const Transport transport : kTransports) {
        const auto got = Connect(server.unix_socket(), transport)->Forward(packed_call);
        INFO(client::TransportName(transport) << ": " << got.status().ToString());
        REQUIRE(got.ok());
        CHECK(got->dtype == DType::kBf16);
        CHECK(got->data == want->data);
      }
    }
  }
}

TEST_CASE("What each slot adds makes the sum, and is zero without an expert, on every transport and dtype") {
  RunningServer server({Model()}, {"--deterministic"});
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kI8}) {
    Call call(9, DType::kF32, Kind::kIds, 4);
    const std::vector<float> x = client::ToFloats(DType::kF32, call.bytes);
    const client::PackedRows packed = client::PackRows(DType::kI8, x, kHidden);
    const std::vector<uint8_t> bytes = dtype == DType::kI8 ? packed.codes : client::FromFloats(dtype, x);
    call.call.hidden = {dtype, 9, kHidden, bytes};
    if (dtype == DType::kI8) call.call.hidden_scales = packed.scales;
    call.call.output_dtype = DType::kF32;
    call.call.routed_only = true;
    const auto sum = Connect(server.unix_socket(), Transport::kRpc)->Forward(call.call);
    REQUIRE(sum.ok());
    const std::vector<float> want = sum->Floats();
    call.call.per_slot = true;
    std::string first;
    for (const Transport transport : kTransports) {
      const auto parts = Connect(server.unix_socket(), transport)->Forward(call.call);
      INFO(client::TransportName(transport) << ": " << parts.status().ToString());
      REQUIRE(parts.ok());
      REQUIRE(parts->rows == 9 * kTopK);
      CHECK((parts->top_k == 1 && parts->ids == call.ids));
      if (first.empty()) first = parts->data;
      CHECK(parts->data == first);
      const std::vector<float> y = parts->Floats();
      for (int64_t row = 0; row < 9; ++row) {
        double error = 0, norm = 1e-30;
        for (int64_t c = 0; c < kHidden; ++c) {
          float added = 0;
          for (int64_t slot = 0; slot < kTopK; ++slot) {
            const float part = y[static_cast<size_t>((row * kTopK + slot) * kHidden + c)];
            if (call.ids[static_cast<size_t>(row * kTopK + slot)] == -1) CHECK(part == 0.0f);
            added += part;
          }
          const float whole = want[static_cast<size_t>(row * kHidden + c)];
          error += (added - whole) * (added - whole), norm += whole * whole;
        }
        CHECK(std::sqrt(error / norm) < 1e-5);
      }
    }
  }
  Call gate(3, DType::kBf16, Kind::kGate, 1);
  gate.call.per_slot = true;
  CHECK(absl::IsInvalidArgument(Connect(server.unix_socket(), Transport::kRing)->Forward(gate.call).status()));
}

TEST_CASE("Tensors in a client's buffers are used where they lie, others are copied, with one result") {
  RunningServer server({Model()});
  Call call(33, DType::kBf16, Kind::kIds, 1);
  const std::string want = Connect(server.unix_socket(), Transport::kRpc)->Forward(call.call)->data;
  for (const Transport transport : {Transport::kAuto, Transport::kRpc, Transport::kSharedMemory, Transport::kRing}) {
    const auto client = Connect(server.unix_socket(), transport);
    absl::StatusOr<client::Buffer> hidden = client->Allocate(call.bytes.size()), output = client->Allocate(want.size());
    REQUIRE((hidden.ok() && output.ok()));
    CHECK(hidden->shared() == (transport != Transport::kRpc));
    CHECK(reinterpret_cast<uintptr_t>(output->bytes().data()) % 64 == 0);
    std::copy(call.bytes.begin(), call.bytes.end(), hidden->bytes().begin());
    std::vector<uint8_t> plain(want.size());
    for (const std::span<uint8_t> target : {output->bytes(), std::span<uint8_t>(plain)}) {
      for (const std::span<const uint8_t> source : {std::span<const uint8_t>(hidden->bytes()), std::span<const uint8_t>(call.bytes)}) {
        std::fill(target.begin(), target.end(), uint8_t{0xee});
        client::ForwardCall here = call.call;
        here.hidden.data = source;
        const auto result = client->ForwardInto(here, target);
        INFO(client::TransportName(transport) << ": " << result.status().ToString());
        REQUIRE(result.ok());
        CHECK(result->data.empty());
        CHECK(std::string(target.begin(), target.end()) == want);
      }
    }
    const auto short_output = client->ForwardInto(call.call, std::span<uint8_t>(plain).first(10));
    CHECK_THAT(std::string(short_output.status().message()), Contains("wanted 16896 bytes, got 10"));
  }
}

TEST_CASE("Bad calls are refused alike on every transport, and the next call is right") {
  RunningServer server({Model()});
  std::vector<std::unique_ptr<client::MoeClient>> clients;
  for (const Transport transport : kTransports) clients.push_back(Connect(server.unix_socket(), transport));
  const auto refuse = [&](const std::function<void(Call*)>& change) {
    Call call(7, DType::kBf16, Kind::kIds, 3);
    change(&call);
    const absl::Status want = clients.front()->Forward(call.call).status();
    CHECK_FALSE(want.ok());
    for (const auto& client : clients) CHECK(client->Forward(call.call).status() == want);
  };
  refuse([](Call* c) { c->ids[5] = kExperts; });
  refuse([](Call* c) { c->ids[27] = -2; });
  refuse([](Call* c) { c->call.layer = 77; });
  refuse([](Call* c) { c->call.layer = -1; });
  refuse([](Call* c) { c->call.model = "another"; });
  refuse([](Call* c) { c->call.request_id = std::string(129, 'x'); });
  refuse([](Call* c) { c->call.request_id = std::string(500, 'x'); });
  refuse([](Call* c) {
    c->bytes.resize(7 * 257 * 2);
    c->call.hidden = {DType::kBf16, 7, 257, c->bytes};
  });
  refuse([](Call* c) { c->call.top_k = 3; });
  refuse([](Call* c) { c->call.num_experts = 16; });
  Call good(7, DType::kBf16, Kind::kIds, 3);
  const std::string want = clients.front()->Forward(good.call)->data;
  for (const auto& client : clients) CHECK(client->Forward(good.call)->data == want);
}

TEST_CASE("Where there is no session, auto sends messages and the others say why") {
  RunningServer none({Model()}, {"--session-socket", "none"});
  Call call(3, DType::kBf16, Kind::kGate, 1);
  CHECK(Connect(none.unix_socket(), Transport::kAuto)->Forward(call.call).ok());
  CHECK(absl::IsUnimplemented(Connect(none.unix_socket(), Transport::kRing)->Forward(call.call).status()));
  RunningServer few({Model()}, {"--sessions", "1", "--session-memory", "67108864"});
  const auto large = Connect(few.tcp(), Transport::kRing, size_t{80} << 20);
  CHECK_THAT(std::string(large->Forward(call.call).status().message()), Contains("of 67108864 are in use"));
  const auto first = Connect(few.tcp(), Transport::kRing);
  REQUIRE(first->Forward(call.call).ok());
  const auto second = Connect(few.tcp(), Transport::kRing);
  CHECK_THAT(std::string(second->Forward(call.call).status().message()), Contains("1 are open, 1 may be"));
  CHECK(Connect(few.tcp(), Transport::kAuto)->Forward(call.call).ok());
  CHECK(first->Forward(call.call).ok());
}

TEST_CASE("Calls that do not fit into the session go by message, or say so where only the ring may be used") {
  RunningServer server({Model()});
  Call call(300, DType::kF32, Kind::kIds, 5);  // 300 KiB each way
  const std::string want = Connect(server.unix_socket(), Transport::kRpc)->Forward(call.call)->data;
  CHECK(Connect(server.unix_socket(), Transport::kAuto, 400 << 10)->Forward(call.call)->data == want);
  const absl::Status refused = Connect(server.unix_socket(), Transport::kRing, 400 << 10)->Forward(call.call).status();
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Contains("session_bytes is 409600"));
}

TEST_CASE("Many threads of one client share a session, more of them than the ring has slots") {
  RunningServer server({Model()});
  const auto client = Connect(server.unix_socket(), Transport::kAuto);
  const auto by_message = Connect(server.unix_socket(), Transport::kRpc);
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<std::string> want;
  for (uint32_t i = 0; i < 80; ++i) {
    calls.push_back(std::make_unique<Call>(1 + i % 5, DType::kF32, Kind::kIds, i));
    want.push_back(by_message->Forward(calls.back()->call)->data);
  }
  std::vector<int> wrong(calls.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        const auto result = client->Forward(calls[i]->call);
        wrong[i] += !result.ok() || result->data != want[i];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::count(wrong.begin(), wrong.end(), 0) == 80);
}

TEST_CASE("A client that is killed in a call loses its memory within a second, and nobody else loses anything") {
  RunningServer server({Model()});
  const auto client = Connect(server.unix_socket(), Transport::kRing);
  Call call(5, DType::kF32, Kind::kIds, 1);
  const std::string want = client->Forward(call.call)->data;
  for (int round = 0; round < 3; ++round) {
    const auto other =
        Process::Start({kMoectl, "--server", server.unix_socket(), "bench", "--layer", std::to_string(kLayer), "--tokens", "512",
                        "--concurrency", "2", "--transport", "ring", "--seconds", "60"});
    REQUIRE(other != nullptr);
    REQUIRE(WaitFor([&] { return Regions(server.process().pid()) == 3; }));
    for (int i = 0; i < 20; ++i) CHECK(client->Forward(call.call)->data == want);
    other->Signal(SIGKILL);
    const auto killed = steady_clock::now();
    REQUIRE(WaitFor([&] { return Regions(server.process().pid()) == 1; }));
    CHECK(steady_clock::now() - killed < seconds(20));  // a hang guard: the bar is one second
    CHECK(other->Wait(seconds(20)) == 128 + SIGKILL);
    for (int i = 0; i < 20; ++i) CHECK(client->Forward(call.call)->data == want);
  }
}

TEST_CASE("A server that dies is UNAVAILABLE at once, and one that starts again is found") {
  const TempDir folder(TempDir::Use::kForSockets);
  const std::string address = "unix:" + folder.path() + "/moed.sock";
  auto server = std::make_unique<RunningServer>(std::vector<std::string>{Model()}, std::vector<std::string>{"--listen", address});
  const auto client = Connect(address, Transport::kRing);
  Call call(5, DType::kF32, Kind::kIds, 1);
  const std::string want = client->Forward(call.call)->data;
  server->process().Signal(SIGKILL);
  const absl::Status lost = client->Forward(call.call, {.timeout = milliseconds(60'000)}).status();
  CHECK(absl::IsUnavailable(lost));
  CHECK_THAT(std::string(lost.message()), Contains(address));
  server = std::make_unique<RunningServer>(std::vector<std::string>{Model()}, std::vector<std::string>{"--listen", address});
  REQUIRE(WaitFor([&] { return client->Forward(call.call, {.timeout = milliseconds(60'000), .wait_for_ready = true}).ok(); }));
  CHECK(client->Forward(call.call)->data == want);
}

TEST_CASE("A drain answers what was accepted over a ring, refuses the rest, and ends") {
  RunningServer server({Model()});
  const auto client = Connect(server.unix_socket(), Transport::kRing);
  Call call(300, DType::kF32, Kind::kIds, 1);
  const std::string want = client->Forward(call.call)->data;
  std::atomic<int> right{0}, wrong{0}, refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (;;) {
        const auto result = client->Forward(call.call);
        if (!result.ok()) return void(absl::IsUnavailable(result.status()) ? ++refused : ++wrong);
        ++(result->data == want ? right : wrong);
      }
    });
  }
  REQUIRE(WaitFor([&] { return right > 8; }));
  server.process().Signal(SIGTERM);
  for (std::thread& thread : threads) thread.join();
  CHECK(refused == 4);
  CHECK(wrong == 0);
  CHECK(server.process().Wait(seconds(60)) == 0);
}

TEST_CASE("Deadlines hold on a ring: a call that waits too long is given up, and its slot is used again when it was answered") {
  RunningServer server({Model()}, {"--threads", "1"});
  const auto client = Connect(server.unix_socket(), Transport::kAuto, size_t{64} << 20);
  Call large(8000, DType::kF32, Kind::kIds, 1), small(1, DType::kF32, Kind::kIds, 2);
  const std::string want = client->Forward(small.call)->data;
  std::atomic<bool> enough{false};
  int failed = 0;
  std::thread busy([&] {
    while (!enough) failed += client->Forward(large.call).ok() ? 0 : 1;
  });
  int late = 0;
  const auto end = steady_clock::now() + seconds(60);
  while (late < 10 && steady_clock::now() < end) {
    const auto begin = steady_clock::now();
    const auto result = client->Forward(small.call, {.timeout = milliseconds(1)});
    late += absl::IsDeadlineExceeded(result.status());
    CHECK((result.ok() || absl::IsDeadlineExceeded(result.status())));
    CHECK(steady_clock::now() - begin < seconds(20));
  }
  enough = true;
  busy.join();
  CHECK(failed == 0);
  CHECK(late >= 10);
  for (int i = 0; i < 100; ++i) CHECK(client->Forward(small.call)->data == want);
}

TEST_CASE("Memory of a call that was given up is nobody else's before the server is through with it") {
  RunningServer server({Model()}, {"--threads", "1"});
  Call given_up(4000, DType::kF32, Kind::kIds, 1), next(8000, DType::kF32, Kind::kIds, 2);
  const std::string want = Connect(server.unix_socket(), Transport::kRpc)->Forward(next.call)->data;
  for (const Transport transport : {Transport::kSharedMemory, Transport::kRing}) {
    for (const bool in_buffers : {false, true}) {
      CAPTURE(client::TransportName(transport), in_buffers);
      const auto client = Connect(server.unix_socket(), transport, size_t{64} << 20);
      for (int round = 0; round < 4; ++round) {
        if (in_buffers) {
          absl::StatusOr<client::Buffer> hidden = client->Allocate(given_up.bytes.size()), output = client->Allocate(given_up.bytes.size());
          REQUIRE((hidden.ok() && output.ok()));
          std::copy(given_up.bytes.begin(), given_up.bytes.end(), hidden->bytes().begin());
          client::ForwardCall here = given_up.call;
          here.hidden.data = hidden->bytes();
          client->ForwardInto(here, output->bytes(), {.timeout = milliseconds(10)}).status().IgnoreError();
        } else {
          client->Forward(given_up.call, {.timeout = milliseconds(10)}).status().IgnoreError();
        }
        // Its hidden states would lie where the other's output goes.
        const auto result = client->Forward(next.call);
        INFO(result.status().ToString());
        REQUIRE(result.ok());
        CHECK(result->data == want);
      }
    }
  }
}

TEST_CASE("Hello tells what a client must know, and both versions when they do not fit") {
  RunningServer server({Model()});
  const auto stub = moe::v1::Moe::NewStub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  moe::v1::HelloRequest request;
  moe::v1::HelloResponse response;
  request.set_protocol(1);
  {
    grpc::ClientContext context;
    REQUIRE(stub->Hello(&context, request, &response).ok());
  }
  CHECK(response.protocol() == 1);
  REQUIRE(response.models_size() == 1);
  CHECK(response.models(0).name() == "ct-w4a16-g32-sym");
  CHECK(response.models(0).hidden() == kHidden);
  CHECK(response.models(0).num_experts() == kExperts);
  CHECK(response.models(0).top_k() == kTopK);
  CHECK(response.models(0).first_expert() == 0);
  CHECK(response.models(0).end_expert() == kExperts);
  const auto told = Connect(server.tcp(), Transport::kRpc)->Status();
  REQUIRE(told.ok());
  CHECK(response.models(0).weights_hash().size() == 32);
  CHECK(response.models(0).weights_hash() == told->models[0].weights_hash);
  CHECK((response.models(0).layers_size() == 2 && response.models(0).layers(1) == kLayer));
  CHECK(response.max_message_bytes() == int64_t{256} << 20);
  CHECK("unix:" + response.shared_memory().socket() == server.unix_socket() + ".session");
  CHECK(response.shared_memory().server_id().size() == 16);
  request.set_protocol(7);
  grpc::ClientContext context;
  const grpc::Status status = stub->Hello(&context, request, &response);
  CHECK(status.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  CHECK_THAT(status.error_message(), Contains("wanted version 1") && Contains("got 7"));
}

}  // namespace moed::testing
