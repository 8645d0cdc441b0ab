// Record and replay through the real programs: a server records calls of every transport and kind, the same backend repeats them to
// the bit and another within its bound, a wrong recorded output is found and named, and what is no recording is refused by name.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <catch2/catch.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "engine/recorded_call.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/http_get.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

namespace fs = std::filesystem;
namespace v1 = moe::v1;
using Catch::Matchers::Contains;
using client::DType;
using client::MoeClient;
using client::Transport;
using Json = nlohmann::json;

constexpr int64_t kHidden = 256, kRows = 5;
constexpr int kExperts = 16;

std::string Model() { return CheckedInModel("ct-w4a16-g32-sym").path; }

std::vector<std::string> RecordOptions(const std::string& folder, std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--record", folder, "--record-rate", "1", "--deterministic"});
  return more;
}

// Changes one byte of the first tensor of a file whose name has both texts.
void ChangeByteOf(const std::string& layer, const std::string& kind, const std::string& path) {
  uint64_t at = 0;
  {
    const auto file = SafetensorsFile::Open(path);
    REQUIRE(file.ok());
    for (const auto& [name, info] : (*file)->tensors()) {
      if (name.find(layer) != std::string::npos && name.find(kind) != std::string::npos) at = info.begin;
    }
  }
  REQUIRE(at > 0);
  std::string bytes = ReadFile(path);
  bytes[at] = static_cast<char>(bytes[at] ^ 0x11);
  fs::remove(path);  // the copy may not be writable
  WriteFile(path, bytes);
}

std::vector<std::string> Files(const std::string& folder) {
  const auto files = FindRecordings({folder});
  REQUIRE(files.ok());
  return *files;
}

RecordedCall Read(const std::string& file) {
  auto call = ReadRecordedCall(file);
  INFO(call.status().ToString());
  REQUIRE(call.ok());
  return *std::move(call);
}

std::unique_ptr<MoeClient> Connect(const std::string& address, Transport transport) {
  auto client = MoeClient::Connect(address, {.own_connection = true, .transport = transport});
  REQUIRE(client.ok());
  return *std::move(client);
}

// What calls are made of.
struct Values {
  Values() {
    std::mt19937 random(7);
    std::normal_distribution<float> value;
    for (int64_t i = 0; i < kRows * kHidden; ++i) x.push_back(value(random));
    for (int64_t i = 0; i < kRows * kExperts; ++i) logits.push_back(value(random));
    for (int64_t i = 0; i < kRows * 2; ++i) ids.push_back(static_cast<int32_t>(i * 5 % kExperts));
    ids[3] = -1;
    weights.assign(ids.size(), 0.5f);
    bf16 = client::FromFloats(DType::kBf16, x);
    f16 = client::FromFloats(DType::kF16, x);
    f8 = client::PackRows(DType::kF8E4m3, x, kHidden);
    i8 = client::PackRows(DType::kI8, x, kHidden);
  }
  std::vector<float> x, logits, weights;
  std::vector<int32_t> ids;
  std::vector<uint8_t> bf16, f16;
  client::PackedRows f8, i8;
};

// Calls of every dtype and routing, with and without slots.
std::vector<client::ForwardCall> Calls(const Values& values) {
  std::vector<client::ForwardCall> calls(5);
  calls[0].hidden = {DType::kBf16, kRows, kHidden, values.bf16};
  calls[1].hidden = {DType::kF16, kRows, kHidden, values.f16};
  calls[1].num_experts = kExperts, calls[1].router_logits = values.logits;
  calls[1].output_dtype = DType::kF32;
  calls[2].hidden = {DType::kF8E4m3, kRows, kHidden, values.f8.codes};
  calls[2].hidden_scales = values.f8.scales;
  calls[2].routed_only = true;
  calls[3].hidden = {DType::kI8, kRows, kHidden, values.i8.codes};
  calls[3].hidden_scales = values.i8.scales;
  calls[3].per_slot = true;
  calls[4].hidden = {DType::kBf16, kRows, kHidden, values.bf16};
  for (const int by_ids : {3, 4}) calls[by_ids].top_k = 2, calls[by_ids].ids = values.ids, calls[by_ids].weights = values.weights;
  return calls;
}

// Sends them all by `transport`; layers 1 and 2 in turn.
void SendCalls(const std::string& address, Transport transport, const std::string& id) {
  const Values values;
  const auto client = Connect(address, transport);
  int number = 0;
  for (client::ForwardCall& call : Calls(values)) {
    call.layer = 1 + number % 2;
    call.request_id = id + std::to_string(number++);
    const auto result = client->Forward(call);
    INFO(result.status().ToString());
    CHECK(result.ok());
  }
}

// One call by a stream, and one that is refused.
void SendStream(const std::string& address) {
  const auto stub = v1::Moe::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->ForwardStream(&context);
  const Values values;
  for (const int layer : {1, 9}) {
    v1::ForwardRequest request;
    request.set_layer(layer);
    request.set_request_id("stream");
    request.mutable_hidden()->set_dtype(v1::DTYPE_F32);
    request.mutable_hidden()->add_shape(kRows);
    request.mutable_hidden()->add_shape(kHidden);
    request.mutable_hidden()->set_data(values.x.data(), values.x.size() * sizeof(float));
    CHECK(stream->Write(request));
    v1::ForwardResponse response;
    CHECK(stream->Read(&response));
    CHECK((response.status().code() == 0) == (layer == 1));
  }
  CHECK(stream->WritesDone());
  CHECK(stream->Finish().ok());
}

// A folder of recordings of every transport: 3 x 5 calls and one by a stream.
void Record(const std::string& folder) {
  RunningServer server({"m=" + Model()}, RecordOptions(folder));
  SendCalls(server.unix_socket(), Transport::kRpc, "rpc-");
  SendCalls(server.unix_socket(), Transport::kSharedMemory, "session-");
  SendCalls(server.unix_socket(), Transport::kRing, "ring-");
  SendStream(server.tcp());
  server.process().Signal(SIGTERM);
  REQUIRE(server.process().Wait(std::chrono::minutes(1)) == 0);
}

Finished Replay(const std::string& folder, std::vector<std::string> more) {
  std::vector<std::string> arguments = {kMoed, "replay", folder, "--checkpoint", Model()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunToEnd(arguments);
}

Json ReplayJson(const std::string& folder, std::vector<std::string> more, int exit_code = 0) {
  more.push_back("--json");
  const Finished finished = Replay(folder, more);
  INFO("stdout: " << finished.out << "\nstderr: " << finished.err);
  REQUIRE(finished.exit_code == exit_code);
  Json document = Json::parse(finished.out, nullptr, false);
  REQUIRE(document.is_object());
  return document;
}

// Writes `call` with one element of row `row` of its output made wrong.
void PlantError(RecordedCall call, int64_t row, const std::string& path) {
  REQUIRE(call.output_dtype == StDtype::kBf16);
  const size_t at = static_cast<size_t>(row * call.columns) * 2;
  call.output[at] = 0x00, call.output[at + 1] = 0x44;  // 512
  REQUIRE(WriteRecordedCall(path, call).ok());
}

}  // namespace

TEST_CASE("Calls of every transport are recorded as they came; the same backend repeats them to the bit, another within bounds") {
  TempDir dir;
  Record(dir.path());
  const std::vector<std::string> files = Files(dir.path());
  REQUIRE(files.size() == 16);
  std::multiset<std::string> transports;
  const Values values;
  const std::vector<client::ForwardCall> calls = Calls(values);
  std::string backend;
  for (const std::string& file : files) {
    const RecordedCall recorded = Read(file);
    backend = recorded.backend;
    transports.insert(recorded.transport);
    CHECK((recorded.model == "m" && recorded.rows == kRows && recorded.deterministic && recorded.generation == 1));
    CHECK(recorded.end_expert == kExperts);
    if (recorded.transport == "stream") continue;
    const client::ForwardCall& sent = calls[static_cast<size_t>(recorded.request_id.back() - '0')];
    CHECK(std::equal(sent.hidden.data.begin(), sent.hidden.data.end(), recorded.hidden.begin(), recorded.hidden.end()));
    CHECK(std::equal(sent.hidden_scales.begin(), sent.hidden_scales.end(), recorded.scales.begin(), recorded.scales.end()));
    CHECK(std::equal(sent.ids.begin(), sent.ids.end(), recorded.ids.begin(), recorded.ids.end()));
    CHECK(std::equal(sent.weights.begin(), sent.weights.end(), recorded.weights.begin(), recorded.weights.end()));
    CHECK(std::equal(sent.router_logits.begin(), sent.router_logits.end(), recorded.logits.begin(), recorded.logits.end()));
    CHECK(recorded.per_slot == sent.per_slot);
    CHECK((recorded.routed_only == sent.routed_only || sent.per_slot));
  }
  for (const char* transport : {"rpc", "session", "ring"}) CHECK(transports.count(transport) == 5);
  CHECK(transports.count("stream") == 1);

  const std::vector<std::string> backends = {"--backends", backend == "cpu_generic" ? backend : backend + ",cpu_generic"};
  const Json report = ReplayJson(dir.path(), {backends[0], backends[1], "--bound", "0.01", "--repeat", "3"});
  CHECK(report["calls"] == 16);
  CHECK(report["passed"] == true);
  const int64_t rows = 16 * kRows + 3 * kRows;  // a call per slot has two rows of output for each
  for (const Json& subject : report["subjects"]) {
    INFO(subject.dump());
    CHECK(subject["against"] == "reference");
    CHECK(subject["rows"] == rows);
    CHECK(subject["max_error"] > 0);
    CHECK(subject["max_error"] < 0.01);
    if (subject["name"] == backend) CHECK(subject["equal_rows"] == rows);
    if (subject["name"] != "recorded") CHECK(subject["median_us"] > 0);
  }
  CHECK(report["subjects"][0]["name"] == "recorded");
  CHECK(report["subjects"][0]["max_error"] == report["subjects"][1]["max_error"]);
  const Json itself = ReplayJson(dir.path(), {"--against", "recording", "--bound", "0", "--layer", "2"});
  CHECK(itself["calls"] == 6);
  CHECK(itself["subjects"][0]["name"] == "auto");
  CHECK_THAT(itself["notes"][0].get<std::string>(), Contains("layer 2: auto is " + backend));
}

TEST_CASE("A wrong row of a recorded output is found and named, in process and against a server") {
  TempDir dir;
  const std::string recordings = dir.MakeDir("recordings"), wrong = dir.MakeDir("wrong");
  Record(recordings);
  for (const std::string& file : Files(recordings)) fs::copy_file(file, wrong + "/" + fs::path(file).filename().string());
  std::string file, id;
  for (const std::string& each : Files(wrong)) {
    const RecordedCall call = Read(each);
    if (call.request_id != "ring-4") continue;
    file = each, id = call.request_id;
    PlantError(call, 3, each);
  }
  REQUIRE_FALSE(file.empty());
  const Json report = ReplayJson(wrong, {"--backends", "cpu_generic", "--bound", "0.01"}, 1);
  CHECK(report["passed"] == false);
  const Json& worst = report["subjects"][0]["worst"];
  REQUIRE(worst.size() == 5);
  CHECK(worst[0]["request_id"] == id);
  CHECK(worst[0]["row"] == 3);
  CHECK(worst[0]["file"] == file);
  CHECK(worst[0]["error"] > 1);
  CHECK(worst[1]["error"] < 0.01);
  CHECK(report["subjects"][1]["max_error"] < 0.01);
  const Finished text = Replay(wrong, {"--backends", "cpu_generic", "--bound", "0.01"});
  CHECK(text.exit_code == 1);
  CHECK_THAT(text.out, Contains("row 3  layer 1  request 'ring-4'  " + file) && Contains("FAILED, bound 0.01"));

  const RunningServer server({"m=" + Model()}, {"--deterministic"}), other({"m=" + Model()}, {"--policy", "require:cpu_generic"});
  const Json same = server.MoectlJson({"replay", recordings, "--bound", "0"});
  CHECK(same["subjects"][0]["equal_rows"] == same["subjects"][0]["rows"]);
  CHECK(same["subjects"][0]["name"] == server.tcp());
  const Json planted = server.MoectlJson({"replay", wrong, "--bound", "0.01"}, 1);
  CHECK(planted["subjects"][0]["worst"][0]["request_id"] == id);
  CHECK(planted["subjects"][0]["worst"][0]["row"] == 3);
  const Json both = server.MoectlJson({"replay", recordings, "--also", other.tcp(), "--bound", "0.01", "--repeat", "2"});
  REQUIRE(both["subjects"].size() == 3);
  CHECK(both["subjects"][1]["name"] == other.tcp());
  CHECK(both["subjects"][2]["against"] == server.tcp());
  CHECK(both["subjects"][1]["time_ratio"] > 0);
}

TEST_CASE("A replay on other weights than were recorded says so, of the layer in process and of the model of a server") {
  TempDir dir;
  const std::string recordings = dir.MakeDir("recordings"), other = dir.File("other");
  Record(recordings);
  for (const std::string& file : Files(recordings)) CHECK((Read(file).weights_id != 0 && Read(file).layer_weights_id != 0));
  fs::copy(Model(), other, fs::copy_options::recursive);
  ChangeByteOf("layers.1.", "weight_packed", other + "/model.safetensors");
  const auto notes = [](const Json& report) { return report["notes"].dump(); };
  const auto has_others = Contains("other weights than were recorded");
  CHECK_THAT(notes(ReplayJson(recordings, {"--backends", "cpu_generic"})), !has_others);
  const Finished changed = RunToEnd({kMoed, "replay", recordings, "--checkpoint", other, "--backends", "cpu_generic", "--json"});
  INFO(changed.err);
  REQUIRE(changed.exit_code == 0);
  CHECK_THAT(notes(Json::parse(changed.out)),
             Contains("layer 1: the checkpoint has other weights") && !Contains("layer 2: the checkpoint"));
  const RunningServer same({"m=" + Model()}), swapped({"m=" + other});
  CHECK_THAT(notes(same.MoectlJson({"replay", recordings})), !has_others);
  CHECK_THAT(notes(swapped.MoectlJson({"replay", recordings})), has_others);
}

TEST_CASE("Unknown backends, layers that a checkpoint lacks, and files that are no recordings are refused by name") {
  TempDir dir;
  const std::string recordings = dir.MakeDir("recordings"), bad = dir.MakeDir("bad"), empty = dir.MakeDir("empty");
  Record(recordings);
  const auto error = [](const Finished& finished) {
    INFO(finished.out);
    CHECK(finished.exit_code == 2);
    CHECK(finished.out.empty());
    return finished.err;
  };
  CHECK_THAT(error(Replay(recordings, {"--backends", "cpu_genric"})), Contains("--backends: wanted some of auto, ") &&
                                                                         Contains("got 'cpu_genric'; the nearest is cpu_generic"));
  CHECK_THAT(error(Replay(recordings, {"--backends", "cpu_avx2,cpu_avx2"})), Contains("each backend once"));
  CHECK_THAT(error(Replay(recordings, {"--backends", "cuda_generic", "--gpu", "none"})), Contains("cuda_generic"));
  CHECK_THAT(error(Replay(recordings, {"--layer", "7"})), Contains("layer 7, got 16 of others"));
  CHECK_THAT(error(Replay(recordings, {"--model", "other"})), Contains("recordings of other"));
  CHECK_THAT(error(Replay(empty, {})), Contains(empty + ": wanted recordings"));
  CHECK_THAT(error(Replay(dir.File("none"), {})), Contains(dir.File("none") + ": wanted a recording"));
  const std::string other = CheckedInModel("gptq-int4-g32-sym").path;
  const Finished lacks = RunToEnd({kMoed, "replay", recordings, "--checkpoint", other, "--layer", "1"});
  CHECK_THAT(error(lacks), Contains(recordings) && Contains("has no MoE layer 1; its MoE layers are 0"));

  const std::string file = Files(recordings)[0], cut = bad + "/cut.safetensors";
  fs::copy_file(file, cut);
  fs::resize_file(cut, fs::file_size(cut) - 1);
  CHECK_THAT(error(Replay(bad, {})), Contains(cut));
  const RunningServer server({"m=" + Model()});
  CHECK_THAT(error(server.Moectl({"replay", bad})), Contains(cut));
  CHECK_THAT(error(server.Moectl({"replay", empty})), Contains("wanted recordings"));
  CHECK_THAT(error(server.Moectl({"replay", recordings, "--layer", "7"})), Contains("layer 7"));
  CHECK_THAT(error(server.Moectl({"replay", recordings, "--model", "other"})), Contains("NOT_FOUND") && Contains(recordings));
  RecordedCall call = Read(file);
  call.layer = 7;
  REQUIRE(WriteRecordedCall(dir.File("seven.safetensors"), call).ok());
  CHECK_THAT(error(server.Moectl({"replay", dir.File("seven.safetensors")})), Contains("seven.safetensors") && Contains("7"));
  CHECK_THAT(error(Replay(dir.File("seven.safetensors"), {})), Contains("seven.safetensors") && Contains("has no MoE layer 7"));
}

TEST_CASE("moectl replay with --backends is moed replay of the program beside it") {
  TempDir dir;
  const std::string recordings = dir.MakeDir("recordings"), both = dir.MakeDir("both"), alone = dir.MakeDir("alone");
  Record(recordings);
  for (const std::string& folder : {both, alone}) fs::copy_file(kMoectl, folder + "/moectl");
  fs::create_symlink(fs::absolute(kMoed), both + "/moed");
  const auto run = [&](const std::string& folder, std::vector<std::string> more) {
    std::vector<std::string> words = {folder + "/moectl", "--json", "replay", recordings};
    words.insert(words.end(), more.begin(), more.end());
    return RunToEnd(words);
  };
  const std::vector<std::string> backends = {"--backends", "cpu_generic", "--checkpoint", Model(), "--layer", "1", "--worst", "2"};
  const Finished done = run(both, backends);
  INFO(done.err);
  REQUIRE(done.exit_code == 0);
  const Json report = Json::parse(done.out);
  CHECK(report["subjects"][1]["name"] == "cpu_generic");
  CHECK(report["subjects"][1]["worst"].size() == 2);
  CHECK(report["subjects"][1]["max_error"] < 0.01);
  std::vector<std::string> strict = backends;
  strict.insert(strict.end(), {"--bound", "1e-9"});
  CHECK(run(both, strict).exit_code == 1);

  const auto error = [&](const Finished& finished) {
    CHECK(finished.exit_code == 2);
    return finished.FirstError();
  };
  CHECK_THAT(error(run(alone, backends)), Contains("wanted the program moed beside moectl or on PATH"));
  CHECK_THAT(error(run(both, {"--backends", "cpu_generic"})), Contains("--checkpoint"));
  CHECK_THAT(error(run(both, {"--checkpoint", Model()})), Contains("--backends"));
  std::vector<std::string> also = backends;
  also.insert(also.end(), {"--also", "unix:/tmp/x"});
  CHECK_THAT(error(run(both, also)), Contains("--also"));
}

TEST_CASE("Recordings that do not go together are refused with what differs, and one model of several can be picked") {
  TempDir dir;
  const std::string recordings = dir.MakeDir("recordings"), mixed = dir.MakeDir("mixed");
  Record(recordings);
  const RecordedCall call = Read(Files(recordings)[0]);
  REQUIRE(WriteRecordedCall(mixed + "/a.safetensors", call).ok());
  const auto error = [&](const std::function<void(RecordedCall*)>& change) {
    RecordedCall other = call;
    change(&other);
    REQUIRE(WriteRecordedCall(mixed + "/b.safetensors", other).ok());
    const Finished finished = Replay(mixed, {});
    CHECK(finished.exit_code == 2);
    CHECK_THAT(finished.FirstError(), Contains(mixed + "/b.safetensors: "));
    return finished.FirstError();
  };
  CHECK_THAT(error([](RecordedCall* other) { other->end_expert = 8; }), Contains("the experts '0:16'") && Contains("got '0:8'"));
  CHECK_THAT(error([](RecordedCall* other) { other->activations = "int8"; }),
             Contains("the activations 'file'") && Contains("'int8'"));
  CHECK_THAT(error([](RecordedCall* other) { other->activations = "frob"; }), Contains("metadata activations: wanted one of file"));
  const auto narrow = [](RecordedCall* other) {
    other->columns /= 2;
    other->hidden.resize(other->hidden.size() / 2);
    other->output.resize(other->output.size() / 2);
  };
  CHECK_THAT(error(narrow), Contains("hidden: has 128 columns, want H = 256"));
  CHECK_THAT(error([](RecordedCall* other) { other->model = "n"; }), Contains("the model 'm'") && Contains("--model picks one"));
  CHECK(ReplayJson(mixed, {"--model", "n"})["calls"] == 1);
}

TEST_CASE("A server that is killed leaves whole recordings, and the next one goes on in the same folder") {
  TempDir dir;
  {
    RunningServer server({"m=" + Model()}, RecordOptions(dir.path()));
    std::atomic<bool> stop{false};
    std::thread caller([&] {
      const Values values;
      const auto client = Connect(server.tcp(), Transport::kRpc);
      client::ForwardCall call = Calls(values)[0];
      call.layer = 1;
      while (!stop) (void)client->Forward(call, {.timeout = std::chrono::seconds(20)});
    });
    const bool some = WaitFor([&] { return FindRecordings({dir.path()}).ok() && Files(dir.path()).size() > 20; });
    server.process().Signal(SIGKILL);
    stop = true;
    caller.join();
    REQUIRE(some);
  }
  const std::vector<std::string> files = Files(dir.path());
  for (const std::string& file : files) CHECK(ReadRecordedCall(file).ok());
  RunningServer next({"m=" + Model()}, RecordOptions(dir.path()));
  for (const auto& entry : fs::directory_iterator(dir.path())) CHECK(entry.path().extension() == ".safetensors");
  SendStream(next.tcp());
  CHECK(WaitFor([&] { return Files(dir.path()).size() == files.size() + 1; }));
}

TEST_CASE("What is recorded and lost is in the metrics, and a full folder ends recording and not serving") {
  TempDir dir;
  const std::vector<std::string> options =
      RecordOptions(dir.path(), {"--metrics-listen", "127.0.0.1:0", "--record-rows", "5", "--record-bytes", "60000"});
  RunningServer server({"m=" + Model()}, options);
  const std::string address = Json::parse(std::ifstream(server.ready_file()))["metrics_address"];
  const auto has = [&](const std::string& line) {
    return HttpGet(address, "/metrics").find("\n" + line + "\n") != std::string::npos;
  };
  CHECK(has("moed_recording_active 1"));
  const Values values;
  const auto client = Connect(server.tcp(), Transport::kRpc);
  client::ForwardCall call = Calls(values)[0];
  call.layer = 1;
  CHECK(client->Forward(call).ok());
  CHECK(WaitFor([&] { return has("moed_recorded_calls_total 1"); }));
  const std::vector<uint8_t> six(6 * kHidden * 2, 0);
  client::ForwardCall large;
  large.layer = 1;
  large.hidden = {DType::kBf16, 6, kHidden, six};
  CHECK(client->Forward(large).ok());
  CHECK(has("moed_recording_lost_total{reason=\"rows\"} 1"));
  CHECK(WaitFor([&] { return client->Forward(call).ok() && has("moed_recording_active 0"); }));
  for (int i = 0; i < 10; ++i) CHECK(client->Forward(call).ok());
  uint64_t bytes = 0;
  for (const std::string& file : Files(dir.path())) bytes += fs::file_size(file);
  CHECK(bytes <= 60000);
  server.process().Signal(SIGTERM);
  REQUIRE(server.process().Wait(std::chrono::minutes(1)) == 0);
  const std::string log = server.process().Stdout();
  CHECK_THAT(log, Contains("--record-bytes: recording ends"));
  CHECK(log.find("recording ends") == log.rfind("recording ends"));
}

TEST_CASE("A start that could not record is refused with the folder named") {
  TempDir dir;
  const auto error = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {kMoed, "serve", "--model", Model(), "--listen", "127.0.0.1:0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = RunToEnd(arguments);
    CHECK(finished.exit_code == 2);
    return finished.FirstError();
  };
  CHECK_THAT(error({"--record", dir.File("none")}),
             Contains("--record: wanted a folder that can be written") && Contains(dir.File("none")));
  CHECK_THAT(error({"--record-rate", "0.5"}), Contains("--record-rate: wanted --record beside it"));
  const Finished check = RunToEnd({kMoed, "check", "--model", Model(), "--record", dir.File("none")});
  CHECK(check.exit_code == 2);
  CHECK_THAT(check.FirstError(), Contains("--record: wanted a folder"));
  const RunningServer server({"m=" + Model()}, RecordOptions(dir.path()));
  CHECK_THAT(error({"--record", dir.path()}), Contains("--record") && Contains("another records"));
}

}  // namespace moed::testing
