#include "server/replay.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"
#include "engine/recorded_call.h"
#include "kernels/backends.h"
#include "kernels/convert.h"
#include "server/option_table.h"
#include "server/payload.h"
#include "server/setup.h"

namespace moed {
namespace {

constexpr char kModel[] = "replay";
constexpr char kReference[] = "reference";

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

// What all recordings of a replay have in common, and where they are.
struct Recordings {
  int64_t files = 0;
  std::map<int, std::vector<std::string>> by_layer;
  std::string model;
  int first_expert = 0, end_expert = 0;
  bool deterministic = false;
  std::string activations;
};

// Takes a recording among the others.
absl::Status Add(const ReplayOptions& options, const std::string& file, const RecordedCall& call, Recordings* out) {
  if (!options.model.empty() && call.model != options.model) return absl::OkStatus();
  if (options.layer >= 0 && call.layer != options.layer) return absl::OkStatus();
  std::string known;
  if (absl::Status status = ParseActivations(call.activations, &known); !status.ok()) {
    return Prefixed(absl::StrCat(file, ": metadata activations"), status);
  }
  const auto differ = [&](const char* what, const std::string& others, const std::string& got, const char* hint) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": wanted ", what, " '", others, "', as the recordings before have, got '", got, "'", hint));
  };
  const auto range = [](int first, int end) { return absl::StrCat(first, ":", end); };
  if (out->files == 0) {
    out->model = call.model;
    out->first_expert = call.first_expert, out->end_expert = call.end_expert;
    out->deterministic = call.deterministic;
    out->activations = call.activations;
  }
  if (call.model != out->model) return differ("the model", out->model, call.model, "; --model picks one");
  if (call.first_expert != out->first_expert || call.end_expert != out->end_expert) {
    return differ("the experts", range(out->first_expert, out->end_expert), range(call.first_expert, call.end_expert), "");
  }
  if (options.activations.empty() && call.activations != out->activations) {
    return differ("the activations", out->activations, call.activations, "; --activations overrides them");
  }
  out->deterministic = out->deterministic && call.deterministic;
  out->by_layer[call.layer].push_back(file);
  ++out->files;
  return absl::OkStatus();
}

// Reads every file once, so that one that is damaged is known before anything runs.
absl::StatusOr<Recordings> FindCalls(const ReplayOptions& options) {
  absl::StatusOr<std::vector<std::string>> files = FindRecordings(options.files);
  if (!files.ok()) return files.status();
  Recordings found;
  for (const std::string& file : *files) {
    absl::StatusOr<RecordedCall> call = ReadRecordedCall(file);
    if (!call.ok()) return call.status();
    if (absl::Status status = Add(options, file, *call, &found); !status.ok()) return status;
  }
  if (found.files > 0) return found;
  return absl::NotFoundError(absl::StrCat("wanted recordings of ", options.model.empty() ? "any model" : options.model,
                                          options.layer < 0 ? "" : absl::StrCat(", layer ", options.layer), ", got ", files->size(),
                                          " of others"));
}

absl::Status CheckBackends(const ReplayOptions& options, std::span<const Backend* const> backends) {
  std::vector<std::string> names = {"auto"};
  for (const Backend* backend : backends) names.push_back(backend->Name());
  for (const std::string& name : options.backends) {
    if (std::count(options.backends.begin(), options.backends.end(), name) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("--backends: wanted each backend once, got '", name, "' twice"));
    }
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    std::string list;
    for (const std::string& known : names) absl::StrAppend(&list, list.empty() ? "" : ", ", known);
    return absl::NotFoundError(
        absl::StrCat("--backends: wanted some of ", list, ", got '", name, "'; the nearest is ", NearestName(name, names)));
  }
  return absl::OkStatus();
}

// A call as it runs, with the memory that it views.
struct ReadyCall {
  RecordedCall recorded;
  std::vector<uint16_t> expanded;
  std::vector<std::byte> repeated;
  ForwardCall call;
};

DType TypeOf(StDtype dtype) {
  return dtype == StDtype::kF32 ? DType::kF32 : dtype == StDtype::kF16 ? DType::kF16 : DType::kBf16;
}

// The hidden states that the layer gets of those that came, as the server makes them.
void MakeHidden(ReadyCall* ready) {
  const RecordedCall& recorded = ready->recorded;
  TensorView& hidden = ready->call.hidden;
  hidden = {recorded.hidden.data(), TypeOf(recorded.hidden_dtype), recorded.rows, recorded.columns};
  if (StDtypeBits(recorded.hidden_dtype) == 8) {
    ready->expanded.resize(recorded.hidden.size());
    const PayloadCode code = recorded.hidden_dtype == StDtype::kI8 ? PayloadCode::kI8 : PayloadCode::kF8E4m3;
    ExpandPayload(code, recorded.hidden.data(), {reinterpret_cast<const char*>(recorded.scales.data()), recorded.scales.size() * 4},
                  recorded.columns, ready->expanded.data());
    hidden.data = ready->expanded.data();
  }
  if (!recorded.per_slot) return;
  ready->repeated.resize(hidden.bytes() * static_cast<size_t>(recorded.top_k));
  const size_t row_bytes = hidden.slice(0, std::min<int64_t>(recorded.rows, 1)).bytes();
  RepeatRows(static_cast<const std::byte*>(hidden.data), recorded.rows, row_bytes, recorded.top_k, ready->repeated.data());
  hidden.data = ready->repeated.data();
  hidden.rows *= recorded.top_k;
}

absl::StatusOr<std::unique_ptr<ReadyCall>> ReadCall(const std::string& file) {
  absl::StatusOr<RecordedCall> recorded = ReadRecordedCall(file);
  if (!recorded.ok()) return recorded.status();
  auto ready = std::make_unique<ReadyCall>();
  ready->recorded = *std::move(recorded);
  const RecordedCall& from = ready->recorded;
  ready->call.layer = from.layer;
  ready->call.routed_only = from.routed_only || from.per_slot;
  MakeHidden(ready.get());
  if (from.routing == RecordedCall::Routing::kIds) {
    ready->call.routing = RoutingByIds{from.per_slot ? 1 : static_cast<int>(from.top_k), from.ids, from.weights};
  } else if (from.routing == RecordedCall::Routing::kLogits) {
    ready->call.routing = RoutingByLogits{from.logits};
  }
  return ready;
}

std::vector<float> Floats(const void* data, DType dtype, int64_t rows, int64_t columns) {
  std::vector<float> floats(static_cast<size_t>(rows * columns));
  const TensorView view = {data, dtype, rows, columns};
  for (int64_t row = 0; row < rows; ++row) RowToFloat(view, row, floats.data() + row * columns);
  return floats;
}

// One way of running calls of a layer.
struct Runner {
  std::string name;  // of the backend, or auto
  std::unique_ptr<Engine> engine;
};

// What a run gave.
struct Output {
  std::vector<uint8_t> bytes;
  ForwardInfo info;
  int64_t nanoseconds = 0;
};

absl::StatusOr<Output> RunCall(const Runner& runner, const ReadyCall& ready, DType dtype) {
  Output output;
  MutableTensorView view = {nullptr, dtype, ready.recorded.output_rows(), ready.recorded.columns};
  output.bytes.resize(view.bytes());
  view.data = output.bytes.data();
  const auto began = std::chrono::steady_clock::now();
  absl::Status status = runner.engine->Forward(kModel, ready.call, view, &output.info);
  output.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
  if (!status.ok()) return Prefixed(runner.name, status);
  return output;
}

class Replayer {
 public:
  Replayer(const ReplayOptions& options, Recordings recordings)
      : options_(options), recordings_(std::move(recordings)), by_reference_(options.against == kReference) {
    report_.files = recordings_.files;
    if (options.bound >= 0) report_.bound = options.bound;
    if (by_reference_) report_.subjects.emplace_back("recorded", options.against, options.worst);
    for (const std::string& name : options.backends) report_.subjects.emplace_back(name, options.against, options.worst);
  }

  absl::StatusOr<ReplayReport> Run() {
    for (const auto& [layer, files] : recordings_.by_layer) {
      if (absl::Status status = RunLayer(layer, files); !status.ok()) return status;
    }
    return std::move(report_);
  }

 private:
  absl::StatusOr<Runner> Load(const std::string& backend, int layer) const;
  absl::Status RunLayer(int layer, const std::vector<std::string>& files);
  absl::Status RunFile(const std::string& file, bool first);
  absl::Status RunBackends(const ReadyCall& ready, const ReplayedCall& name, std::span<const float> judge);
  void Note(const Runner& runner, const RecordedCall& recorded, const ForwardInfo& info);
  ReplaySubject& SubjectOf(size_t runner) { return report_.subjects[runner + (by_reference_ ? 1 : 0)]; }

  const ReplayOptions& options_;
  const Recordings recordings_;
  const bool by_reference_;
  Runner reference_;             // of the layer that runs
  std::vector<Runner> runners_;  // in the order of options_.backends
  std::set<std::string> noted_;
  ReplayReport report_;
};

// The layer alone, on that backend.
absl::StatusOr<Runner> Replayer::Load(const std::string& backend, int layer) const {
  std::vector<const Backend*> backends = LinkedBackends();
  absl::StatusOr<Policy> policy = Policy::Parse(backend == "auto" ? backend : absl::StrCat("require:", backend));
  if (!policy.ok()) return policy.status();
  EngineOptions options;
  options.threads = options_.threads;
  options.policy = *std::move(policy);
  options.deterministic = options_.deterministic || recordings_.deterministic;
  options.activations = ReadActivations(options_.activations.empty() ? recordings_.activations : options_.activations);
  options.first_expert = recordings_.first_expert;
  options.end_expert = recordings_.end_expert;
  options.layers = {layer};
  options.device = LinkedDevice();
  MaskGpu(options_.gpu, &options.device);
  MaskFeatures(options_.masked_features, &options.device.isa);
  Runner runner{backend, std::make_unique<Engine>(std::move(options), std::move(backends))};
  absl::Status status = runner.engine->Plan(kModel, options_.checkpoint);
  if (status.ok()) status = runner.engine->Load(kModel, {});
  if (!status.ok()) return status;
  return runner;
}

absl::Status Replayer::RunLayer(int layer, const std::vector<std::string>& files) {
  runners_.clear(), reference_ = {};  // of the layer before
  if (by_reference_) {
    absl::StatusOr<Runner> reference = Load(kReference, layer);
    if (!reference.ok()) return Prefixed(files.front(), reference.status());
    reference_ = *std::move(reference);
  }
  for (const std::string& backend : options_.backends) {
    absl::StatusOr<Runner> runner = Load(backend, layer);
    if (!runner.ok()) return Prefixed(files.front(), runner.status());
    runners_.push_back(*std::move(runner));
  }
  for (const std::string& file : files) {
    if (absl::Status status = RunFile(file, &file == &files.front()); !status.ok()) return Prefixed(file, status);
  }
  return absl::OkStatus();
}

absl::Status Replayer::RunFile(const std::string& file, bool first) {
  absl::StatusOr<std::unique_ptr<ReadyCall>> read = ReadCall(file);
  if (!read.ok()) return read.status();
  const ReadyCall& ready = **read;
  const RecordedCall& recorded = ready.recorded;
  const ReplayedCall name = {file, recorded.request_id, recorded.layer};
  const std::vector<float> was =
      Floats(recorded.output.data(), TypeOf(recorded.output_dtype), recorded.output_rows(), recorded.columns);
  if (first) {  // first runs touch memory that later ones find
    for (const Runner& runner : runners_) {
      if (absl::Status status = RunCall(runner, ready, TypeOf(recorded.output_dtype)).status(); !status.ok()) return status;
    }
  }
  ++report_.calls;
  if (!by_reference_) return RunBackends(ready, name, was);
  const absl::StatusOr<Output> right = RunCall(reference_, ready, DType::kF32);
  if (!right.ok()) return right.status();
  const std::vector<float> judge = Floats(right->bytes.data(), DType::kF32, recorded.output_rows(), recorded.columns);
  report_.subjects[0].AddOutput(name, was, judge, recorded.columns);
  return RunBackends(ready, name, judge);
}

absl::Status Replayer::RunBackends(const ReadyCall& ready, const ReplayedCall& name, std::span<const float> judge) {
  const RecordedCall& recorded = ready.recorded;
  const DType dtype = TypeOf(recorded.output_dtype);
  for (int run = 0; run < options_.repeat; ++run) {
    for (size_t i = 0; i < runners_.size(); ++i) {
      const absl::StatusOr<Output> output = RunCall(runners_[i], ready, dtype);
      if (!output.ok()) return output.status();
      ReplaySubject& subject = SubjectOf(i);
      subject.AddNanoseconds(output->nanoseconds);
      if (run > 0) continue;
      Note(runners_[i], recorded, output->info);
      const std::vector<float> floats = Floats(output->bytes.data(), dtype, recorded.output_rows(), recorded.columns);
      subject.AddOutput(name, floats, judge, recorded.columns);
      subject.AddBits(output->bytes, recorded.output, TensorView{nullptr, dtype, 1, recorded.columns}.bytes());
    }
  }
  return absl::OkStatus();
}

// What differs from the recording, once for each layer.
void Replayer::Note(const Runner& runner, const RecordedCall& recorded, const ForwardInfo& info) {
  const auto add = [this](std::string note) {
    if (noted_.insert(note).second) report_.notes.push_back(std::move(note));
  };
  const std::string layer = absl::StrCat("layer ", recorded.layer, ": ");
  if (runner.name == "auto") add(absl::StrCat(layer, "auto is ", info.backend));
  if (recorded.layer_weights_id != 0 && info.layer_weights_id != recorded.layer_weights_id) {
    add(absl::StrCat(layer, "the checkpoint has other weights than were recorded: id ", WeightsIdText(info.layer_weights_id),
                     ", recorded was ", WeightsIdText(recorded.layer_weights_id)));
  }
  if (info.scheme == recorded.scheme) return;
  add(absl::StrCat(layer, runner.name, " executes ", info.scheme, ", recorded was ", recorded.scheme));
}

}  // namespace

absl::StatusOr<ReplayReport> Replay(const ReplayOptions& options) {
  if (absl::Status status = CheckBackends(options, LinkedBackends()); !status.ok()) return status;
  absl::StatusOr<Recordings> recordings = FindCalls(options);
  if (!recordings.ok()) return recordings.status();
  return Replayer(options, *std::move(recordings)).Run();
}

int RunReplay(const ReplayOptions& options) {
  const absl::StatusOr<ReplayReport> report = Replay(options);
  if (!report.ok()) return ReportFailure(report.status());
  using Json = nlohmann::ordered_json;
  const std::string text =
      options.json ? ReplayJson(*report).dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : ReplayText(*report);
  std::fputs(text.c_str(), stdout);
  return report->passed() ? 0 : 1;
}

}  // namespace moed
