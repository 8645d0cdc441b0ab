#include "engine/model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/chunking.h"

namespace moed {
namespace {

std::string Text(const absl::Status& status) { return std::string(status.message().data(), status.message().size()); }

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, Text(status)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Model>> Model::PlanFrom(const std::string& name, const std::string& path,
                                                       const EngineOptions& options, std::span<const Backend* const> backends) {
  std::shared_ptr<Model> model(new Model);
  model->name_ = name;
  model->path_ = path;
  absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  if (!config.ok()) return config.status();
  model->config_ = *std::move(config);
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  model->checkpoint_ = *std::move(checkpoint);

  absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(model->config_, *model->checkpoint_);
  if (!plans.ok()) return plans.status();
  absl::StatusOr<ExplainReport> report = ExplainPlans(*plans, options.device, backends, options.policy, options.max_tokens);
  if (!report.ok()) return report.status();
  model->report_ = *std::move(report);
  for (LayerPlan& plan : *plans) {
    model->layers_.push_back(std::make_unique<LoadedLayer>());
    model->layers_.back()->plan = std::move(plan);
  }
  model->states_.assign(model->layers_.size(), LayerState::kPlanned);
  absl::Status status = model->ChooseBackends(options, backends);
  if (status.ok()) status = model->CheckMemory(options);
  if (!status.ok()) return status;
  return model;
}

absl::Status Model::ChooseBackends(const EngineOptions& options, std::span<const Backend* const> backends) {
  const auto choose = [&](int layer, MoeDesc* desc, Choice* out) -> absl::Status {
    desc->deterministic = options.deterministic;
    absl::StatusOr<Choice> choice =
        Choose(*desc, options.device, backends, options.policy.For(layer, desc->scheme.gate.weights.element));
    if (!choice.ok()) return choice.status();
    *out = *std::move(choice);
    desc->max_tokens = ChunkRows(*out->backend, *desc, options.max_tokens);
    return absl::OkStatus();
  };
  for (const std::unique_ptr<LoadedLayer>& layer : layers_) {
    LayerPlan& plan = layer->plan;
    absl::Status status = choose(plan.layer, &plan.routed, &layer->choice);
    if (!status.ok()) return Prefixed(absl::StrCat(path_, ": layer ", plan.layer, " (", Describe(plan.routed.scheme), "): "), status);
    if (!plan.has_shared) continue;
    status = choose(plan.layer, &plan.shared, &layer->shared_choice);
    if (!status.ok()) return Prefixed(absl::StrCat(path_, ": layer ", plan.layer, ", shared expert: "), status);
  }
  return absl::OkStatus();
}

absl::Status Model::CheckMemory(const EngineOptions& options) const {
  uint64_t bytes = 0, workspace = 0;
  for (const LayerExplanation& layer : report_.layers) {
    bytes += layer.bytes;
    workspace = std::max(workspace, layer.workspace_bytes);
  }
  uint64_t limit = options.memory_limit;
  if (limit == 0 || (options.device.memory_bytes != 0 && options.device.memory_bytes < limit)) limit = options.device.memory_bytes;
  if (limit == 0 || bytes + workspace <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(path_, ": needs ", bytes, " bytes for experts and ", workspace,
                                                   " for workspace, ", limit, " are allowed",
                                                   limit == options.memory_limit ? " (memory limit)" : " (memory of the machine)"));
}

absl::Status Model::LoadLayer(int index, WorkerPool& pool) {
  LoadedLayer& layer = *layers_[index];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    states_[index] = state_ = LayerState::kLoading;
  }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> routed =
      layer.choice.backend->Prepare(layer.plan.routed, *layer.plan.experts, pool);
  if (!routed.ok()) return routed.status();
  layer.routed = *std::move(routed);
  if (!(layer.routed->ExecutedScheme() == layer.plan.routed.scheme)) {
    return absl::InternalError(absl::StrCat("layer ", layer.plan.layer, ": ", layer.choice.backend->Name(), " executes ",
                                            Describe(layer.routed->ExecutedScheme()), ", want ", Describe(layer.plan.routed.scheme)));
  }
  if (layer.plan.has_shared) {
    absl::StatusOr<std::unique_ptr<PreparedMoe>> shared =
        layer.shared_choice.backend->Prepare(layer.plan.shared, *layer.plan.shared_expert, pool);
    if (!shared.ok()) return shared.status();
    layer.shared = *std::move(shared);
  }
  absl::StatusOr<GateWeights> gate = ReadGate(config_, *checkpoint_, layer.plan.layer);
  if (!gate.ok()) return gate.status();
  layer.gate = *std::move(gate);
  std::lock_guard<std::mutex> lock(mutex_);
  states_[index] = LayerState::kReady;
  return absl::OkStatus();
}

void Model::FinishLoad(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  state_ = status.ok() ? LayerState::kReady : LayerState::kFailed;
  if (status.ok()) return;
  error_ = Text(status);
  for (LayerState& state : states_) {
    if (state != LayerState::kReady) state = LayerState::kFailed;
  }
}

absl::StatusOr<const LoadedLayer*> Model::Ready(int layer) const {
  for (size_t index = 0; index < layers_.size(); ++index) {
    if (layers_[index]->plan.layer != layer) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    if (states_[index] == LayerState::kReady) return layers_[index].get();
    return absl::UnavailableError(absl::StrCat("model ", name_, ", layer ", layer, " is ", LayerStateName(states_[index]),
                                               error_.empty() ? "" : ": ", error_));
  }
  std::string known;
  for (const std::unique_ptr<LoadedLayer>& other : layers_) absl::StrAppend(&known, known.empty() ? "" : ", ", other->plan.layer);
  return absl::NotFoundError(absl::StrCat("model ", name_, " has no MoE layer ", layer, "; its MoE layers are ", known));
}

ModelStatus Model::Status() const {
  ModelStatus status;
  status.name = name_;
  status.path = path_;
  status.hidden = config_.hidden;
  status.num_experts = config_.num_experts;
  status.top_k = config_.top_k;
  status.generation = generation_;
  std::lock_guard<std::mutex> lock(mutex_);
  status.state = state_;
  status.error = error_;
  for (size_t index = 0; index < layers_.size(); ++index) {
    const LoadedLayer& layer = *layers_[index];
    LayerStatus row;
    row.layer = layer.plan.layer;
    row.state = states_[index];
    row.scheme = Describe(layer.plan.routed.scheme);
    row.backend = layer.choice.backend->Name();
    row.note = report_.layers[index].note;
    row.file_bytes = layer.plan.file_bytes;
    if (states_[index] == LayerState::kReady) {
      row.executed_scheme = Describe(layer.routed->ExecutedScheme());
      row.bytes = layer.routed->ResidentBytes() + (layer.shared ? layer.shared->ResidentBytes() : 0);
    }
    status.layers.push_back(std::move(row));
  }
  return status;
}

}  // namespace moed
