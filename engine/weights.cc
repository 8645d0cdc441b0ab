#include "engine/weights.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/container.h"
#include "engine/container_mxfp4.h"
#include "engine/fused_experts.h"
#include "engine/tensor_finder.h"
#include "engine/weights_names.h"
#include "engine/weights_reader.h"

namespace moed {
namespace {

// Finds one projection as its module is declared, and adds its size and notes to the plan.
absl::StatusOr<LinearSource> PlanLinear(const ModelConfig& config, TensorFinder& finder, LayerPlan* plan,
                                        const std::string& module, int64_t rows, int64_t cols, bool bias) {
  const absl::StatusOr<DeclaredScheme> declared = config.quant->For(module);
  if (!declared.ok()) return declared.status();
  std::string note;
  absl::StatusOr<LinearSource> source = FindLinear(finder, *declared, module, rows, cols, bias, &note);
  if (!source.ok()) return source;
  if (source->scale_slice >= 0 && source->scales && source->scales.info->shape[0] != config.num_experts) {
    return TensorError(source->scales, absl::StrCat("holds scales of ", source->scales.info->shape[0], " experts, want E = ",
                                                    config.num_experts));
  }
  if (!note.empty() && plan->notes.empty()) plan->notes.push_back(std::move(note));
  plan->file_bytes += StoredBytes(*source);
  return source;
}

// All experts of a layer share one scheme per projection: take it from the first, hold the others to it.
absl::Status TakeScheme(const LinearSource& source, bool first, LinearScheme* linear) {
  if (Incomplete(source)) return absl::OkStatus();  // reported with the other missing tensors
  if (first) *linear = source.linear();
  if (source.linear() == *linear) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(source.module, ": is ", Describe(UniformScheme(source.linear())),
                                                 ", want the scheme of the layer's first expert, ",
                                                 Describe(UniformScheme(*linear))));
}

// Experts are collected one by one, and only while their tensors are there: what a plan takes grows with the file, never with
// the number of experts that the config claims. A plan with missing tensors is refused anyway.
void Keep(const TensorFinder& finder, ExpertSource source, std::vector<ExpertSource>* sources) {
  if (finder.missing_count() == 0) sources->push_back(std::move(source));
}

// desc->num_experts experts with modules by `modules_of`, hidden x intermediate each.
template <typename ModulesOf>
absl::Status PlanSeparate(const ModelConfig& config, TensorFinder& finder, LayerPlan* plan, MoeDesc* desc,
                          const ModulesOf& modules_of, std::shared_ptr<const ExpertReader>* reader) {
  std::vector<ExpertSource> sources;
  for (int expert = 0; expert < desc->num_experts; ++expert) {
    const ExpertModules modules = modules_of(expert);
    ExpertSource source;
    const std::tuple<const std::string*, LinearSource*, LinearScheme*, int64_t, int64_t> projections[] = {
        {&modules.gate, &source.gate, &desc->scheme.gate, desc->intermediate, desc->hidden},
        {&modules.up, &source.up, &desc->scheme.up, desc->intermediate, desc->hidden},
        {&modules.down, &source.down, &desc->scheme.down, desc->hidden, desc->intermediate}};
    for (const auto& [module, target, scheme, rows, cols] : projections) {
      absl::StatusOr<LinearSource> linear = PlanLinear(config, finder, plan, *module, rows, cols, desc->biases);
      if (!linear.ok()) return linear.status();
      MOED_RETURN_IF_ERROR(TakeScheme(*linear, expert == 0, scheme));
      *target = *std::move(linear);
    }
    Keep(finder, std::move(source), &sources);
  }
  *reader = MakeSeparateReader(std::move(sources));
  return absl::OkStatus();
}

// gpt-oss per expert: gate and up interleaved in one matrix, "<root><e>.gate_up_proj".
absl::Status PlanInterleaved(const ModelConfig& config, TensorFinder& finder, LayerPlan* plan, const std::string& root) {
  MoeDesc& desc = plan->routed;
  std::vector<ExpertSource> sources;
  for (int expert = 0; expert < desc.num_experts; ++expert) {
    const std::string base = absl::StrCat(root, expert, ".");
    absl::StatusOr<LinearSource> both =
        PlanLinear(config, finder, plan, base + "gate_up_proj", 2 * desc.intermediate, desc.hidden, desc.biases);
    if (!both.ok()) return both.status();
    absl::StatusOr<LinearSource> down =
        PlanLinear(config, finder, plan, base + "down_proj", desc.hidden, desc.intermediate, desc.biases);
    if (!down.ok()) return down.status();
    if (both->linear().weights.group.rows > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(both->module, ": has interleaved rows and ", Describe(both->linear().weights),
                       ": a scale would cover rows of both projections, want one a row or one in all"));
    }
    MOED_RETURN_IF_ERROR(TakeScheme(*both, expert == 0, &desc.scheme.gate));
    MOED_RETURN_IF_ERROR(TakeScheme(*down, expert == 0, &desc.scheme.down));
    Keep(finder, {*std::move(both), {}, *std::move(down)}, &sources);
  }
  desc.scheme.up = desc.scheme.gate;
  plan->experts = MakeInterleavedReader(std::move(sources));
  return absl::OkStatus();
}

// All experts of the layer in a few tensors: blocks of MXFP4 where those exist or are declared, else unquantized.
absl::Status PlanFused(const ModelConfig& config, TensorFinder& finder, LayerPlan* plan, const ExpertNaming& naming) {
  const absl::StatusOr<DeclaredScheme> declared = config.quant->For(naming.root.substr(0, naming.root.size() - 1));
  if (!declared.ok()) return declared.status();
  const bool blocks_declared = declared->container == DeclaredScheme::Container::kMxfp4Fused;
  const FusedNames names = FusedNamesOf(naming);
  const bool plain = finder.Exists(names.gate) || finder.Exists(names.down);
  const bool blocks = HasFusedMxfp4(finder, naming.root);
  if (blocks && (plain || !blocks_declared)) {
    return absl::InvalidArgumentError(absl::StrCat(naming.root, "*: is stored as ",
                                                   ContainerName(DeclaredScheme::Container::kMxfp4Fused),
                                                   plain ? " and unquantized, want one of them" : ", the config declares ",
                                                   plain ? "" : ContainerName(declared->container)));
  }
  if (blocks && naming.layout != FusedLayout::kInterleavedColumns) {
    return absl::InvalidArgumentError(absl::StrCat(naming.root, "*: fused MXFP4 blocks hold gate and up rows in turn in gpt_oss ",
                                                   "files only; how ", config.model_type, " orders them is not known"));
  }
  if (plain && declared->container != DeclaredScheme::Container::kPlain) {
    plan->notes.push_back(absl::StrCat(naming.root, "*: is stored unquantized although the config declares ",
                                       ContainerName(declared->container), "; the tensors count"));
  }
  absl::StatusOr<FusedPlan> fused = blocks_declared && !plain ? PlanFusedMxfp4(config, finder, *declared, naming.root)
                                                              : PlanFusedExperts(config, finder, naming);
  if (!fused.ok()) return fused.status();
  plan->routed.scheme = fused->scheme;
  plan->experts = fused->reader;
  plan->file_bytes += fused->file_bytes;
  return absl::OkStatus();
}

absl::Status PlanRouted(const ModelConfig& config, const Checkpoint& checkpoint, TensorFinder& finder, LayerPlan* plan) {
  MoeDesc& desc = plan->routed;
  desc.num_experts = config.num_experts;
  desc.top_k = config.top_k;
  desc.hidden = config.hidden;
  desc.intermediate = config.intermediate;
  desc.activation = config.activation;
  desc.biases = config.expert_biases;
  desc.weight_on_input = config.router.weight_on_input;
  const ExpertNaming naming = FindExpertNaming(config, checkpoint, plan->layer);
  if (naming.fused) return PlanFused(config, finder, plan, naming);
  if (config.family == Family::kGptOss && finder.Exists(naming.root + "0.gate_up_proj.weight")) {
    return PlanInterleaved(config, finder, plan, naming.root);
  }
  if (config.expert_biases) {
    return absl::InvalidArgumentError(absl::StrCat(
        naming.root,
        "*: experts with biases in tensors of their own: gate and up may be interleaved or not, which the file ",
        "does not say; want gate_up_proj per expert or the fused form (gate_up_proj, gate_up_proj_bias, down_proj, "
        "down_proj_bias)"));
  }
  return PlanSeparate(
      config, finder, plan, &desc, [&](int expert) { return naming.Expert(expert); }, &plan->experts);
}

absl::Status PlanShared(const ModelConfig& config, const Checkpoint& checkpoint, TensorFinder& finder, LayerPlan* plan) {
  if (config.shared_intermediate == 0) return absl::OkStatus();
  plan->has_shared = true;
  MoeDesc& desc = plan->shared;
  desc.num_experts = 1;
  desc.top_k = 1;
  desc.hidden = config.hidden;
  desc.intermediate = config.shared_intermediate;
  desc.activation = config.activation;
  const ExpertModules modules = SharedExpertModules(config, checkpoint, plan->layer);
  return PlanSeparate(
      config, finder, plan, &desc, [&](int) { return modules; }, &plan->shared_expert);
}

// A tensor of the gate and the shape that it must have; no name: the family has none.
struct GateTensor {
  std::string name;
  std::vector<Shape> shapes;
};

std::vector<GateTensor> GateTensors(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const GateNames names = FindGateNames(config, checkpoint, layer);
  return {{names.weight, {Shape{config.num_experts, config.hidden}}},
          {names.bias, {Shape{config.num_experts}}},
          {names.correction_bias, {Shape{config.num_experts}}},
          {names.shared_gate, {Shape{1, config.hidden}, Shape{config.hidden}}}};
}

// The gate's tensors are part of the plan, so that explain and start see a missing or misshapen one.
absl::Status PlanGate(const ModelConfig& config, const Checkpoint& checkpoint, TensorFinder& finder, int layer) {
  for (const GateTensor& wanted : GateTensors(config, checkpoint, layer)) {
    if (wanted.name.empty()) continue;
    const TensorRef tensor = finder.Want(wanted.name);
    MOED_RETURN_IF_ERROR(CheckShape(tensor, wanted.shapes));
    MOED_RETURN_IF_ERROR(CheckFloat(tensor));
  }
  return absl::OkStatus();
}

// The number behind "layers." in a tensor name; -1 without one.
int LayerOf(const std::string& name) {
  const size_t at = name.find("layers.");
  if (at == std::string::npos) return -1;
  int layer = -1;
  for (size_t i = at + 7; i < name.size() && name[i] >= '0' && name[i] <= '9' && layer < 1000000; ++i) {
    layer = std::max(layer, 0) * 10 + (name[i] - '0');
  }
  return layer;
}

// Multi-token prediction: layers past the model's last one, or a block of their own called "mtp".
bool IsPredictionLayer(const ModelConfig& config, const std::string& name) {
  return LayerOf(name) >= config.num_layers || name.rfind("mtp.", 0) == 0 || name.find(".mtp.") != std::string::npos;
}

}  // namespace

absl::StatusOr<LayerPlan> PlanLayer(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  LayerPlan plan;
  plan.layer = layer;
  TensorFinder finder(checkpoint, &plan.used);
  MOED_RETURN_IF_ERROR(PlanRouted(config, checkpoint, finder, &plan));
  MOED_RETURN_IF_ERROR(PlanShared(config, checkpoint, finder, &plan));
  MOED_RETURN_IF_ERROR(PlanGate(config, checkpoint, finder, layer));
  if (finder.missing_count() > 0) {
    return MissingTensors(absl::StrCat(checkpoint.path(), ": layer ", layer), finder.missing(), finder.missing_count());
  }
  return plan;
}

absl::StatusOr<GateWeights> ReadGate(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  GateWeights gate;
  const std::vector<GateTensor> tensors = GateTensors(config, checkpoint, layer);
  std::vector<float>* const targets[] = {&gate.weight, &gate.bias, &gate.correction_bias, &gate.shared_gate};
  for (size_t at = 0; at < tensors.size(); ++at) {
    const std::string& name = tensors[at].name;
    if (name.empty()) continue;
    const TensorRef tensor = checkpoint.Find(name);
    if (!tensor) return MissingTensors(absl::StrCat(checkpoint.path(), ": layer ", layer), {name}, 1);
    MOED_RETURN_IF_ERROR(CheckShape(tensor, tensors[at].shapes));
    MOED_RETURN_IF_ERROR(ReadFloats(tensor, targets[at]));
    const bool ranks_last = targets[at] == &gate.correction_bias;  // -Inf is how a bias says that
    for (size_t element = 0; element < targets[at]->size(); ++element) {
      const float value = (*targets[at])[element];
      if (std::isfinite(value) || (ranks_last && value == -HUGE_VALF)) continue;
      return TensorError(tensor, absl::StrCat("element ", element, " is ", value, ", want a finite number",
                                              ranks_last ? " or -inf" : ""));
    }
  }
  return gate;
}

absl::Status CheckNoUnknownExperts(const ModelConfig& config, const Checkpoint& checkpoint,
                                   std::span<const LayerPlan> plans) {
  std::unordered_set<const TensorInfo*> used;
  for (const LayerPlan& plan : plans) used.insert(plan.used.begin(), plan.used.end());
  std::vector<std::string> unknown;
  for (const auto& [key, tensor] : checkpoint.tensors()) {
    if (used.contains(tensor.info)) continue;
    std::string name(key);
    if (name.find("expert") == std::string::npos || IsPredictionLayer(config, name)) continue;
    unknown.push_back(std::move(name));
  }
  if (unknown.empty()) return absl::OkStatus();
  std::sort(unknown.begin(), unknown.end());
  std::string text = absl::StrCat(checkpoint.path(), ": ", unknown.size(),
                                  " expert tensors are not part of the model as configured (E = ", config.num_experts, ", ",
                                  config.moe_layers.size(), " MoE layers): ");
  for (size_t at = 0; at < std::min<size_t>(unknown.size(), 10); ++at)
    absl::StrAppend(&text, at == 0 ? "" : ", ", unknown[at]);
  if (unknown.size() > 10) absl::StrAppend(&text, ", and ", unknown.size() - 10, " more");
  return absl::InvalidArgumentError(text);
}

}  // namespace moed
