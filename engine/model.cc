#include "engine/model.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/chunking.h"
#include "engine/lanes.h"
#include "engine/self_check.h"
#include "kernels/activation_quant.h"
#include "kernels/numa.h"

namespace moed {
namespace {

// The experts of another reader from `first` on.
class OffsetReader : public ExpertReader {
 public:
  OffsetReader(std::shared_ptr<const ExpertReader> all, int first) : all_(std::move(all)), first_(first) {}
  absl::Status Read(int expert, ExpertWeights* out) const override { return all_->Read(first_ + expert, out); }

 private:
  const std::shared_ptr<const ExpertReader> all_;
  const int first_;
};

std::string Text(const absl::Status& status) { return std::string(status.message().data(), status.message().size()); }

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, Text(status)));
}

// The checkpoint's own warnings, and one line for the tensors that no layer uses.
std::vector<std::string> NotRead(const Checkpoint& checkpoint, std::span<const LayerPlan> plans) {
  std::vector<std::string> notes = checkpoint.warnings();
  std::unordered_set<const TensorInfo*> used;
  for (const LayerPlan& plan : plans) used.insert(plan.used.begin(), plan.used.end());
  size_t count = 0;
  absl::string_view first;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (used.contains(tensor.info)) continue;
    if (count++ == 0 || name < first) first = name;
  }
  if (count > 0) {
    notes.push_back(absl::StrCat(checkpoint.path(), ": ", count, " tensors belong to no MoE layer and are not read, ", first,
                                 " among them"));
  }
  return notes;
}

// Leaves the plans of `layers`, all when it is empty.
absl::Status KeepLayers(std::span<const int> layers, const std::string& path, std::vector<LayerPlan>* plans) {
  if (layers.empty()) return absl::OkStatus();
  for (const int layer : layers) {
    if (std::any_of(plans->begin(), plans->end(), [layer](const LayerPlan& plan) { return plan.layer == layer; })) continue;
    std::string known;
    for (const LayerPlan& plan : *plans) absl::StrAppend(&known, known.empty() ? "" : ", ", plan.layer);
    return absl::NotFoundError(absl::StrCat(path, " has no MoE layer ", layer, "; its MoE layers are ", known));
  }
  std::erase_if(*plans, [layers](const LayerPlan& plan) {
    return std::find(layers.begin(), layers.end(), plan.layer) == layers.end();
  });
  return absl::OkStatus();
}

LayerPart RoutedPart(LoadedLayer& layer) {
  return {"", &layer.plan.routed, layer.plan.experts.get(), &layer.choice, &layer.routed};
}

LayerPart SharedPart(LoadedLayer& layer) {
  return {", shared expert", &layer.plan.shared, layer.plan.shared_expert.get(), &layer.shared_choice, &layer.shared};
}

// Whether a scale depends on slots of all experts: h's, and that of inputs which their slots' weights multiply.
bool ScalesSpanExperts(const MoeDesc& desc) {
  const QuantScheme& scheme = desc.scheme;
  return SpansRows(scheme.down.input) || (desc.weight_on_input && (SpansRows(scheme.gate.input) || SpansRows(scheme.up.input)));
}

// The accelerator that has a part of the layer; null: none.
Accelerator* AcceleratorOf(const LoadedLayer& layer) {
  Accelerator* accelerator = layer.routed->accelerator();
  if (accelerator == nullptr && layer.shared != nullptr) accelerator = layer.shared->accelerator();
  return accelerator;
}

// Whether one accelerator has all of the layer.
bool WhollyOnAccelerator(const LoadedLayer& layer) {
  return layer.routed->accelerator() != nullptr &&
         (layer.shared == nullptr || layer.shared->accelerator() == layer.routed->accelerator());
}

std::vector<int> NodesOf(const LoadedLayer& layer) {
  std::vector<std::span<const std::byte>> ranges = layer.routed->ResidentRanges();
  if (layer.shared != nullptr) {
    const std::vector<std::span<const std::byte>> more = layer.shared->ResidentRanges();
    ranges.insert(ranges.end(), more.begin(), more.end());
  }
  return NodesOfMemory(ranges);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Model>> Model::PlanFrom(const std::string& name, const std::string& path,
                                                       const EngineOptions& options, std::span<const Backend* const> backends) {
  std::shared_ptr<Model> model(new Model(options, {backends.begin(), backends.end()}));
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
  model->notes_ = NotRead(*model->checkpoint_, *plans);
  if (absl::Status status = KeepLayers(options.layers, path, &*plans); !status.ok()) return status;
  model->config_.moe_layers.clear();
  for (const LayerPlan& plan : *plans) model->config_.moe_layers.push_back(plan.layer);
  model->TakePlans(*std::move(plans));
  absl::Status range = model->ApplyExpertRange();
  if (!range.ok()) return range;
  std::vector<LayerPlan> executed;
  for (const std::unique_ptr<LoadedLayer>& layer : model->layers_) {
    // Also in the report: a backend may refuse deterministic layers, so that another runs.
    layer->plan.routed.deterministic = layer->plan.shared.deterministic = options.deterministic;
    executed.push_back(layer->plan);
  }
  absl::StatusOr<ExplainReport> report =
      ExplainPlans(executed, options.device, backends, options.policy, options.max_tokens, options.lanes);
  if (!report.ok()) return report.status();
  model->report_ = *std::move(report);
  model->states_.assign(model->layers_.size(), LayerState::kPlanned);
  absl::Status status = model->ChooseBackends();
  if (!status.ok()) return status;
  return model;
}

void Model::TakePlans(std::vector<LayerPlan> plans) {
  for (const LayerPlan& plan : plans) {
    layers_.push_back(std::make_unique<LoadedLayer>());
    layers_.back()->file_scheme = Describe(plan.routed.scheme);
  }
  ApplyActivations(options_.activations, plans);
  std::string kept = KeptActivationsNote(options_.activations, plans);
  if (!kept.empty()) notes_.push_back(std::move(kept));
  for (size_t index = 0; index < plans.size(); ++index) layers_[index]->plan = std::move(plans[index]);
}

absl::Status Model::ApplyExpertRange() {
  const int first = options_.first_expert, end = options_.end_expert;
  if (end == 0 || (first == 0 && end == config_.num_experts)) return absl::OkStatus();
  if (first < 0 || first >= end || end > config_.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": experts ", first, ":", end, " are asked for, want a range within 0:",
                                                   config_.num_experts));
  }
  for (const std::unique_ptr<LoadedLayer>& layer : layers_) {
    if (ScalesSpanExperts(layer->plan.routed)) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": layer ", layer->plan.layer, ": experts ", first, ":", end,
                                                     " cannot be held alone: the scale of their inputs spans the whole request"));
    }
    layer->first_expert = first;
    layer->plan.routed.num_experts = end - first;
    layer->plan.experts = std::make_shared<OffsetReader>(std::move(layer->plan.experts), first);
    if (first > 0) layer->plan.has_shared = false;
  }
  return absl::OkStatus();
}

absl::Status Model::ChooseFor(int layer, std::span<const Backend* const> backends, MoeDesc* desc, Choice* out) const {
  absl::StatusOr<Choice> choice =
      Choose(*desc, options_.device, backends, options_.policy.For(layer, desc->scheme.gate.weights.element));
  if (!choice.ok()) return choice.status();
  *out = *std::move(choice);
  desc->max_tokens = ChunkRows(*out->backend, *desc, options_.max_tokens);
  return absl::OkStatus();
}

absl::Status Model::ChooseBackends() {
  for (const std::unique_ptr<LoadedLayer>& layer : layers_) {
    LayerPlan& plan = layer->plan;
    absl::Status status = ChooseFor(plan.layer, backends_, &plan.routed, &layer->choice);
    if (!status.ok())
      return Prefixed(absl::StrCat(path_, ": layer ", plan.layer, " (", Describe(plan.routed.scheme), "): "), status);
    if (!plan.has_shared) continue;
    status = ChooseFor(plan.layer, backends_, &plan.shared, &layer->shared_choice);
    if (!status.ok()) return Prefixed(absl::StrCat(path_, ": layer ", plan.layer, ", shared expert: "), status);
  }
  on_gpu_ = std::any_of(layers_.begin(), layers_.end(), [](const std::unique_ptr<LoadedLayer>& layer) {
    return layer->choice.backend->OnGpu() || (layer->plan.has_shared && layer->shared_choice.backend->OnGpu());
  });
  return absl::OkStatus();
}

MemoryNeed Model::need() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return report_.need;
}

absl::Status Model::BeginLoad() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != LayerState::kPlanned) {
      return absl::FailedPreconditionError(absl::StrCat("model ", name_, " is ", LayerStateName(state_), ", want planned"));
    }
    state_ = LayerState::kLoading;
  }
  if (checkpoint_ != nullptr) FindTensors();
  return absl::OkStatus();
}

// The tensors that each layer's hash is of.
void Model::FindTensors() {
  std::vector<std::span<const TensorInfo* const>> used;
  for (const std::unique_ptr<LoadedLayer>& layer : layers_) used.push_back(layer->plan.used);
  tensors_ = TensorsOf(*checkpoint_, used);
}

absl::Status Model::LoadLayer(int index, const LoadTools& tools) {
  LoadedLayer& layer = *layers_[index];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    states_[index] = state_ = LayerState::kLoading;
  }
  if (checkpoint_ == nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    states_[index] = LayerState::kReady;
    return absl::OkStatus();
  }
  absl::Status status = PrepareChecked(index, RoutedPart(layer), tools);
  if (status.ok() && layer.plan.has_shared) status = PrepareChecked(index, SharedPart(layer), tools);
  if (!status.ok()) return status;
  absl::StatusOr<GateWeights> gate = ReadGate(config_, *checkpoint_, layer.plan.layer);
  if (!gate.ok()) return gate.status();
  layer.gate = *std::move(gate);
  status = PlaceOnAccelerator(layer, tools);
  if (!status.ok()) return Prefixed(absl::StrCat("layer ", layer.plan.layer, ": "), status);
  layer.numa_nodes = NodesOf(layer);
  absl::StatusOr<std::string> hash = HashTensors(tensors_[index]);  // now that the system has just read them
  if (!hash.ok()) return hash.status();
  layer.weights_id = WeightsId(JoinHashes({&*hash, 1}));
  hashes_.push_back(*std::move(hash));
  std::lock_guard<std::mutex> lock(mutex_);
  states_[index] = LayerState::kReady;
  return absl::OkStatus();
}

absl::Status Model::PlaceOnAccelerator(LoadedLayer& layer, const LoadTools& tools) const {
  Accelerator* accelerator = AcceleratorOf(layer);
  if (accelerator == nullptr) return absl::OkStatus();
  absl::StatusOr<LaneSet*> lanes = tools.lanes(*accelerator);
  if (!lanes.ok()) return lanes.status();
  layer.lanes = *lanes;
  if (!WhollyOnAccelerator(layer)) return absl::OkStatus();
  if (absl::Status status = Assemble(layer); !status.ok()) return status;
  for (size_t lane = 0; lane < layer.lanes->count(); ++lane) {
    const LaneSet::Use use = layer.lanes->Take(lane);
    if (absl::Status status = layer.device->WarmUp(*use.scratch().lane); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Model::Assemble(LoadedLayer& layer) const {
  DeviceLayerParts parts;
  parts.routed = layer.routed.get();
  parts.shared = layer.shared.get();
  parts.num_experts = config_.num_experts;
  parts.first_expert = layer.first_expert;
  parts.top_k = config_.top_k;
  parts.hidden = config_.hidden;
  parts.rule = config_.router;
  parts.gate = layer.gate.weight;
  parts.gate_bias = layer.gate.bias;
  parts.correction_bias = layer.gate.correction_bias;
  parts.shared_gate = layer.gate.shared_gate;
  absl::StatusOr<std::unique_ptr<DeviceLayer>> device = layer.lanes->accelerator().Assemble(parts);
  if (!device.ok()) return device.status();
  layer.device = *std::move(device);
  return absl::OkStatus();
}

absl::StatusOr<SelfCheckRow> Model::CheckLoaded(int number, const LayerPart& part, const Backend& reference,
                                                const LoadTools& tools) const {
  const CheckTarget target = {*part.desc, *part.experts, *part.choice->backend, **part.prepared};
  const uint64_t seed = static_cast<uint64_t>(number);
  Accelerator* accelerator = target.prepared.accelerator();
  if (accelerator == nullptr) return CheckPart(target, reference, kLoadCheck, seed, tools.pool, tools.scratch);
  absl::StatusOr<LaneSet*> lanes = tools.lanes(*accelerator);
  if (!lanes.ok()) return lanes.status();
  const LaneSet::Use lane = (*lanes)->Take();
  return CheckPart(target, reference, kLoadCheck, seed, tools.pool, lane.scratch());
}

absl::Status Model::PrepareChecked(int index, LayerPart part, const LoadTools& tools) {
  const int number = layers_[index]->plan.layer;
  const std::string where = absl::StrCat("layer ", number, part.name);
  const Backend* reference = FindReference(backends_);
  std::vector<const Backend*> left = backends_;
  for (;;) {
    absl::StatusOr<std::unique_ptr<PreparedMoe>> prepared = part.choice->backend->Prepare(*part.desc, *part.experts, tools.pool);
    if (!prepared.ok()) return prepared.status();
    *part.prepared = *std::move(prepared);
    const std::string name = part.choice->backend->Name();
    if (!((*part.prepared)->ExecutedScheme() == part.desc->scheme)) {
      return absl::InternalError(absl::StrCat(where, ": ", name, " executes ", Describe((*part.prepared)->ExecutedScheme()),
                                              ", want ", Describe(part.desc->scheme)));
    }
    if (reference == nullptr || part.choice->backend == reference) return Accept(index, part);
    absl::StatusOr<SelfCheckRow> row = CheckLoaded(number, part, *reference, tools);
    if (!row.ok()) return row.status();
    if (row->passed) return Accept(index, part);

    const std::string why = absl::StrCat("self-check on the loaded weights: relative error ", row->max_rel, ", bound ", row->bound);
    part.prepared->reset();
    if (options_.policy.For(number, part.desc->scheme.gate.weights.element).kind == LayerPolicy::Kind::kRequire) {
      return absl::InternalError(absl::StrCat(where, ": ", name, " is required and failed its ", why));
    }
    std::erase(left, part.choice->backend);
    absl::StatusOr<Choice> next = Choose(*part.desc, options_.device, left, LayerPolicy());
    if (!next.ok()) return Prefixed(absl::StrCat(where, ": ", name, " failed its ", why, "; "), next.status());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      *part.choice = *std::move(next);
    }
    part.desc->max_tokens = ChunkRows(*part.choice->backend, *part.desc, options_.max_tokens);
    Quarantine(index, name, absl::StrCat(part.name, why));
  }
}

// What was prepared stays; the report tells what its weights keep it from.
absl::Status Model::Accept(int index, const LayerPart& part) {
  const std::string note = (*part.prepared)->Note();
  if (note.empty()) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  std::string& all = report_.layers[index].note;
  absl::StrAppend(&all, all.empty() ? "" : "; ", part.choice->backend->Name(), part.name, ": ", note);
  return absl::OkStatus();
}

void Model::Quarantine(int index, const std::string& backend, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  LayerExplanation& explanation = report_.layers[index];
  for (BackendVerdict& verdict : explanation.backends) {
    if (verdict.name == backend) verdict.verdict.reasons.push_back({"quarantined", why});
  }
  explanation.choice = layers_[index]->choice.backend->Name();
  if (layers_[index]->plan.has_shared) explanation.shared_choice = layers_[index]->shared_choice.backend->Name();
  absl::StrAppend(&explanation.note, explanation.note.empty() ? "" : "; ", backend, " is quarantined: ", why);
}

ExplainReport Model::report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

void Model::FinishLoad(const absl::Status& status) {
  tensors_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  if (status.ok() && !hashes_.empty()) {
    weights_hash_ = JoinHashes(hashes_);
    weights_id_.store(WeightsId(weights_hash_));
  }
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

ModelStatus Model::Status(const absl::Status& device) const {
  ModelStatus status;
  status.name = name_;
  status.path = path_;
  status.hidden = config_.hidden;
  status.num_experts = config_.num_experts;
  status.first_expert = options_.first_expert;
  status.end_expert = options_.end_expert == 0 ? config_.num_experts : options_.end_expert;
  status.top_k = config_.top_k;
  status.generation = generation_;
  status.notes = notes_;
  std::lock_guard<std::mutex> lock(mutex_);
  status.state = state_;
  status.error = error_;
  status.weights_hash = weights_hash_;
  for (size_t index = 0; index < layers_.size(); ++index) {
    const LoadedLayer& layer = *layers_[index];
    LayerStatus row;
    row.layer = layer.plan.layer;
    row.state = states_[index];
    row.scheme = layer.file_scheme;
    row.backend = layer.choice.backend->Name();
    row.note = report_.layers[index].note;
    row.file_bytes = layer.plan.file_bytes;
    if (states_[index] == LayerState::kReady) {
      row.executed_scheme = Describe(layer.routed->ExecutedScheme());
      row.bytes = layer.routed->ResidentBytes() + (layer.shared ? layer.shared->ResidentBytes() : 0);
      row.numa_nodes = layer.numa_nodes;
    }
    if (!device.ok() && states_[index] == LayerState::kReady && layer.lanes != nullptr) {
      row.state = status.state = LayerState::kFailed;
      absl::StrAppend(&row.note, row.note.empty() ? "" : "; ", Text(device));
      status.error = Text(device);
    }
    status.layers.push_back(std::move(row));
  }
  return status;
}

}  // namespace moed
