// B54 over RPC: clients that call one server at once, two models of different H, get their serial answers to the bit.
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
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

  // The bytes of the output; empty when the call failed.
  std::string Ask(client::MoeClient* client) const {
    client::ForwardCall call;
    call.model = model->name;
    call.layer = model->layer;
    call.hidden = {DType::kF32, rows, model->hidden, bytes};
    auto answer = client->Forward(call);
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

}  // namespace moed::testing
