#include "engine/explain.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint.h"
#include "engine/chunking.h"
#include "engine/model_config.h"

namespace moed {
namespace {

// Bytes and workspace of `desc` on `backend`, added to the explanation.
void AddCost(const Backend& backend, MoeDesc desc, int64_t max_tokens, LayerExplanation* explanation) {
  desc.max_tokens = ChunkRows(backend, desc, max_tokens);
  explanation->bytes += backend.PreparedBytes(desc);
  explanation->need.AddPart(backend, desc);
  explanation->workspace_bytes = std::max<uint64_t>(explanation->workspace_bytes, backend.WorkspaceBytes(desc));
}

std::string Text(const absl::Status& status) { return std::string(status.message().data(), status.message().size()); }

// All layers must fit together; a layer that fits alone was already asked by its backend's verdict.
void CheckTotal(const DeviceInfo& device, ExplainReport* report) {
  for (const LayerExplanation& layer : report->layers) {
    report->need.Add(layer.need);
    if (layer.choice.empty()) report->fits = false;
  }
  const absl::Status fits = CheckFits(report->need, device, /*memory_limit=*/0, report->lanes);
  if (fits.ok()) return;
  report->fits = false;
  if (report->layers.empty()) return;
  std::string& note = report->layers.back().note;
  absl::StrAppend(&note, note.empty() ? "" : "; ", "all layers: ", Text(fits));
}

LayerExplanation ExplainLayer(const LayerPlan& plan, const DeviceInfo& device, std::span<const Backend* const> backends,
                              const Policy& policy, int64_t max_tokens) {
  LayerExplanation explanation;
  explanation.layer = plan.layer;
  explanation.scheme = Describe(plan.routed.scheme);
  const LayerPolicy layer_policy = policy.For(plan.layer, plan.routed.scheme.gate.weights.element);
  absl::StatusOr<Choice> choice = Choose(plan.routed, device, backends, layer_policy);
  if (choice.ok()) {
    explanation.choice = choice->backend->Name();
    explanation.note = choice->note;
    explanation.backends = choice->verdicts;
    AddCost(*choice->backend, plan.routed, max_tokens, &explanation);
  } else {
    explanation.note = Text(choice.status());
    explanation.backends = AskAll(plan.routed, device, backends);
  }
  for (const std::string& note : plan.notes) absl::StrAppend(&explanation.note, explanation.note.empty() ? "" : "; ", note);
  if (!plan.has_shared) return explanation;

  explanation.shared_scheme = Describe(plan.shared.scheme);
  const LayerPolicy shared_policy = policy.For(plan.layer, plan.shared.scheme.gate.weights.element);
  absl::StatusOr<Choice> shared = Choose(plan.shared, device, backends, shared_policy);
  if (shared.ok()) {
    explanation.shared_choice = shared->backend->Name();
    AddCost(*shared->backend, plan.shared, max_tokens, &explanation);
  } else {
    explanation.choice.clear();
    absl::StrAppend(&explanation.note, explanation.note.empty() ? "" : "; ", "shared expert: ", Text(shared.status()));
  }
  return explanation;
}

}  // namespace

absl::StatusOr<ExplainReport> ExplainPlans(std::span<const LayerPlan> plans, const DeviceInfo& device,
                                           std::span<const Backend* const> backends, const Policy& policy, int64_t max_tokens,
                                           int lanes) {
  absl::Status names = CheckNames(policy, backends);
  if (!names.ok()) return names;
  ExplainReport report;
  report.device = device.name;
  report.lanes = lanes;
  for (const LayerPlan& plan : plans) report.layers.push_back(ExplainLayer(plan, device, backends, policy, max_tokens));
  CheckTotal(device, &report);
  return report;
}

absl::StatusOr<std::vector<LayerPlan>> PlanModel(const ModelConfig& config, const Checkpoint& checkpoint) {
  std::vector<LayerPlan> plans;
  for (int layer : config.moe_layers) {
    absl::StatusOr<LayerPlan> plan = PlanLayer(config, checkpoint, layer);
    if (!plan.ok()) return plan.status();
    plans.push_back(*std::move(plan));
  }
  absl::Status unknown = CheckNoUnknownExperts(config, checkpoint, plans);
  if (!unknown.ok()) return unknown;
  return plans;
}

absl::StatusOr<ExplainReport> ExplainCheckpoint(const std::string& path, const DeviceInfo& device,
                                                std::span<const Backend* const> backends, const Policy& policy,
                                                ActivationChoice activations, int layer, int64_t max_tokens, int lanes) {
  absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  absl::StatusOr<std::vector<LayerPlan>> plans = PlanModel(*config, **checkpoint);
  if (!plans.ok()) return plans.status();
  if (layer >= 0) {
    std::erase_if(*plans, [&](const LayerPlan& plan) { return plan.layer != layer; });
    if (plans->empty()) {
      return absl::NotFoundError(absl::StrCat("layer ", layer, " is no MoE layer of ", path, "; it has ", config->moe_layers.size(),
                                              " MoE layers, ", config->moe_layers.front(), " to ", config->moe_layers.back()));
    }
  }
  ApplyActivations(activations, *plans);
  return ExplainPlans(*plans, device, backends, policy, max_tokens, lanes);
}

}  // namespace moed
