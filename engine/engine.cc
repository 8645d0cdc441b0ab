#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_past.h"
#include "engine/forward.h"
#include "engine/lanes.h"
#include "engine/merged_call.h"
#include "engine/model.h"
#include "engine/self_check.h"
#include "engine/shared_cache.h"
#include "kernels/cpu_limits.h"
#include "kernels/numa.h"

namespace moed {
namespace {

int64_t MicrosecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
}

absl::Status NoSuchModel(const std::string& name, const std::vector<std::shared_ptr<Model>>& models) {
  std::string known;
  for (const std::shared_ptr<Model>& model : models) absl::StrAppend(&known, known.empty() ? "" : ", ", model->name());
  if (name.empty()) return absl::InvalidArgumentError(absl::StrCat("the call names no model, and the server has several: ", known));
  return absl::NotFoundError(absl::StrCat("no model ", name, "; the server has ", known.empty() ? "none" : known));
}

HostStatus DescribeHost(const EngineOptions& options) {
  const ThreadCount fitting = ThreadsFor(options.device.cores, options.device.cpu_quota);
  HostStatus host;
  host.threads = options.threads > 0 ? options.threads : fitting.threads;
  host.threads_limit = options.threads > 0 ? "operator's choice" : fitting.limit;
  host.pinned = options.pin_threads;
  host.processors = options.device.cores;
  host.cpu_quota = options.device.cpu_quota;
  host.numa_nodes = NodesOfProcessors(UsableProcessors());
  host.gpu = options.device.has_gpu ? options.device.gpu_name : "";
  host.gpu_free_bytes = options.device.has_gpu ? options.device.gpu_free_bytes : 0;
  return host;
}

absl::Status ValidateOn(const Model& model, const LoadedLayer& layer, const ForwardCall& call, const MutableTensorView& out) {
  absl::Status valid = ValidateCall(model.config(), call, out);
  if (!valid.ok()) return valid;
  const bool on_host = call.hidden.place == Place::kHost && out.place == Place::kHost;
  return layer.device != nullptr || on_host ? absl::OkStatus() : NotOnDevice(layer);
}

// Whether all threads can run at the same time.
bool RunAtOnce(const HostStatus& host) { return host.threads <= ThreadsFor(host.processors, host.cpu_quota).threads; }

}  // namespace

const char* LayerStateName(LayerState state) {
  switch (state) {
    case LayerState::kPlanned: return "planned";
    case LayerState::kLoading: return "loading";
    case LayerState::kReady: return "ready";
    case LayerState::kFailed: return "failed";
  }
  return "?";
}

Engine::Engine(EngineOptions options, std::vector<const Backend*> backends)
    : options_(std::move(options)),
      backends_(std::move(backends)),
      pinned_to_(options_.pin_threads ? UsableProcessors() : std::vector<int>()),
      host_(DescribeHost(options_)),
      pool_(std::make_unique<WorkerPool>(host_.threads, pinned_to_, RunAtOnce(host_))),
      scratch_(std::make_unique<Scratch>()) {}

Engine::~Engine() = default;

bool Engine::PinComputeThread() const { return pinned_to_.empty() || PinThisThread(pinned_to_.front()); }

absl::StatusOr<std::shared_ptr<Model>> Engine::Get(const std::string& name) const {
  std::lock_guard<std::mutex> lock(models_mutex_);
  if (name.empty() && models_.size() == 1) return models_[0];
  for (const std::shared_ptr<Model>& model : models_) {
    if (model->name() == name) return model;
  }
  return NoSuchModel(name, models_);
}

absl::Status Engine::Plan(const std::string& name, const std::string& path) {
  absl::StatusOr<std::shared_ptr<Model>> model = Model::PlanFrom(name, path, options_, backends_);
  if (!model.ok()) return model.status();
  return Register(*std::move(model));
}

absl::Status Engine::PlanBench(const std::string& name, int64_t hidden) { return Register(Model::Bench(name, hidden, options_)); }

absl::Status Engine::Register(std::shared_ptr<Model> model) {
  std::lock_guard<std::mutex> lock(models_mutex_);
  for (const std::shared_ptr<Model>& other : models_) {
    if (other->name() == model->name()) return absl::AlreadyExistsError(absl::StrCat("model name ", model->name(), " is taken"));
  }
  absl::Status fits = CheckMemory(*model);
  if (!fits.ok()) return fits;
  models_.push_back(std::move(model));
  return absl::OkStatus();
}

absl::Status Engine::CheckMemory(const Model& added) const {
  MemoryNeed need = added.need();
  for (const std::shared_ptr<Model>& other : models_) need.Add(other->need());
  for (const auto& [name, past] : past_) {
    if (past.kept != nullptr) need.Add(past.kept->need());
  }
  const absl::Status fits = CheckFits(need, options_.device, options_.memory_limit, options_.lanes);
  if (fits.ok()) return fits;
  return absl::Status(fits.code(), absl::StrCat("model ", added.name(), ": with it ", fits.message()));
}

absl::Status Engine::Load(const std::string& name, const std::function<void(const LoadProgress&)>& progress) {
  absl::StatusOr<std::shared_ptr<Model>> found = Get(name);
  if (!found.ok()) return found.status();
  const LoadTools tools = {*pool_, *scratch_, [this](Accelerator& accelerator) { return LanesOf(accelerator); }};
  return LoadLayers(**found, tools, &compute_mutex_, [&](const LoadProgress& so_far) {
    if (progress) progress(so_far);
    return absl::OkStatus();
  });
}

// `turn` (null: none) is held while a layer is loaded.
absl::Status Engine::LoadLayers(Model& model, const LoadTools& tools, std::mutex* turn, const GoOn& go_on) {
  absl::Status status = model.BeginLoad();
  if (!status.ok()) return status;
  LoadProgress so_far = {.total = model.layer_count()};
  for (int index = 0; index < so_far.total; ++index) so_far.total_file_bytes += model.file_bytes(index);
  for (int index = 0; status.ok() && index < so_far.total; ++index) {
    {
      std::unique_lock<std::mutex> lock;
      if (turn != nullptr) lock = std::unique_lock<std::mutex>(*turn);
      status = model.LoadLayer(index, tools);
    }
    so_far.done = index + 1;
    so_far.layer = model.config().moe_layers[index];
    so_far.file_bytes += model.file_bytes(index);
    if (status.ok() && go_on) status = go_on(so_far);
  }
  model.FinishLoad(status);
  return status;
}

bool Engine::UsesGpu() const {
  std::lock_guard<std::mutex> lock(models_mutex_);
  return std::any_of(models_.begin(), models_.end(), [](const std::shared_ptr<Model>& model) { return model->OnGpu(); });
}

absl::Status Engine::Forward(const std::string& model_name, const ForwardCall& call, MutableTensorView out, ForwardInfo* info) {
  absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  if (!model.ok()) return model.status();
  absl::StatusOr<const LoadedLayer*> layer = (*model)->Ready(call.layer);
  if (!layer.ok()) return layer.status();
  absl::Status valid = ValidateOn(**model, **layer, call, out);
  return valid.ok() ? ForwardReady(**model, **layer, call, out, info) : valid;
}

bool Engine::RowsStandAlone(const std::string& model_name, int number) const {
  const absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  if (!model.ok()) return false;
  const absl::StatusOr<const LoadedLayer*> layer = (*model)->Ready(number);
  return layer.ok() && moed::RowsStandAlone(**layer);
}

void Engine::Forward(const std::string& model_name, std::span<ForwardPart> parts) {
  if (parts.empty()) return;
  const absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  absl::StatusOr<const LoadedLayer*> layer = model.ok() ? (*model)->Ready(parts.front().call.layer) : model.status();
  std::vector<ForwardPart*> together;
  for (ForwardPart& part : parts) {
    part.status = layer.ok() ? ValidateOn(**model, **layer, part.call, part.out) : layer.status();
    if (!part.status.ok()) continue;
    if (part.call.layer != parts.front().call.layer) {
      part.status = absl::InternalError(absl::StrCat("calls that run together: wanted all of layer ", parts.front().call.layer,
                                                     ", got one of layer ", part.call.layer));
    } else if (moed::RowsStandAlone(**layer) && part.out.place == Place::kHost &&
               (together.empty() || MayShareRun(together.front()->call, part.call))) {
      together.push_back(&part);
    } else {
      part.status = ForwardReady(**model, **layer, part.call, part.out, &part.info);
    }
  }
  if (together.size() > 1 && ForwardMerged(**model, **layer, together)) return;
  for (ForwardPart* part : together) part->status = ForwardReady(**model, **layer, part->call, part->out, &part->info);
}

bool Engine::ForwardMerged(const Model& model, const LoadedLayer& layer, std::span<ForwardPart* const> parts) {
  MergedCall merged(model.config(), layer, parts);
  if (merged.empty()) return true;
  const int64_t hidden = model.config().hidden;
  const size_t row_bytes = static_cast<size_t>(hidden) * DTypeBytes(parts.front()->call.hidden.dtype);
  MutableTensorView out = {nullptr, merged.output_dtype(), merged.rows(), hidden};
  absl::StatusOr<CallMemory> x = AllocateFor(layer, static_cast<size_t>(merged.rows()) * row_bytes);
  absl::StatusOr<CallMemory> y = x.ok() ? AllocateFor(layer, out.bytes()) : x.status();
  if (!y.ok()) return merged.Fail(y.status()), true;
  out.data = y->data();
  const ForwardCall call = merged.Gather(x->data(), *pool_);
  ForwardInfo info;
  info.want_routing = merged.WantsRouting();
  const absl::Status status = ForwardReady(model, layer, call, out, &info);
  if (absl::IsInvalidArgument(status)) return false;
  status.ok() ? merged.Scatter(out, info, *pool_) : merged.Fail(status);
  return true;
}

// A validated call of a ready layer.
absl::Status Engine::ForwardReady(const Model& model, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                                  ForwardInfo* info) {
  info->backend = layer.choice.backend->Name();
  info->scheme = Describe(layer.routed->ExecutedScheme());
  info->generation = model.generation();
  info->weights_id = model.weights_id();
  info->layer_weights_id = layer.weights_id;
  info->batch_rows = call.hidden.rows;
  if (layer.lanes == nullptr) return ForwardInTurn(model, layer, call, out, info);
  const absl::Status failure = KnownFailure();
  return failure.ok() ? OfDevice(ForwardInTurn(model, layer, call, out, info)) : failure;
}

absl::Status Engine::ForwardInTurn(const Model& model, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                                   ForwardInfo* info) {
  std::unique_lock<std::mutex> turn(compute_mutex_, std::defer_lock);
  if (layer.device == nullptr) {
    WaitForRows(call, call.hidden.rows);  // before the turn: nobody waits for rows of others
    turn.lock();
  }
  std::optional<LaneSet::Use> lane;
  if (layer.lanes != nullptr) lane.emplace(layer.lanes->Take());
  Scratch& scratch = lane ? lane->scratch() : *scratch_;
  const auto start = std::chrono::steady_clock::now();
  const auto run = layer.device != nullptr ? RunOnDevice : RunForward;
  absl::Status status = run(model.config(), layer, call, out, *pool_, scratch, info);
  info->compute_us = MicrosecondsSince(start);
  return status;
}

absl::StatusOr<SelfCheckRow> Engine::CheckInTurn(const LoadedLayer& layer, const Backend& reference, int64_t tokens,
                                                 uint64_t seed) {
  std::lock_guard<std::mutex> turn(compute_mutex_);  // the reference computes on the host
  if (layer.lanes == nullptr) return CheckLayer(layer, reference, tokens, seed, *pool_, *scratch_);
  const absl::Status failure = KnownFailure();
  if (!failure.ok()) return failure;
  const LaneSet::Use lane = layer.lanes->Take();
  absl::StatusOr<SelfCheckRow> row = CheckLayer(layer, reference, tokens, seed, *pool_, lane.scratch());
  if (!row.ok()) return OfDevice(row.status());
  return row;
}

absl::StatusOr<std::vector<SelfCheckRow>> Engine::SelfCheck(const std::string& model_name, int layer, int64_t tokens,
                                                            uint64_t seed) {
  absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  if (!model.ok()) return model.status();
  const Backend* reference = FindReference(backends_);
  if (reference == nullptr) return absl::FailedPreconditionError("no reference backend is linked in");
  std::vector<SelfCheckRow> rows;
  const std::vector<int> layers = layer < 0 ? (*model)->config().moe_layers : std::vector<int>{layer};
  for (int number : layers) {
    absl::StatusOr<const LoadedLayer*> ready = (*model)->Ready(number);
    if (!ready.ok()) return ready.status();
    if ((*ready)->plan.experts == nullptr) return absl::UnimplementedError(absl::StrCat("model ", model_name, " has no weights to check"));
    absl::StatusOr<SelfCheckRow> row = CheckInTurn(**ready, *reference, tokens, seed + static_cast<uint64_t>(number));
    if (!row.ok()) return row.status();
    rows.push_back(*std::move(row));
  }
  return rows;
}

std::vector<ModelStatus> Engine::Status() const {
  const absl::Status device = KnownFailure();
  std::lock_guard<std::mutex> lock(models_mutex_);
  std::vector<ModelStatus> all;
  for (const std::shared_ptr<Model>& model : models_) all.push_back(model->Status(device));
  return all;
}

absl::StatusOr<ModelStatus> Engine::FindModel(const std::string& name) const {
  absl::StatusOr<std::shared_ptr<Model>> model = Get(name);
  if (!model.ok()) return model.status();
  return (*model)->Status(KnownFailure());
}

absl::StatusOr<ExplainReport> Engine::Explain(const std::string& name) const {
  absl::StatusOr<std::shared_ptr<Model>> model = Get(name);
  if (!model.ok()) return model.status();
  return (*model)->report();
}

}  // namespace moed
