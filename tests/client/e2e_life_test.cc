// A server's life as its operator sees it, with real moed and moectl processes: options that are refused, health, what
// status and explain tell, smoke and bench, and the end by SIGTERM.
#include <signal.h>
#include <stdlib.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "kernels/backends.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Json = nlohmann::json;

const std::set<int> kLayers = {1, 2};  // of the deepseek checkpoint; layer 0 is dense

std::string Deepseek() { return CheckedInModel("ct-w4a16-g32-sym").path; }
std::string Mixtral() { return CheckedInModel("gptq-int4-g32-sym").path; }

std::set<int> LayersOf(const Json& rows) {
  std::set<int> layers;
  for (const Json& row : rows) layers.insert(row["layer"].get<int>());
  return layers;
}

void CheckRefusedStart(const std::vector<std::string>& options, const std::vector<std::string>& in_first_line) {
  std::vector<std::string> arguments = {kMoed, "serve"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  const Finished finished = RunToEnd(arguments);
  INFO("stderr: " << finished.err);
  CHECK(finished.exit_code == 2);
  for (const std::string& text : in_first_line) CHECK(finished.FirstError().find(text) != std::string::npos);
}

// A folder whose name is short enough for a UNIX socket in it.
struct SocketFolder {
  std::string path = "/tmp/moed-XXXXXX";
  SocketFolder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~SocketFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string socket() const { return path + "/moed.sock"; }
  std::string ready() const { return path + "/ready.json"; }
};

}  // namespace

TEST_CASE("Start options that cannot be are refused with exit code 2 and the error first") {
  const std::vector<std::string> good = {"--model", Mixtral(), "--listen", "127.0.0.1:0"};
  const auto with = [&good](const std::vector<std::string>& more) {
    std::vector<std::string> all = good;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  CheckRefusedStart(with({"--frob"}), {"--frob"});
  CheckRefusedStart(with({"--policy", "require:frob"}), {"frob"});
  CheckRefusedStart(with({"--policy", "frob"}), {"frob"});
  CheckRefusedStart(with({"--threads", "x"}), {"threads", "x"});
  CheckRefusedStart(with({"--config", "/nonexistent.json"}), {"/nonexistent.json"});
  CheckRefusedStart({"--model", "/nonexistent/model", "--listen", "127.0.0.1:0"}, {"/nonexistent/model"});
  CheckRefusedStart({"--model", Mixtral(), "--listen", "nonsense"}, {"nonsense"});
  CheckRefusedStart({"--listen", "127.0.0.1:0"}, {"model"});
  const TempDir empty;
  CheckRefusedStart({"--model", empty.path(), "--listen", "127.0.0.1:0"}, {empty.path()});
}

TEST_CASE("status lists models and layers with the contracted keys") {
  const RunningServer server({"deep=" + Deepseek(), "mix=" + Mixtral()});
  const Json status = server.MoectlJson({"status"});
  REQUIRE(status["models"].size() == 2);
  for (const Json& model : status["models"]) {
    CHECK(model["state"] == "ready");
    CHECK(model["generation"].is_number_unsigned());
    REQUIRE(!model["layers"].empty());
    for (const Json& layer : model["layers"]) {
      CHECK(layer["state"] == "ready");
      CHECK(!layer["scheme"].get<std::string>().empty());
      CHECK(!layer["executed_scheme"].get<std::string>().empty());
      CHECK(!layer["backend"].get<std::string>().empty());
      CHECK(layer["bytes"].get<uint64_t>() > 0);
    }
  }
  const Json one = server.MoectlJson({"--model", "deep", "status"});
  REQUIRE(one["models"].size() == 1);
  CHECK(one["models"][0]["name"] == "deep");
  CHECK(LayersOf(one["models"][0]["layers"]) == kLayers);
  const Finished unknown = server.Moectl({"--model", "frob", "status"});
  CHECK(unknown.exit_code == 2);
  CHECK(unknown.FirstError().find("NOT_FOUND") != std::string::npos);
  CHECK(server.Moectl({"status"}).out.find("deep") != std::string::npos);
}

TEST_CASE("A call to a server with two models needs the model's name") {
  const RunningServer server({"deep=" + Deepseek(), "mix=" + Mixtral()});
  const std::vector<std::string> forward = {
      "forward", "--layer", "0", "--input", CheckedInModel("gptq-int4-g32-sym").GoldenFile(), "--hidden", "0.x"};
  const Finished nameless = server.Moectl(forward);
  CHECK(nameless.exit_code == 2);
  std::vector<std::string> named = forward;
  named.insert(named.end(), {"--model", "mix", "--expect", "0.y_block", "--max-rel", "0.05"});
  const Json report = server.MoectlJson(named);
  CHECK(report["passed"] == true);
  CHECK(server.Moectl({"bench", "--layer", "0", "--seconds", "0.1"}).exit_code == 2);
}

TEST_CASE("explain has for every layer the choice and every other backend with its reasons") {
  const RunningServer server({Deepseek()}, {"--policy", "require:reference"});
  const Json explanation = server.MoectlJson({"explain"});
  CHECK(!explanation["device"].get<std::string>().empty());
  CHECK(explanation["fits"] == true);
  CHECK(LayersOf(explanation["layers"]) == kLayers);
  for (const Json& layer : explanation["layers"]) {
    CHECK(layer["choice"] == "reference");
    CHECK(!layer["scheme"].get<std::string>().empty());
    CHECK(layer["bytes"].is_number_unsigned());
    CHECK(layer["workspace_bytes"].is_number_unsigned());
    CHECK(layer["backends"].size() >= 2);
    for (const Json& backend : layer["backends"]) {
      CHECK(!backend["name"].get<std::string>().empty());
      if (backend["ok"] == false) CHECK(!backend["reasons"].empty());
      for (const Json& reason : backend["reasons"]) {
        CHECK(!reason["code"].get<std::string>().empty());
        CHECK(!reason["text"].get<std::string>().empty());
      }
    }
  }
  CHECK(LayersOf(server.MoectlJson({"explain", "--layer", "2"})["layers"]) == std::set<int>{2});
  CHECK(server.Moectl({"explain"}).exit_code == 0);
}

TEST_CASE("smoke checks every layer against the reference") {
  const RunningServer server({Deepseek()});
  const Json smoke = server.MoectlJson({"smoke", "--tokens", "5", "--seed", "7"});
  CHECK(smoke["passed"] == true);
  CHECK(LayersOf(smoke["rows"]) == kLayers);
  for (const Json& row : smoke["rows"]) {
    CHECK(row["passed"] == true);
    CHECK(row["tokens"] == 5);
    CHECK(row["max_rel"].get<double>() <= row["bound"].get<double>());
  }
  const Finished table = server.Moectl({"smoke"});
  CHECK(table.exit_code == 0);
  CHECK(table.out.find("passed") != std::string::npos);
}

TEST_CASE("bench reports a row per size with latencies and the server's part") {
  const RunningServer server({Deepseek()});
  for (bool random_ids : {false, true}) {
    std::vector<std::string> arguments = {"bench",         "--layer", "1",         "--tokens", "1,8",
                                          "--concurrency", "2",       "--seconds", "0.3"};
    if (random_ids) arguments.push_back("--random-ids");
    const Json bench = server.MoectlJson(arguments);
    CHECK(bench["passed"] == true);
    REQUIRE(bench["rows"].size() == 2);
    for (const Json& row : bench["rows"]) {
      CHECK(row["calls"].get<int64_t>() > 0);
      CHECK(row["errors"] == 0);
      CHECK(row["tokens_per_s"].get<double>() > 0);
      CHECK(row["p50_us"].get<double>() <= row["p90_us"].get<double>());
      CHECK(row["p90_us"].get<double>() <= row["p99_us"].get<double>());
      CHECK(row["p99_us"].get<double>() <= row["p999_us"].get<double>());
      CHECK(row["server_p50_us"].get<double>() <= row["p999_us"].get<double>());
      CHECK(row["transport_p50_us"].is_number());
    }
    CHECK(bench["rows"][1]["tokens"] == 8);
  }
  const Finished wrong = server.Moectl({"bench", "--layer", "0", "--seconds", "0.1"});
  CHECK(wrong.exit_code == 2);
  CHECK(wrong.FirstError().find("1, 2") != std::string::npos);
}

TEST_CASE("forward writes its output and routing to a file") {
  const GoldenModel model = CheckedInModel("ct-w4a16-g32-sym");
  const RunningServer server({model.path});
  const TempDir folder;
  const std::string file = folder.File("out.safetensors");
  const Json report =
      server.MoectlJson({"forward", "--layer", "1", "--input", model.GoldenFile(), "--hidden", "1.x", "--ids", "1.topk_ids",
                         "--weights", "1.topk_weights", "--dtype", "bf16", "--output", file});
  CHECK(report["max_rel"].is_null());
  const GoldenTensor output = ReadGolden(file, "output");
  CHECK(output.shape == std::vector<int64_t>{48, 256});
  CHECK(ReadGolden(file, "topk_ids").values == ReadGolden(model.GoldenFile(), "1.topk_ids").values);
  CHECK(ReadGolden(file, "topk_weights").values == ReadGolden(model.GoldenFile(), "1.topk_weights").values);
  // What was written passes as an input and as an expectation of the next call.
  CHECK(server.Moectl({"forward", "--layer", "1", "--input", file, "--hidden", "output", "--expect", "output"}).exit_code ==
        0);
}

TEST_CASE("Health is SERVING for the server, its models and layers, and for nothing else") {
  const RunningServer server({"deep=" + Deepseek()});
  for (const char* service : {"", "deep", "deep/1", "deep/2"}) {
    INFO("service \"" << service << "\"");
    CHECK(server.MoectlJson({"health", "--service", service})["status"] == "SERVING");
  }
  for (const char* service : {"frob", "deep/0", "deep/99"}) {
    INFO("service \"" << service << "\"");
    CHECK(server.MoectlJson({"health", "--service", service}, 1)["status"] == "SERVICE_UNKNOWN");
  }
  const Finished plain = server.Moectl({"health"});
  CHECK(plain.exit_code == 0);
  CHECK(plain.out == "SERVING\n");
}

TEST_CASE("moectl reaches a server over its UNIX socket and by MOED_SERVER") {
  const RunningServer server({Deepseek()});
  CHECK(RunToEnd({kMoectl, "--server", server.unix_socket(), "health"}).exit_code == 0);
  CHECK(RunToEnd({kMoectl, "health"}, {"MOED_SERVER=" + server.unix_socket()}).exit_code == 0);
}

TEST_CASE("SIGTERM lets the calls under way finish, answers them, and exits with 0") {
  RunningServer server({Mixtral()}, {"--policy", "require:reference", "--threads", "1"});
  const std::string address = server.tcp();
  const auto idle = client::MoeClient::Connect(address, {.own_connection = true});
  REQUIRE(idle.ok());
  REQUIRE((*idle)->CheckHealth().ok());  // a connection that stays open without calls must not hold the end up
  constexpr int64_t kRows = 512;         // long enough to be under way when the signal comes
  const std::vector<uint8_t> hidden(kRows * 256 * 2, 0);
  const auto forward = [&address, &hidden] {
    const auto client = client::MoeClient::Connect(address, {.own_connection = true});
    if (!client.ok()) return client.status();
    client::ForwardCall call;
    call.hidden = {client::DType::kBf16, kRows, 256, hidden};
    return (*client)->Forward(call).status();
  };
  REQUIRE(forward().ok());
  std::vector<std::future<absl::Status>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(std::async(std::launch::async, forward));
  const auto accepted = [&idle] {
    const absl::StatusOr<client::ServerStatus> status = (*idle)->Status();
    return status.ok() ? status->queue.accepted : 0;
  };
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (accepted() < 5 && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(accepted() == 5);  // all four are with the server, or already answered
  server.process().Signal(SIGTERM);
  for (auto& call : calls) {
    const absl::Status status = call.get();
    INFO(status.ToString());
    CHECK(status.ok());
  }
  CHECK(server.process().Wait(std::chrono::seconds(60)) == 0);
  CHECK(forward().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("Under load SIGTERM answers every call, with a result or UNAVAILABLE, and exits with 0") {
  RunningServer server({Deepseek()});
  const std::string address = server.unix_socket();
  const std::vector<uint8_t> hidden(4 * 256 * 2, 0);
  std::vector<std::future<std::pair<int, absl::Status>>> threads;
  for (int t = 0; t < 4; ++t) {
    threads.push_back(std::async(std::launch::async, [&address, &hidden] {
      const auto client = client::MoeClient::Connect(address, {.own_connection = true});
      int answered = 0;
      absl::Status status = client.status();
      while (status.ok()) {  // until the server refuses
        client::ForwardCall call;
        call.layer = 1;
        call.hidden = {client::DType::kBf16, 4, 256, hidden};
        status = (*client)->Forward(call).status();
        if (status.ok()) ++answered;
      }
      return std::make_pair(answered, status);
    }));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  server.process().Signal(SIGTERM);
  for (auto& thread : threads) {
    const auto [answered, last] = thread.get();
    INFO(last.ToString());
    CHECK(answered > 0);
    CHECK(last.code() == absl::StatusCode::kUnavailable);
  }
  CHECK(server.process().Wait(std::chrono::seconds(60)) == 0);
}

TEST_CASE("A client that asks without pause never sees SERVING before the ready file, nor another answer after it") {
  for (int round = 0; round < 5; ++round) {
    const SocketFolder folder;
    const auto server = Process::Start(
        {kMoed, "serve", "--model", Deepseek(), "--listen", "unix:" + folder.socket(), "--ready-file", folder.ready()});
    REQUIRE(server != nullptr);
    REQUIRE(WaitFor([&] { return Exists(folder.socket()); }));
    const auto client = client::MoeClient::Connect("unix:" + folder.socket(), {.own_connection = true});
    REQUIRE(client.ok());
    int wrong = 0;
    REQUIRE(WaitFor([&] {
      const bool was_ready = Exists(folder.ready());
      const auto health = (*client)->CheckHealth();
      if (!health.ok()) return false;  // not listening yet
      const bool serving = *health == client::Health::kServing;
      if (serving ? !Exists(folder.ready()) : was_ready) ++wrong;
      return serving;
    }));
    CHECK(wrong == 0);
  }
}

TEST_CASE("A server that finds its address taken leaves the other one's ready file alone") {
  const RunningServer server({Deepseek()});
  CheckRefusedStart({"--model", Deepseek(), "--listen", server.tcp(), "--ready-file", server.ready_file()}, {server.tcp()});
  CHECK(Exists(server.ready_file()));
}

TEST_CASE("moed --version prints the version, then the CUDA part of its build") {
  const Finished finished = RunToEnd({kMoed, "--version"});
  CHECK(finished.exit_code == 0);
  CHECK(finished.out == "moed 0.1.0\n" + CudaBuild() + "\n");
}

TEST_CASE("A model's name that is not UTF-8 is refused by moectl in its first line on stderr") {
  const RunningServer server({Deepseek()});
  for (const char* name : {"\xff", "a\xc3", "\xed\xa0\x80", "\xc0\x80"}) {
    const Finished finished = server.Moectl({"--model", name, "status"});
    INFO(finished.err);
    CHECK(finished.exit_code == 2);
    CHECK(finished.FirstError().rfind("moectl: --model: wanted text in UTF-8", 0) == 0);
  }
  const Finished unknown = server.Moectl({"--model", "modèle-模型-🙂", "status"});
  CHECK(unknown.exit_code == 2);
  CHECK(unknown.FirstError().find("NOT_FOUND") != std::string::npos);
}

}  // namespace moed::testing
