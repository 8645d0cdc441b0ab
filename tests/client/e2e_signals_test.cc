// Stop signals: a real moed that is told to stop while it computes.
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "tests/client/running_server.h"
#include "tests/client/slow_model.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

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
  CHECK(WaitFor([&] {  // one is with the server: what takes long from here on is the queue
    const auto status = (*probe)->Status();
    return status.ok() && status->queue.accepted > 0;
  }));
  CHECK(WaitFor([&] { return absl::IsDeadlineExceeded(ForwardZeros(**probe, 1, std::chrono::milliseconds(100))); }));
  return calls;
}

// A server of the slow model in `folder`.
RunningServer Serve(const TempDir& folder, const std::vector<std::string>& more = {}) {
  WriteSlowModel(folder.path());
  std::vector<std::string> options = SlowModelOptions();
  options.insert(options.end(), more.begin(), more.end());
  return RunningServer({folder.path()}, options);
}

}  // namespace

TEST_CASE("A stop signal that arrives twice at once counts once, and the ready file goes when the drain begins") {
  const TempDir folder;
  RunningServer server = Serve(folder, {"--grace", "3600"});  // enough on any machine
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

TEST_CASE("B65: A drain that takes longer than the grace time cancels what is left and exits with 0") {
  const TempDir folder;
  RunningServer server = Serve(folder, {"--grace", "2"});
  const auto begin = std::chrono::steady_clock::now();
  auto calls = StartLongCalls(server, 40);  // more than twenty seconds of work
  const auto signalled = std::chrono::steady_clock::now();
  server.process().Signal(SIGTERM);
  CHECK(server.process().Wait(std::chrono::minutes(2)) == 0);
  const auto ended = std::chrono::steady_clock::now();
  int cut = 0;
  for (auto& call : calls) {
    const absl::Status status = call.get();
    CHECK((status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status)));
    cut += !status.ok();
  }
  CHECK(cut > 0);
  CHECK(ended - signalled >= std::chrono::milliseconds(1900));
  CHECK(ended - signalled < std::chrono::seconds(10));  // less than the work that was left
  std::printf("grace 2 s: ended after %.2f s, %d of %zu calls cut; they began %.2f s before the signal\n",
              std::chrono::duration<double>(ended - signalled).count(), cut, calls.size(),
              std::chrono::duration<double>(signalled - begin).count());
  CHECK_THAT(server.process().Stdout(), Catch::Matchers::Contains("--grace: 2 s were not enough"));
}

TEST_CASE("B65: A drain is over as soon as its calls are, however long the grace time, with an idle connection held open") {
  const TempDir folder;
  RunningServer server = Serve(folder, {"--grace", "3600"});
  const auto idle = client::MoeClient::Connect(server.tcp(), {.own_connection = true});
  REQUIRE(idle.ok());
  REQUIRE((*idle)->CheckHealth().ok());
  auto calls = StartLongCalls(server, 2);
  server.process().Signal(SIGTERM);
  CHECK(WaitFor([&] {
    const auto health = (*idle)->CheckHealth();
    return health.ok() && *health == client::Health::kNotServing;
  }));
  CHECK(absl::IsUnavailable(ForwardZeros(**idle, 1, std::chrono::minutes(1))));
  int finished = 0;
  for (auto& call : calls) {  // one that was not yet with the server is turned away
    const absl::Status status = call.get();
    finished += status.ok();
    CHECK((status.ok() || absl::IsUnavailable(status)));
  }
  CHECK(finished > 0);
  CHECK(server.process().Wait(std::chrono::minutes(2)) == 0);
}

}  // namespace moed::testing
