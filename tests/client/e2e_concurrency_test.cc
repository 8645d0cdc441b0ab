// B54 over RPC: clients that call one server at once, two models of different H, get their serial answers to the bit; also when
// they all call one layer, so that their rows are computed together.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

using client::DType;

constexpr int kClients = 8;
constexpr int kCalls = 50;
constexpr int64_t kRows[] = {1, 5, 64, 300};

struct Served {
  const char* name;
  int layer;
  int64_t hidden;
};
constexpr Served kModels[] = {{"ct-w4a16-g32-sym", 2, 256}, {"tiny-gptoss-bf16", 0, 288}};

// One call with an input of its own, routed by the server's gate, and what it is answered when nothing else runs.
struct Question {
  const Served* model = nullptr;
  int64_t rows = 0;
  std::vector<uint8_t> bytes;
  std::string alone;

  Question(const Served& served, int64_t length, uint32_t seed) : model(&served), rows(length) {
    std::mt19937 random(seed);
    std::normal_distribution<float> value;
    std::vector<float> x(static_cast<size_t>(rows * served.hidden));
    for (float& v : x) v = value(random);
    bytes = client::FromFloats(DType::kF32, x);
  }

  absl::StatusOr<client::ForwardResult> Call(client::MoeClient* client) const {
    client::ForwardCall call;
    call.model = model->name;
    call.layer = model->layer;
    call.hidden = {DType::kF32, rows, model->hidden, bytes};
    return client->Forward(call);
  }
  // The bytes of the output; empty when the call failed.
  std::string Ask(client::MoeClient* client) const {
    auto answer = Call(client);
    return answer.ok() ? std::move(answer->data) : std::string();
  }
};

struct Caller {
  std::unique_ptr<client::MoeClient> client;
  std::vector<Question> questions;
  int wrong = 0;

  Caller(int number, const std::string& address) : number_(number) {
    auto connected = client::MoeClient::Connect(address);
    REQUIRE(connected.ok());
    client = *std::move(connected);
    for (const Served& model : kModels) {
      for (const int64_t rows : kRows) {
        questions.emplace_back(model, rows, static_cast<uint32_t>(100 * number + questions.size()));
        questions.back().alone = questions.back().Ask(client.get());
        REQUIRE(questions.back().alone.size() == questions.back().bytes.size());
      }
    }
  }

  void Run() {
    for (int call = 0; call < kCalls; ++call) {
      const Question& question = questions[static_cast<size_t>(call * 3 + number_) % questions.size()];
      if (question.Ask(client.get()) != question.alone) ++wrong;
    }
  }

 private:
  const int number_;
};

}  // namespace

TEST_CASE("B54: clients that call at once over TCP and a UNIX socket get their serial answers to the bit") {
  std::vector<std::string> paths;
  for (const Served& model : kModels) paths.push_back(CheckedInModel(model.name).path);
  const RunningServer server(paths, {"--deterministic"});
  std::vector<Caller> callers;
  callers.reserve(kClients);
  for (int i = 0; i < kClients; ++i) callers.emplace_back(i, i % 2 == 0 ? server.tcp() : server.unix_socket());
  std::vector<std::thread> threads;
  for (Caller& caller : callers) threads.emplace_back([&caller] { caller.Run(); });
  for (std::thread& thread : threads) thread.join();
  for (const Caller& caller : callers) CHECK(caller.wrong == 0);
}

TEST_CASE("Clients of one layer share runs, and each gets its serial answers to the bit") {
  const RunningServer server({CheckedInModel(kModels[0].name).path}, {"--deterministic", "--max-batch-tokens", "64"});
  std::vector<Question> questions;  // also of more rows than a run has
  std::vector<std::unique_ptr<client::MoeClient>> clients;
  for (int i = 0; i < kClients; ++i) {
    questions.emplace_back(kModels[0], i == 0 ? 300 : 3 + i, static_cast<uint32_t>(i));
    auto connected = client::MoeClient::Connect(i % 2 == 0 ? server.tcp() : server.unix_socket());
    REQUIRE(connected.ok());
    clients.push_back(*std::move(connected));
    questions.back().alone = questions.back().Ask(clients.back().get());
    REQUIRE(questions.back().alone.size() == questions.back().bytes.size());
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      for (int call = 0; call < kCalls; ++call) wrong += questions[i].Ask(clients[i].get()) != questions[i].alone;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  nlohmann::json queue;
  CHECK(WaitFor([&] {  // runs are counted after their answers
    queue = server.MoectlJson({"status"})["queue"];
    return queue["finished"] == queue["accepted"];
  }));
  CHECK(queue["merged"].get<int>() > 0);
  CHECK(queue["accepted"].get<int>() == kClients * (kCalls + 1));
  CHECK(queue["waiting"] == 0);
  CHECK(queue["waiting_rows"] == 0);
  CHECK(queue["runs"].get<int>() > kCalls * 300 / 64);
  for (const int i : {0, 1, 2}) {  // alone again, over TCP and a UNIX socket
    const auto answer = questions[i].Call(clients[i].get());
    REQUIRE(answer.ok());
    CHECK(answer->timing.batch_rows == std::min<int64_t>(questions[i].rows, 64));
  }
}

TEST_CASE("A full queue answers RESOURCE_EXHAUSTED with a RetryInfo, and no call is lost") {
  const RunningServer server({CheckedInModel(kModels[0].name).path}, {"--deterministic", "--queue", "1"});
  const Question question(kModels[0], 300, 1);
  auto stub = moe::v1::Moe::NewStub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  std::atomic<int> answered{0}, refused{0}, other{0}, without_delay{0};
  const auto call = [&] {
    moe::v1::ForwardRequest request;
    request.set_layer(kModels[0].layer);
    request.mutable_hidden()->set_dtype(moe::v1::DTYPE_F32);
    request.mutable_hidden()->add_shape(question.rows);
    request.mutable_hidden()->add_shape(kModels[0].hidden);
    request.mutable_hidden()->set_data(question.bytes.data(), question.bytes.size());
    grpc::ClientContext context;
    moe::v1::ForwardResponse response;
    const grpc::Status status = stub->Forward(&context, request, &response);
    if (status.ok()) return void(++answered);
    if (status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) return void(++other);
    ++refused;
    google::rpc::Status details;
    google::rpc::RetryInfo retry;
    const bool told = details.ParseFromString(status.error_details()) && details.details().size() == 1 &&
                      details.details(0).UnpackTo(&retry) && (retry.retry_delay().seconds() > 0 || retry.retry_delay().nanos() > 0);
    without_delay += !told;
  };
  for (int round = 0; round < 100 && refused == 0; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kClients; ++i) threads.emplace_back(call);
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(refused > 0);
  CHECK(answered > 0);
  CHECK(other == 0);
  CHECK(without_delay == 0);
  CHECK(server.MoectlJson({"status"})["queue"]["refused"].get<int>() == refused);
}

}  // namespace moed::testing
