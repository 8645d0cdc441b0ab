// The command replay: calls that a server recorded, sent to one or two running servers and compared with the recording and each
// other.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/moectl.h"
#include "engine/recorded_call.h"
#include "engine/replay_report.h"

namespace moed::client {
namespace {

struct ReplayOptions {
  std::vector<std::string> files;
  std::string also;
  std::optional<int32_t> layer;
  std::optional<double> bound;
  int repeat = 1;
  int worst = 5;
  std::string transport = "auto";
  std::string backends, checkpoint;  // given: by moed, in one process
};

struct Target {
  std::string address;
  std::unique_ptr<MoeClient> client;
};

DType TypeOf(StDtype dtype) {
  switch (dtype) {
    case StDtype::kF32: return DType::kF32;
    case StDtype::kF16: return DType::kF16;
    case StDtype::kF8E4m3: return DType::kF8E4m3;
    case StDtype::kI8: return DType::kI8;
    default: return DType::kBf16;
  }
}

// Views `recorded`.
ForwardCall CallOf(const Globals& globals, const RecordedCall& recorded) {
  ForwardCall call;
  call.model = globals.model.empty() ? recorded.model : globals.model;
  call.layer = recorded.layer;
  call.hidden = {TypeOf(recorded.hidden_dtype), recorded.rows, recorded.columns, recorded.hidden};
  call.hidden_scales = recorded.scales;
  call.top_k = recorded.top_k;
  call.ids = recorded.ids;
  call.weights = recorded.weights;
  call.num_experts = recorded.num_experts;
  call.router_logits = recorded.logits;
  call.output_dtype = TypeOf(recorded.output_dtype);
  call.routed_only = recorded.routed_only;
  call.per_slot = recorded.per_slot;
  call.request_id = recorded.request_id;
  return call;
}

std::span<const uint8_t> BytesOf(const std::string& data) { return {reinterpret_cast<const uint8_t*>(data.data()), data.size()}; }

class Replayer {
 public:
  Replayer(const Globals& globals, const ReplayOptions& options, std::vector<Target> targets)
      : globals_(globals), options_(options), targets_(std::move(targets)) {
    report_.bound = options.bound;
    for (const Target& target : targets_) report_.subjects.emplace_back(target.address, "recording", options.worst);
    if (targets_.size() > 1) report_.subjects.emplace_back(targets_[1].address, targets_[0].address, options.worst);
  }

  // Reads every file before the first call, so that one that is damaged is known before anything runs.
  absl::Status Choose();
  absl::Status Run();
  const ReplayReport& report() const { return report_; }

 private:
  absl::Status RunFile(const std::string& file);
  absl::StatusOr<ForwardResult> Send(const Target& target, const RecordedCall& recorded, ReplaySubject* timed) const;
  void Note(const Target& target, const RecordedCall& recorded, const ForwardResult& result);

  const Globals& globals_;
  const ReplayOptions& options_;
  const std::vector<Target> targets_;
  std::vector<std::string> files_;
  std::set<std::string> noted_;
  ReplayReport report_;
};

absl::Status Replayer::Choose() {
  absl::StatusOr<std::vector<std::string>> found = FindRecordings(options_.files);
  if (!found.ok()) return found.status();
  for (const std::string& file : *found) {
    const absl::StatusOr<RecordedCall> call = ReadRecordedCall(file);
    if (!call.ok()) return call.status();
    if (!options_.layer || call->layer == *options_.layer) files_.push_back(file);
  }
  report_.files = static_cast<int64_t>(files_.size());
  if (!files_.empty()) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("--layer: wanted recordings of layer ", *options_.layer, ", got ", found->size(), " of others"));
}

absl::Status Replayer::Run() {
  for (const std::string& file : files_) {
    const absl::Status status = RunFile(file);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<ForwardResult> Replayer::Send(const Target& target, const RecordedCall& recorded, ReplaySubject* timed) const {
  const auto began = std::chrono::steady_clock::now();
  absl::StatusOr<ForwardResult> result = target.client->Forward(CallOf(globals_, recorded), globals_.Call());
  const auto took = std::chrono::steady_clock::now() - began;
  if (!result.ok()) return absl::Status(result.status().code(), absl::StrCat(target.address, ": ", result.status().message()));
  timed->AddNanoseconds(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
  return result;
}

// To each server in turn, so that their times are of the same moments.
absl::Status Replayer::RunFile(const std::string& file) {
  const absl::StatusOr<RecordedCall> recorded = ReadRecordedCall(file);
  if (!recorded.ok()) return recorded.status();
  const ReplayedCall name = {file, recorded->request_id, recorded->layer};
  const DType dtype = TypeOf(recorded->output_dtype);
  const std::vector<float> was = ToFloats(dtype, recorded->output);
  std::vector<std::vector<float>> outputs;
  ++report_.calls;
  for (int run = 0; run < options_.repeat; ++run) {
    for (size_t i = 0; i < targets_.size(); ++i) {
      ReplaySubject& subject = report_.subjects[i];
      const absl::StatusOr<ForwardResult> result = Send(targets_[i], *recorded, &subject);
      if (!result.ok()) return result.status();
      if (run > 0) continue;
      Note(targets_[i], *recorded, *result);
      outputs.push_back(result->Floats());
      subject.AddOutput(name, outputs.back(), was, recorded->columns);
      subject.AddBits(BytesOf(result->data), recorded->output, static_cast<size_t>(recorded->columns) * ElementBytes(dtype));
    }
  }
  if (targets_.size() > 1) report_.subjects[2].AddOutput(name, outputs[1], outputs[0], recorded->columns);
  return absl::OkStatus();
}

// What differs from the recording, once for each layer.
void Replayer::Note(const Target& target, const RecordedCall& recorded, const ForwardResult& result) {
  const auto add = [&](const std::string& got, const std::string& was) {
    std::string note = absl::StrCat("layer ", recorded.layer, ": ", target.address, " has ", got, ", recorded was ", was);
    if (got != was && noted_.insert(note).second) report_.notes.push_back(std::move(note));
  };
  add(result.backend, recorded.backend);
  add(result.scheme, recorded.scheme);
  if (recorded.weights_id == 0 || result.weights_id == recorded.weights_id) return;
  std::string note = absl::StrCat(target.address, " has other weights than were recorded: id ", WeightsIdText(result.weights_id),
                                  ", recorded was ", WeightsIdText(recorded.weights_id));
  if (noted_.insert(note).second) report_.notes.push_back(std::move(note));
}

absl::StatusOr<std::vector<Target>> Connect(const Globals& globals, const ReplayOptions& options) {
  ClientOptions connection = globals.connection;
  connection.own_connection = true;
  for (const Transport transport : {Transport::kAuto, Transport::kRpc, Transport::kSharedMemory, Transport::kRing}) {
    if (options.transport == TransportName(transport)) connection.transport = transport;
  }
  std::vector<Target> targets;
  for (const std::string& address : {globals.server, options.also}) {
    if (address.empty()) continue;
    absl::StatusOr<std::unique_ptr<MoeClient>> client = MoeClient::Connect(address, connection);
    if (!client.ok()) return client.status();
    targets.push_back({address, *std::move(client)});
  }
  return targets;
}

int RunReplay(const Globals& globals, const ReplayOptions& options) {
  absl::StatusOr<std::vector<Target>> targets = Connect(globals, options);
  if (!targets.ok()) return Fail(targets.status());
  Replayer replayer(globals, options, *std::move(targets));
  absl::Status status = replayer.Choose();
  if (status.ok()) status = replayer.Run();
  if (!status.ok()) return Fail(status);
  if (globals.json) {
    PrintJson(ReplayJson(replayer.report()));
  } else {
    std::printf("%s", ReplayText(replayer.report()).c_str());
  }
  return replayer.report().passed() ? kExitOk : kExitCheckFailed;
}

// Becomes `moed replay`, since the kernels are in that program: the one beside this, else on PATH. Returns when there is none.
int BecomeMoed(const Globals& globals, const ReplayOptions& options) {
  std::vector<std::string> words = {"moed", "replay"};
  words.insert(words.end(), options.files.begin(), options.files.end());
  words.insert(words.end(), {"--checkpoint", options.checkpoint, "--backends", options.backends, "--repeat",
                             absl::StrCat(options.repeat), "--worst", absl::StrCat(options.worst)});
  if (options.layer) words.insert(words.end(), {"--layer", absl::StrCat(*options.layer)});
  if (options.bound) words.insert(words.end(), {"--bound", absl::StrFormat("%.17g", *options.bound)});
  if (!globals.model.empty()) words.insert(words.end(), {"--model", globals.model});
  if (globals.json) words.push_back("--json");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::error_code error;
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) execv((own.parent_path() / "moed").c_str(), argv.data());
  execvp("moed", argv.data());
  return Fail(absl::NotFoundError("--backends: wanted the program moed beside moectl or on PATH, got neither"));
}

constexpr char kExamples[] = R"(Examples:
  moectl replay recordings
  moectl replay recordings --backends cpu_amx,cpu_avx2 --checkpoint /models/big
  moectl --server unix:/run/moed.sock replay recordings --layer 3 --bound 0.01
  moectl --server old:50061 replay recordings --also new:50061 --repeat 20 --json

Sends calls that `moed serve --record` recorded, one after the other, and compares the answers with the recorded ones; with --also
to two servers in turn, whose answers are compared with each other as well. An error is that of a row, ||y - ref|| / ||ref||; times
are this client's. Calls go to the model that was recorded, or to that of --model. --backends needs no server: it is `moed
replay`, which has more options.
Exit code 1 when an error is above --bound.)";

}  // namespace

void AddReplay(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command =
      app.add_subcommand("replay", "recorded calls to one or two servers, compared with the recording and each other");
  auto options = std::make_shared<ReplayOptions>();
  command->add_option("FILE", options->files, "recordings, or folders of them")->required();
  command->add_option("--also", options->also, "a second server, HOST:PORT or unix:PATH");
  command->add_option("--layer", options->layer, "only calls of this layer")->check(LayerNumber());
  command->add_option("--bound", options->bound, "largest error of a row that passes")->check(Between(0, 1e9));
  command->add_option("--repeat", options->repeat, "times that each call is sent, all timed")
      ->check(Between(1, 1e6))
      ->capture_default_str();
  command->add_option("--worst", options->worst, "rows of the largest errors that are named")
      ->check(Between(0, 1e6))
      ->capture_default_str();
  command->add_option("--transport", options->transport, "auto, rpc, shared-memory or ring")
      ->check(CLI::IsMember({"auto", "rpc", "shared-memory", "ring"}))
      ->capture_default_str();
  CLI::Option* backends = command->add_option("--backends", options->backends, "compare these backends, in one process");
  CLI::Option* checkpoint = command->add_option("--checkpoint", options->checkpoint, "with --backends: whose calls they are");
  backends->needs(checkpoint)->excludes("--also")->excludes("--transport");
  checkpoint->needs(backends);
  command->footer(kExamples);
  command->callback([&globals, run, options] { *run = [&globals, options] {
    return options->backends.empty() ? RunReplay(globals, *options) : BecomeMoed(globals, *options);
  }; });
}

}  // namespace moed::client
