// What an operator sees of a running server: its metrics after calls of every kind, and its log.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/client/slow_model.h"
#include "tests/support/http_get.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;
using client::MoeClient;
using client::Transport;
using Json = nlohmann::json;

constexpr int64_t kHidden = 256;

std::string Model() { return CheckedInModel("ct-w4a16-g32-sym").path; }

// Series as they are written: name and labels, with the value.
class Scrape {
 public:
  explicit Scrape(const RunningServer& server) {
    const Json ready = Json::parse(std::ifstream(server.ready_file()));
    text_ = HttpGet(ready["metrics_address"].get<std::string>(), "/metrics");
    std::istringstream stream(text_);
    for (std::string line; std::getline(stream, line);) {
      const size_t space = line.rfind(' ');
      if (line.empty() || line[0] == '#' || space == std::string::npos) continue;
      CHECK(values_.emplace(line.substr(0, space), std::atof(line.c_str() + space)).second);  // each series once
    }
  }
  double operator[](const std::string& series) const {
    INFO(series);
    const auto found = values_.find(series);
    CHECK(found != values_.end());
    return found == values_.end() ? -1 : found->second;
  }
  bool Has(const std::string& series) const { return values_.count(series) > 0; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::map<std::string, double> values_;
};

RunningServer Serve(std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--metrics-listen", "127.0.0.1:0"});
  return RunningServer({"m=" + Model()}, more);
}

std::unique_ptr<MoeClient> Connect(const std::string& address, Transport transport) {
  auto client = MoeClient::Connect(address, {.own_connection = true, .transport = transport});
  REQUIRE(client.ok());
  return *std::move(client);
}

absl::Status Forward(MoeClient& client, int layer, int64_t rows, const std::string& model = "m", const std::string& id = "") {
  const std::vector<uint8_t> hidden(static_cast<size_t>(rows * kHidden) * 2, 0x3c);
  client::ForwardCall call;
  call.model = model;
  call.layer = layer;
  call.request_id = id;
  call.hidden = {client::DType::kBf16, rows, kHidden, hidden};
  return client.Forward(call).status();
}

std::string Ended(int layer, const std::string& transport, const std::string& code) {
  return "moed_forwards_total{model=\"m\",layer=\"" + std::to_string(layer) +
         "\",transport=\"" + transport + "\",code=\"" + code + "\"}";
}

}  // namespace

TEST_CASE("Calls of every transport and end are in the metrics as soon as they are answered") {
  const RunningServer server = Serve({"--expert-metrics"});
  const auto rpc = Connect(server.unix_socket(), Transport::kRpc);
  const auto session = Connect(server.unix_socket(), Transport::kSharedMemory);
  const auto ring = Connect(server.unix_socket(), Transport::kRing);
  for (int i = 0; i < 3; ++i) CHECK(Forward(*rpc, 1, 4).ok());
  for (int i = 0; i < 2; ++i) CHECK(Forward(*session, 1, 4).ok());
  CHECK(Forward(*ring, 2, 8).ok());
  CHECK_FALSE(Forward(*rpc, 7, 1).ok());
  CHECK_FALSE(Forward(*rpc, 1, 1, "no\"such\nmodel").ok());
  CHECK_FALSE(Forward(*ring, 7, 1).ok());
  client::ForwardCall bad;
  bad.model = "m";
  bad.layer = 1;
  const std::vector<uint8_t> narrow(8);
  bad.hidden = {client::DType::kBf16, 1, 4, narrow};
  CHECK_FALSE(rpc->Forward(bad).ok());

  const Scrape scrape(server);
  CHECK_THAT(scrape.text(), Contains("HTTP/1.1 200"));
  CHECK(scrape[Ended(1, "rpc", "OK")] == 3);
  CHECK(scrape[Ended(1, "session", "OK")] == 2);
  CHECK(scrape[Ended(2, "ring", "OK")] == 1);
  CHECK(scrape[Ended(1, "rpc", "INVALID_ARGUMENT")] == 1);
  CHECK(scrape["moed_forwards_total{transport=\"rpc\",code=\"NOT_FOUND\"}"] == 2);
  CHECK(scrape["moed_forwards_total{transport=\"ring\",code=\"NOT_FOUND\"}"] == 1);
  CHECK_FALSE(scrape.text().find("such") != std::string::npos);  // no name of a client's
  for (const char* stage : {"receive", "queue", "compute", "send", "total"}) {
    CHECK(scrape["moed_forward_stage_seconds_count{model=\"m\",stage=\"" + std::string(stage) + "\"}"] == 6);
  }
  CHECK(scrape["moed_forward_rows_sum{model=\"m\"}"] == 28);
  CHECK(scrape["moed_run_rows_sum{model=\"m\",layer=\"1\"}"] == 20);
  CHECK(scrape["moed_run_imbalance_ratio_count{model=\"m\",layer=\"2\"}"] == 1);
  CHECK(scrape.Has("moed_expert_rows_total{model=\"m\",layer=\"2\",expert=\"15\"}"));
  CHECK(scrape["moed_received_bytes_total{transport=\"session\"}"] > 2 * 4 * kHidden * 2);
  CHECK(scrape["moed_received_bytes_total{transport=\"ring\"}"] == 8 * kHidden * 2);
  CHECK(scrape["moed_sent_bytes_total{transport=\"ring\"}"] == 8 * kHidden * 2);
  CHECK(scrape["moed_sessions_open"] == 2);
  // A call gives its bytes back when its connection is done with it, which can be after the client has the answer.
  CHECK(WaitFor([&] { return Scrape(server)["moed_in_flight_bytes"] == 0; }));
  CHECK(scrape["moed_serving"] == 1);
  CHECK(scrape["moed_phase{phase=\"serving\"}"] == 1);
  CHECK(scrape["moed_model_generation{model=\"m\"}"] == 1);
  CHECK(scrape["moed_layer_state{model=\"m\",layer=\"2\",state=\"ready\"}"] == 1);
  CHECK(scrape["moed_layer_weights_bytes{model=\"m\",layer=\"1\"}"] > 0);
  CHECK_THAT(scrape.text(), Contains("moed_layer_backend_info{model=\"m\",layer=\"1\",backend=\"c"));
}

TEST_CASE("Items of a stream are forwards of their own, and one that is refused counts with its code") {
  const RunningServer server = Serve({"--client-rows", "100"});
  const auto stub = v1::Moe::NewStub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->ForwardStream(&context);
  const auto write = [&](int layer, int64_t rows) {
    v1::ForwardRequest request;
    request.set_layer(layer);
    request.mutable_hidden()->set_dtype(v1::DTYPE_F32);
    request.mutable_hidden()->add_shape(rows);
    request.mutable_hidden()->add_shape(kHidden);
    request.mutable_hidden()->set_data(std::string(static_cast<size_t>(rows * kHidden) * sizeof(float), '\0'));
    CHECK(stream->Write(request));
    v1::ForwardResponse response;
    CHECK(stream->Read(&response));
    return response.status().code();
  };
  CHECK(write(1, 4) == 0);
  CHECK(write(2, 8) == 0);
  CHECK(write(2, 101) == static_cast<int>(absl::StatusCode::kResourceExhausted));
  CHECK(write(9, 1) == static_cast<int>(absl::StatusCode::kNotFound));
  const Scrape scrape(server);
  CHECK(scrape[Ended(1, "stream", "OK")] == 1);
  CHECK(scrape[Ended(2, "stream", "OK")] == 1);
  CHECK(scrape[Ended(2, "stream", "RESOURCE_EXHAUSTED")] == 1);
  CHECK(scrape["moed_forwards_total{transport=\"stream\",code=\"NOT_FOUND\"}"] == 1);
  CHECK(scrape["moed_forward_drops_total{reason=\"client\"}"] == 1);
  CHECK(scrape["moed_received_bytes_total{transport=\"stream\"}"] > 113 * kHidden * 4);
  CHECK(scrape["moed_sent_bytes_total{transport=\"stream\"}"] > 12 * kHidden * 4);
  CHECK(stream->WritesDone());
  CHECK(stream->Finish().ok());
}

TEST_CASE("Drops are counted by their reason, and so is what waits") {
  TempDir dir;
  WriteSlowModel(dir.path());
  std::vector<std::string> options = SlowModelOptions();
  options.insert(options.end(), {"--metrics-listen", "127.0.0.1:0", "--queue", "1", "--client-rows", "1000"});
  const RunningServer server({"m=" + dir.path()}, options);
  const auto client = Connect(server.tcp(), Transport::kRpc), other = Connect(server.tcp(), Transport::kRpc);
  const auto drops = [&](const std::string& reason) {
    return Scrape(server)["moed_forward_drops_total{reason=\"" + reason + "\"}"];
  };
  CHECK(absl::IsResourceExhausted(ForwardZeros(*client, 1001, std::chrono::minutes(1))));
  CHECK(drops("client") == 1);
  auto running = std::async(std::launch::async, [&] { return ForwardZeros(*client, 900, std::chrono::minutes(10)); });
  const auto runs = [&] {
    const auto status = other->Status();
    return status.ok() && status->queue.accepted == 1 && status->queue.waiting == 0;
  };
  REQUIRE(WaitFor(runs));
  CHECK(Scrape(server)["moed_in_flight_bytes"] > 900 * 1024 * 2);
  CHECK(absl::IsDeadlineExceeded(ForwardZeros(*other, 1, std::chrono::milliseconds(100))));
  auto waiting = std::async(std::launch::async, [&] { return ForwardZeros(*other, 3, std::chrono::minutes(10)); });
  const auto waits = [&] {
    const Scrape scrape(server);
    return scrape["moed_queue_rows"] == 3 && scrape["moed_queue_calls"] == 1;
  };
  CHECK(WaitFor(waits));
  CHECK(absl::IsResourceExhausted(ForwardZeros(*other, 1, std::chrono::minutes(1))));
  CHECK(drops("queue") == 1);
  CHECK(running.get().ok());
  CHECK(waiting.get().ok());
  CHECK(drops("expired") + drops("cancelled") >= 1);
  CHECK(drops("bytes") == 0);
}

TEST_CASE("A model that is swapped goes on counting, one that is added or unloaded comes and goes with its series") {
  const RunningServer server = Serve({"--admin-listen", "127.0.0.1:0"});
  const std::string admin = Json::parse(std::ifstream(server.ready_file()))["admin_address"];
  const auto change = [&](const std::vector<std::string>& words) {
    std::vector<std::string> arguments = {kMoectl, "--server", admin};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const Finished finished = RunToEnd(arguments);
    INFO(finished.err);
    CHECK(finished.exit_code == 0);
  };
  const auto client = Connect(server.tcp(), Transport::kRpc);
  CHECK(Forward(*client, 1, 4).ok());
  change({"swap", "m", Model()});
  CHECK(Forward(*client, 1, 4).ok());
  CHECK(Scrape(server)[Ended(1, "rpc", "OK")] == 2);
  CHECK(Scrape(server)["moed_model_generation{model=\"m\"}"] == 2);
  change({"load", "n", Model()});
  const std::string of_new = "moed_forward_seconds_count{model=\"n\",layer=\"1\"}";
  CHECK(Forward(*client, 1, 4, "n").ok());
  CHECK(Scrape(server)[of_new] == 1);
  change({"unload", "n"});
  CHECK(WaitFor([&] { return !Scrape(server).Has(of_new); }));
  CHECK_THAT(Scrape(server).text(), !Contains("model=\"n\""));
  CHECK(Scrape(server)[Ended(1, "rpc", "OK")] == 2);
}

TEST_CASE("An address of metrics that another server has is refused at start, with both named") {
  const RunningServer first = Serve();
  const std::string address = Json::parse(std::ifstream(first.ready_file()))["metrics_address"];
  CHECK_THAT(address, Catch::Matchers::StartsWith("127.0.0.1:"));
  const Finished taken = RunToEnd({kMoed, "serve", "--model", Model(), "--listen", "127.0.0.1:0", "--metrics-listen", address});
  CHECK(taken.exit_code == 2);
  CHECK_THAT(taken.FirstError(), Contains("--metrics-listen") && Contains(address) && Contains("in use"));
}

TEST_CASE("Options of metrics that cannot be are refused at start") {
  const auto error = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {kMoed, "serve", "--model", Model(), "--listen", "127.0.0.1:0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = RunToEnd(arguments);
    CHECK(finished.exit_code == 2);
    return finished.FirstError();
  };
  CHECK_THAT(error({"--expert-metrics"}), Contains("--expert-metrics: wanted --metrics-listen beside it"));
  CHECK_THAT(error({"--metrics-listen", "unix:/tmp/x"}), Contains("--metrics-listen: wanted HOST:PORT"));
  CHECK_THAT(error({"--metrics-listen", "nonsense"}), Contains("--metrics-listen: wanted HOST:PORT"));
  CHECK_THAT(error({"--log-format", "xml"}), Contains("--log-format: wanted one of text, json"));
}

TEST_CASE("With --log-format json every line on stdout is one object, and a call's has its request id, code and durations") {
  RunningServer server = Serve({"--log-format", "json", "--log-level", "debug"});
  const auto rpc = Connect(server.tcp(), Transport::kRpc), ring = Connect(server.unix_socket(), Transport::kRing);
  CHECK(Forward(*rpc, 1, 4, "m", "call-1\n{}").ok());
  CHECK(Forward(*ring, 2, 4, "m", "call-2").ok());
  CHECK_FALSE(Forward(*rpc, 9, 4, "m", "call-3").ok());
  server.process().Signal(SIGTERM);
  REQUIRE(server.process().Wait(std::chrono::minutes(1)) == 0);
  std::map<std::string, Json> calls;
  std::istringstream stream(server.process().Stdout());
  for (std::string text; std::getline(stream, text);) {
    const Json line = Json::parse(text, nullptr, false);
    INFO(text);
    REQUIRE(line.is_object());
    for (const char* key : {"time", "level", "message"}) CHECK(line[key].is_string());
    CHECK(line["time"].get<std::string>().size() == std::string("2026-01-01T00:00:00.000Z").size());
    if (line.contains("request_id") && line["request_id"] != "") calls[line["request_id"]] = line;
  }
  REQUIRE(calls.size() == 3);
  CHECK(calls["call-1?{}"]["code"] == "OK");
  CHECK(calls["call-1?{}"]["model"] == "m");
  CHECK(calls["call-1?{}"]["layer"] == 1);
  CHECK(calls["call-1?{}"]["level"] == "debug");
  for (const char* key : {"total_us", "receive_us", "queue_us", "compute_us", "send_us"}) {
    CHECK(calls["call-1?{}"][key].is_number());
  }
  CHECK(calls["call-2"]["method"] == "Forward by ring");
  CHECK(calls["call-3"]["code"] == "NOT_FOUND");
  CHECK_FALSE(calls["call-3"].contains("model"));
}

}  // namespace moed::testing
