// Models that change in a real server, through its admin plane: swapped under load over every transport without an error or an answer
// that is of two weights, added, removed and rolled back; and what a change may not do.
#include <catch2/catch.hpp>

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "tests/client/running_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Catch::Matchers::Contains;
using client::DType;
using client::Transport;

constexpr int64_t kHidden = 64, kRows = 7;

// A checkpoint whose weights are those of RcWeights times `factor`.
struct Folder {
  explicit Folder(float factor, int layers = 2, int64_t hidden = kHidden) {
    CheckpointBuilder builder;
    ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = layers, .hidden = hidden, .intermediate = 32};
    spec.weights = [plain = RcWeights(hidden, 32), factor](int expert, int projection, int64_t index) {
      return plain(expert, projection, index) * factor;
    };
    AddModel(spec, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
  }
  const std::string& path() const { return dir.path(); }
  TempDir dir;
};

// A server of model m with an admin socket.
struct Served {
  explicit Served(const Folder& folder, const std::vector<std::string>& more = {}) {
    std::vector<std::string> options = {"--admin-listen", admin(), "--deterministic"};
    options.insert(options.end(), more.begin(), more.end());
    server = std::make_unique<RunningServer>(std::vector<std::string>{"m=" + folder.path()}, options);
  }
  std::string admin() const { return "unix:" + sockets.path() + "/admin.sock"; }
  std::unique_ptr<client::MoeClient> Client(Transport transport = Transport::kAuto) const {
    auto client = client::MoeClient::Connect(server->unix_socket(), {.own_connection = true, .transport = transport});
    REQUIRE(client.ok());
    return *std::move(client);
  }
  Finished Change(const std::vector<std::string>& words) const {
    std::vector<std::string> arguments = {kMoectl, "--server", admin()};
    arguments.insert(arguments.end(), words.begin(), words.end());
    return RunToEnd(arguments);
  }

  TempDir sockets{TempDir::Use::kForSockets};
  std::unique_ptr<RunningServer> server;
};

absl::StatusOr<client::ForwardResult> Ask(client::MoeClient& client, const std::string& model = "m", int64_t rows = kRows) {
  const std::vector<uint8_t> bytes = client::FromFloats(DType::kF32, CaseHidden(rows, kHidden));
  client::ForwardCall call;
  call.model = model;
  call.layer = 1;
  call.hidden = {DType::kF32, rows, kHidden, bytes};
  return client.Forward(call);
}

std::string Answer(const Folder& folder, int64_t rows = kRows) {
  const Served served(folder);
  const auto client = served.Client();
  const auto result = Ask(*client, "m", rows);
  REQUIRE(result.ok());
  return result->data;
}

}  // namespace

TEST_CASE("Swaps under load: no error, and every answer is wholly of the weights that its generation names") {
  const Folder one(1.0f), two(0.5f);
  // Small calls, and large ones that are computed in several pieces.
  constexpr int64_t kLarge = 700;
  const std::string small[2] = {Answer(one), Answer(two)}, large[2] = {Answer(one, kLarge), Answer(two, kLarge)};
  REQUIRE(small[0] != small[1]);
  const Served served(one, {"--max-batch-tokens", "128"});
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0}, mixed{0}, answers{0};
  std::vector<std::thread> callers;
  for (const Transport transport : {Transport::kRpc, Transport::kSharedMemory, Transport::kRing, Transport::kRing}) {
    callers.emplace_back([&, transport] {
      const auto client = served.Client(transport);
      for (int i = 0; !stop; ++i) {
        const bool big = i % 3 == 0;
        const auto result = Ask(*client, "m", big ? kLarge : kRows);
        if (!result.ok()) {
          ++failed;
          WARN(result.status().ToString());
          continue;
        }
        mixed += result->data != (big ? large : small)[(result->generation - 1) % 2];
        ++answers;
      }
    });
  }
  for (int swap = 0; swap < 12; ++swap) {
    const int before = answers;
    const Finished done = served.Change({"swap", "m", (swap % 2 == 0 ? two : one).path()});
    CHECK(WaitFor([&] { return answers >= before + 2; }));
    INFO(done.err);
    CHECK(done.exit_code == 0);
    CHECK_THAT(done.out, Contains(std::to_string(swap + 2)));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(failed == 0);
  CHECK(mixed == 0);
  CHECK(answers > 20);
}

TEST_CASE("Models are added, rolled back and removed, and health and Hello follow") {
  const Folder one(1.0f), two(0.5f), wide(1.0f, 3, 128);
  const std::string y1 = Answer(one), y2 = Answer(two);
  const Served served(one);
  const auto client = served.Client();
  CHECK(served.Change({"rollback", "m"}).exit_code == 2);
  REQUIRE(served.Change({"load", "n", two.path()}).exit_code == 0);
  CHECK(Ask(*client, "n")->data == y2);
  CHECK(*client->CheckHealth("n/1") == client::Health::kServing);
  CHECK_THAT(served.Change({"load", "n", two.path()}).FirstError(), Contains("model name n is taken"));
  REQUIRE(served.Change({"swap", "m", two.path(), "--keep-previous"}).exit_code == 0);
  CHECK(Ask(*client)->data == y2);
  REQUIRE(served.Change({"rollback", "m"}).exit_code == 0);
  CHECK((Ask(*client)->data == y1 && Ask(*client)->generation == 3));
  REQUIRE(served.Change({"swap", "n", wide.path()}).exit_code == 0);
  CHECK(*client->CheckHealth("n/2") == client::Health::kServing);
  CHECK_THAT(std::string(Ask(*client, "n").status().message()), Contains("[M, 128]"));
  REQUIRE(served.Change({"unload", "n"}).exit_code == 0);
  CHECK(absl::IsNotFound(Ask(*client, "n").status()));
  CHECK(*client->CheckHealth("n") == client::Health::kServiceUnknown);
  CHECK(client->Status()->models.size() == 1);
}

TEST_CASE("Changes that cannot be made say why, and the weights stay") {
  const Folder one(1.0f);
  const std::string y1 = Answer(one);
  const Served served(one);
  const auto client = served.Client();
  CHECK_THAT(served.Change({"swap", "m", one.path() + "/none"}).FirstError(), Contains("none"));
  CHECK_THAT(served.Change({"swap", "other", one.path()}).FirstError(), Contains("NOT_FOUND"));
  CHECK_THAT(served.Change({"unload", "other"}).FirstError(), Contains("NOT_FOUND"));
  CHECK_THAT(served.Change({"load", "a/b", one.path()}).FirstError(), Contains("without space and '/'"));
  CHECK_THAT(served.Change({"load", "n", ""}).FirstError(), Contains("path"));
  CHECK((Ask(*client)->data == y1 && Ask(*client)->generation == 1));
  // The calls' own address takes no changes without admin tokens.
  const Finished refused = served.server->Moectl({"swap", "m", one.path()});
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.FirstError(), Contains("--admin-listen"));
}

TEST_CASE("With admin tokens the calls' own address takes changes, from who has one") {
  const Folder one(1.0f), two(0.5f);
  const TempDir files;
  const std::string admin = files.path() + "/admin", data = files.path() + "/data";
  REQUIRE(std::system(("echo admin-token-0123456789 > " + admin + "; echo other-token-0123456789 > " + data).c_str()) == 0);
  RunningServer server({"m=" + one.path()}, {"--admin-token-file", admin});
  CHECK_THAT(server.Moectl({"swap", "m", two.path()}).FirstError(), Contains("UNAUTHENTICATED"));
  CHECK_THAT(server.Moectl({"--token-file", data, "swap", "m", two.path()}).FirstError(), Contains("UNAUTHENTICATED"));
  CHECK(server.Moectl({"--token-file", admin, "swap", "m", two.path()}).exit_code == 0);
  CHECK(server.MoectlJson({"status"})["models"][0]["generation"] == 2);
}

TEST_CASE("Who was told that a change is made may begin the next one at once") {
  const Folder one(1.0f), two(0.5f);
  const Served served(one);
  const auto admin = client::MoeClient::Connect(served.admin(), {.transport = Transport::kRpc});
  REQUIRE(admin.ok());
  for (int i = 0; i < 40; ++i) {
    const auto status = (*admin)->SwapModel("m", i % 2 == 0 ? two.path() : one.path());
    INFO(i << ": " << status.status().ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("A drain ends a change, and a caller that goes away does") {
  const Folder one(1.0f), many(1.0f, 200);
  {
    const Served served(one);
    const auto swap = Process::Start({kMoectl, "--server", served.admin(), "swap", "m", many.path()});
    REQUIRE(WaitFor([&] { return served.server->process().Stdout().find("layer 0 loaded") != std::string::npos || !swap->Running(); }));
    swap->Signal(SIGKILL);
    REQUIRE(WaitFor([&] { return served.server->process().Stdout().find("failed after") != std::string::npos ||
                                 served.server->process().Stdout().find("done in") != std::string::npos; }));
    CHECK(Ask(*served.Client()).ok());
  }
  const Served served(one);
  const auto swap = Process::Start({kMoectl, "--server", served.admin(), "swap", "m", many.path()});
  REQUIRE(WaitFor([&] { return served.server->process().Stdout().find("layer 0 loaded") != std::string::npos || !swap->Running(); }));
  served.server->process().Signal(SIGTERM);
  CHECK(served.server->process().Wait(std::chrono::seconds(60)) == 0);
  CHECK(swap->Wait(std::chrono::seconds(60)).has_value());
}

}  // namespace moed::testing
