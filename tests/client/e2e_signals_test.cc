// Stop signals: a real moed that is told to stop while it computes.
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "tests/client/running_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

// A model whose rows take the reference about a millisecond each, so that a small message is long work.
constexpr int64_t kHidden = 1024;

void WriteSlowModel(const std::string& directory) {
  const ModelSpec spec{.family = ModelFamily::kMixtral, .hidden = kHidden, .intermediate = 1024, .num_experts = 2};
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(directory).ok());
}

// One call of `rows` rows of zeros.
absl::Status ForwardZeros(client::MoeClient& client, int64_t rows, std::chrono::milliseconds timeout) {
  const std::vector<uint8_t> hidden(static_cast<size_t>(rows * kHidden) * 2, 0);
  client::ForwardCall call;
  call.hidden = {client::DType::kBf16, rows, kHidden, hidden};
  return client.Forward(call, {.timeout = timeout}).status();
}

// `count` long calls against a server of the slow model, which computes one after the other. On return the server is busy with
// them: a call of one row no longer gets its turn.
std::vector<std::future<absl::Status>> StartLongCalls(const RunningServer& server, int count) {
  std::vector<std::future<absl::Status>> calls;
  for (int i = 0; i < count; ++i) {
    calls.push_back(std::async(std::launch::async, [address = server.tcp()] {
      const auto client = client::MoeClient::Connect(address, {.own_connection = true});
      return client.ok() ? ForwardZeros(**client, 512, std::chrono::minutes(10)) : client.status();
    }));
  }
  const auto probe = client::MoeClient::Connect(server.tcp(), {.own_connection = true});
  REQUIRE(probe.ok());
  REQUIRE((*probe)->Status().ok());  // connected: what takes long from here on is the queue
  CHECK(WaitFor([&] { return absl::IsDeadlineExceeded(ForwardZeros(**probe, 1, std::chrono::milliseconds(100))); }));
  return calls;
}

// A server of the slow model in `folder`.
RunningServer Serve(const TempDir& folder) {
  WriteSlowModel(folder.path());
  return RunningServer({folder.path()}, {"--policy", "require:reference", "--threads", "1"});
}

}  // namespace

TEST_CASE("A stop signal that arrives twice at once counts once, and the ready file goes when the drain begins") {
  const TempDir folder;
  RunningServer server = Serve(folder);
  auto calls = StartLongCalls(server, 3);
  REQUIRE(Exists(server.ready_file()));
  server.process().Signal(SIGTERM);
  server.process().Signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the first one has been taken
  server.process().Signal(SIGTERM);
  CHECK(WaitFor([&] { return !Exists(server.ready_file()); }));
  int finished = 0;
  for (auto& call : calls) {  // those that were not yet with the server are turned away
    const absl::Status status = call.get();
    finished += status.ok();
    CHECK((status.ok() || absl::IsUnavailable(status)));
  }
  CHECK(finished > 0);
  CHECK(server.process().Wait(std::chrono::minutes(10)) == 0);
  CHECK(!Exists(server.ready_file()));
}

TEST_CASE("Another signal after the first one ends the process at once with 1") {
  const TempDir folder;
  RunningServer server = Serve(folder);
  auto calls = StartLongCalls(server, 8);
  server.process().Signal(SIGTERM);
  CHECK(WaitFor([&] { return !Exists(server.ready_file()); }));
  const auto client = client::MoeClient::Connect(server.tcp(), {.own_connection = true});
  REQUIRE(client.ok());
  const auto status = (*client)->Status();
  if (status.ok()) {  // else the drain was over already
    CHECK(status->models.at(0).state != client::LayerState::kReady);
    CHECK(status->models.at(0).error == "the server is draining");
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  server.process().Signal(SIGTERM);
  CHECK(server.process().Wait(std::chrono::seconds(60)) == 1);
  for (auto& call : calls) call.wait();
}

}  // namespace moed::testing
