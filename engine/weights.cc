#include "engine/weights.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/weights_names.h"
#include "engine/weights_reader.h"

namespace moed {
namespace {

absl::StatusOr<ScaleType> ScaleTypeOf(StDtype dtype) {
  if (dtype == StDtype::kF16) return ScaleType::kF16;
  if (dtype == StDtype::kBf16) return ScaleType::kBf16;
  if (dtype == StDtype::kF32) return ScaleType::kF32;
  return absl::InvalidArgumentError(absl::StrCat("dtype is ", StDtypeName(dtype), ", want F16, BF16 or F32"));
}

absl::StatusOr<ElementType> ElementOf(StDtype dtype) {
  if (dtype == StDtype::kF16) return ElementType::kF16;
  if (dtype == StDtype::kBf16) return ElementType::kBf16;
  if (dtype == StDtype::kF32) return ElementType::kF32;
  return absl::InvalidArgumentError(absl::StrCat("dtype is ", StDtypeName(dtype), ", want F16, BF16 or F32"));
}

// Collects the tensors of one layer: what is missing is remembered, what contradicts is an error at once.
class Finder {
 public:
  Finder(const Checkpoint& checkpoint, LayerPlan* plan) : checkpoint_(checkpoint), plan_(plan) {}

  const std::vector<std::string>& missing() const { return missing_; }

  // The tensor `name`, counted as used; empty and remembered as missing when it is not there.
  TensorRef Want(const std::string& name) {
    const TensorRef tensor = Optional(name);
    if (!tensor) missing_.push_back(name);
    return tensor;
  }

  TensorRef Optional(const std::string& name) {
    const TensorRef tensor = checkpoint_.Find(name);
    if (tensor) plan_->used.push_back(tensor.info);
    return tensor;
  }

  bool Exists(const std::string& name) const { return static_cast<bool>(checkpoint_.Find(name)); }

  static absl::Status Error(const TensorRef& tensor, const std::string& name, const std::string& text) {
    return absl::InvalidArgumentError(absl::StrCat(tensor.file->path(), ": ", name, ": ", text));
  }

  // Shape must be one of `shapes`; an absent tensor passes, it is reported as missing.
  static absl::Status CheckShape(const TensorRef& tensor, const std::string& name, const std::vector<std::vector<int64_t>>& shapes) {
    if (!tensor) return absl::OkStatus();
    if (std::find(shapes.begin(), shapes.end(), tensor.info->shape) != shapes.end()) return absl::OkStatus();
    return Error(tensor, name, absl::StrCat("shape is ", ShapeText(tensor.info->shape), ", want ", ShapeText(shapes[0])));
  }

  static absl::Status CheckDtype(const TensorRef& tensor, const std::string& name, std::vector<StDtype> dtypes) {
    if (!tensor || std::find(dtypes.begin(), dtypes.end(), tensor.info->dtype) != dtypes.end()) return absl::OkStatus();
    std::string wanted;
    for (StDtype dtype : dtypes) absl::StrAppend(&wanted, wanted.empty() ? "" : " or ", StDtypeName(dtype));
    return Error(tensor, name, absl::StrCat("dtype is ", StDtypeName(tensor.info->dtype), ", want ", wanted));
  }

 private:
  const Checkpoint& checkpoint_;
  LayerPlan* const plan_;
  std::vector<std::string> missing_;
};

#define MOED_RETURN_IF_ERROR(expression)      \
  do {                                        \
    absl::Status status_of_step = expression; \
    if (!status_of_step.ok()) return status_of_step; \
  } while (false)

absl::Status FindPlain(Finder& finder, LinearSource* source) {
  const std::string name = source->module + ".weight";
  source->codes = finder.Want(name);
  if (!source->codes) return absl::OkStatus();
  const absl::StatusOr<ElementType> element = ElementOf(source->codes.info->dtype);
  if (!element.ok()) return Finder::Error(source->codes, name, std::string(element.status().message()));
  source->scheme.element = *element;
  return Finder::CheckShape(source->codes, name, {{source->rows, source->cols}});
}

// The scale's type is that of its tensor.
absl::Status TakeScaleType(const std::string& name, LinearSource* source) {
  if (!source->scales) return absl::OkStatus();
  const absl::StatusOr<ScaleType> type = ScaleTypeOf(source->scales.info->dtype);
  if (!type.ok()) return Finder::Error(source->scales, name, std::string(type.status().message()));
  source->scheme.scale = *type;
  return absl::OkStatus();
}

absl::Status FindGptq(Finder& finder, LinearSource* source) {
  const int64_t groups = GroupCount(source->cols, source->scheme.group.cols);
  const std::string& module = source->module;
  source->codes = finder.Want(module + ".qweight");
  source->scales = finder.Want(module + ".scales");
  source->zeros = finder.Want(module + ".qzeros");
  source->g_idx = finder.Optional(module + ".g_idx");
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->codes, module + ".qweight", {{(source->cols + 7) / 8, source->rows}}));
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->scales, module + ".scales", {{groups, source->rows}}));
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->zeros, module + ".qzeros", {{groups, (source->rows + 7) / 8}}));
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->g_idx, module + ".g_idx", {{source->cols}}));
  MOED_RETURN_IF_ERROR(Finder::CheckDtype(source->codes, module + ".qweight", {StDtype::kI32, StDtype::kU32}));
  MOED_RETURN_IF_ERROR(Finder::CheckDtype(source->zeros, module + ".qzeros", {StDtype::kI32, StDtype::kU32}));
  MOED_RETURN_IF_ERROR(Finder::CheckDtype(source->g_idx, module + ".g_idx", {StDtype::kI32}));
  return TakeScaleType(module + ".scales", source);
}

absl::Status FindPacked(Finder& finder, LinearSource* source) {
  const int64_t groups = GroupCount(source->cols, source->scheme.group.cols);
  const std::string& module = source->module;
  source->codes = finder.Want(module + ".weight_packed");
  source->scales = finder.Want(module + ".weight_scale");
  source->shape = finder.Want(module + ".weight_shape");
  std::vector<std::vector<int64_t>> scale_shapes = {{source->rows, groups}};
  if (groups == 1) scale_shapes.push_back({source->rows});
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->codes, module + ".weight_packed", {{source->rows, (source->cols + 7) / 8}}));
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->scales, module + ".weight_scale", scale_shapes));
  MOED_RETURN_IF_ERROR(Finder::CheckShape(source->shape, module + ".weight_shape", {{2}}));
  MOED_RETURN_IF_ERROR(Finder::CheckDtype(source->codes, module + ".weight_packed", {StDtype::kI32, StDtype::kU32}));
  MOED_RETURN_IF_ERROR(Finder::CheckDtype(source->shape, module + ".weight_shape", {StDtype::kI64, StDtype::kI32}));
  return TakeScaleType(module + ".weight_scale", source);
}

// One projection of one expert. Which tensors exist decides its storage; the declaration must know how to read it.
absl::StatusOr<LinearSource> FindLinear(const ModelConfig& config, Finder& finder, LayerPlan* plan, const std::string& module,
                                        int64_t rows, int64_t cols) {
  absl::StatusOr<DeclaredScheme> declared = config.quant->For(module);
  if (!declared.ok()) return declared.status();
  const bool plain = finder.Exists(module + ".weight");
  const bool gptq = finder.Exists(module + ".qweight");
  const bool packed = finder.Exists(module + ".weight_packed");
  if (plain + gptq + packed > 1) {
    return absl::InvalidArgumentError(absl::StrCat(module, ": is stored more than once, want one of .weight, .qweight, .weight_packed"));
  }
  using Container = DeclaredScheme::Container;
  LinearSource source;
  source.module = module;
  source.rows = rows;
  source.cols = cols;
  source.container = gptq ? Container::kGptq : packed ? Container::kPacked : plain ? Container::kPlain : declared->container;
  if (source.container != Container::kPlain && source.container != declared->container) {
    return absl::InvalidArgumentError(absl::StrCat(module, ": is stored as ", ContainerName(source.container),
                                                   ", the config declares ", ContainerName(declared->container)));
  }
  if (plain && declared->container != Container::kPlain && plan->notes.empty()) {
    plan->notes.push_back(absl::StrCat(module, ": is stored unquantized although the config declares ",
                                       ContainerName(declared->container), "; the tensors count"));
  }
  absl::Status status;
  if (source.container == Container::kPlain) {
    status = FindPlain(finder, &source);
  } else {
    source.scheme = declared->linear.weights;
    source.gptq_v2 = declared->gptq_v2;
    status = source.container == Container::kGptq ? FindGptq(finder, &source) : FindPacked(finder, &source);
  }
  if (!status.ok()) return status;
  for (const TensorRef& tensor : {source.codes, source.scales, source.zeros, source.g_idx, source.shape}) {
    if (tensor) plan->file_bytes += tensor.info->bytes;
  }
  return source;
}

// All experts of a layer share one scheme per projection: take it from the first, hold the others to it.
absl::Status TakeScheme(const ExpertSource& expert, bool first, QuantScheme* scheme) {
  const std::pair<const LinearSource*, LinearScheme*> projections[] = {
      {&expert.gate, &scheme->gate}, {&expert.up, &scheme->up}, {&expert.down, &scheme->down}};
  for (const auto& [source, linear] : projections) {
    const bool scaled = source->container != DeclaredScheme::Container::kPlain;
    if (!source->codes || (scaled && !source->scales)) continue;  // missing: reported with the others
    if (first) linear->weights = source->scheme;
    if (source->scheme == linear->weights) continue;
    return absl::InvalidArgumentError(absl::StrCat(source->module, ": is ", Describe(source->scheme),
                                                   ", want the scheme of the layer's first expert, ", Describe(linear->weights)));
  }
  return absl::OkStatus();
}

// `count` experts with modules by `modules_of`, hidden x intermediate each.
template <typename ModulesOf>
absl::Status PlanSeparate(const ModelConfig& config, Finder& finder, LayerPlan* plan, MoeDesc* desc, const ModulesOf& modules_of,
                          std::shared_ptr<const ExpertReader>* reader) {
  std::vector<ExpertSource> sources(desc->num_experts);
  for (int expert = 0; expert < desc->num_experts; ++expert) {
    const ExpertModules modules = modules_of(expert);
    ExpertSource& source = sources[expert];
    const std::tuple<const std::string*, LinearSource*, int64_t, int64_t> projections[] = {
        {&modules.gate, &source.gate, desc->intermediate, desc->hidden},
        {&modules.up, &source.up, desc->intermediate, desc->hidden},
        {&modules.down, &source.down, desc->hidden, desc->intermediate}};
    for (const auto& [module, target, rows, cols] : projections) {
      absl::StatusOr<LinearSource> linear = FindLinear(config, finder, plan, *module, rows, cols);
      if (!linear.ok()) return linear.status();
      *target = *std::move(linear);
    }
    MOED_RETURN_IF_ERROR(TakeScheme(source, expert == 0, &desc->scheme));
  }
  *reader = MakeSeparateReader(std::move(sources));
  return absl::OkStatus();
}

absl::Status PlanFused(const ModelConfig& config, Finder& finder, LayerPlan* plan, const std::string& root) {
  const int64_t experts = config.num_experts, hidden = config.hidden, intermediate = config.intermediate;
  FusedSource source;
  source.experts = experts;
  source.hidden = hidden;
  source.intermediate = intermediate;
  source.gate_up = finder.Want(root + "gate_up_proj");
  source.gate_up_bias = finder.Want(root + "gate_up_proj_bias");
  source.down = finder.Want(root + "down_proj");
  source.down_bias = finder.Want(root + "down_proj_bias");
  const std::tuple<const TensorRef*, const char*, std::vector<int64_t>> tensors[] = {
      {&source.gate_up, "gate_up_proj", {experts, hidden, 2 * intermediate}},
      {&source.gate_up_bias, "gate_up_proj_bias", {experts, 2 * intermediate}},
      {&source.down, "down_proj", {experts, intermediate, hidden}},
      {&source.down_bias, "down_proj_bias", {experts, hidden}}};
  for (const auto& [tensor, name, shape] : tensors) {
    if (!*tensor) continue;
    MOED_RETURN_IF_ERROR(Finder::CheckShape(*tensor, root + name, {shape}));
    MOED_RETURN_IF_ERROR(Finder::CheckDtype(*tensor, root + name, {StDtype::kBf16, StDtype::kF16, StDtype::kF32}));
    plan->file_bytes += tensor->info->bytes;
  }
  if (!finder.missing().empty()) return absl::OkStatus();
  if (source.gate_up.info->dtype != source.down.info->dtype) {
    return Finder::Error(source.down, root + "down_proj",
                         absl::StrCat("dtype is ", StDtypeName(source.down.info->dtype), ", want that of gate_up_proj, ",
                                      StDtypeName(source.gate_up.info->dtype)));
  }
  source.scheme.element = *ElementOf(source.gate_up.info->dtype);
  LinearScheme linear;
  linear.weights = source.scheme;
  plan->routed.scheme = UniformScheme(linear);
  plan->experts = MakeFusedReader(source);
  return absl::OkStatus();
}

absl::Status PlanRouted(const ModelConfig& config, const Checkpoint& checkpoint, Finder& finder, LayerPlan* plan) {
  MoeDesc& desc = plan->routed;
  desc.num_experts = config.num_experts;
  desc.top_k = config.top_k;
  desc.hidden = config.hidden;
  desc.intermediate = config.intermediate;
  desc.activation = config.activation;
  desc.biases = config.expert_biases;
  desc.weight_on_input = config.router.weight_on_input;
  const ExpertNaming naming = FindExpertNaming(config, checkpoint, plan->layer);
  if (naming.fused) return PlanFused(config, finder, plan, naming.root);
  if (config.expert_biases) {
    return absl::InvalidArgumentError(absl::StrCat(
        naming.root, "*: experts with biases in tensors of their own: gate and up may be interleaved or not, which the file ",
        "does not say; want the fused form (gate_up_proj, gate_up_proj_bias, down_proj, down_proj_bias)"));
  }
  return PlanSeparate(config, finder, plan, &desc, [&](int expert) { return naming.Expert(expert); }, &plan->experts);
}

absl::Status PlanShared(const ModelConfig& config, const Checkpoint& checkpoint, Finder& finder, LayerPlan* plan) {
  if (config.shared_intermediate == 0) return absl::OkStatus();
  plan->has_shared = true;
  MoeDesc& desc = plan->shared;
  desc.num_experts = 1;
  desc.top_k = 1;
  desc.hidden = config.hidden;
  desc.intermediate = config.shared_intermediate;
  desc.activation = config.activation;
  const ExpertModules modules = SharedExpertModules(checkpoint, plan->layer);
  return PlanSeparate(config, finder, plan, &desc, [&](int) { return modules; }, &plan->shared_expert);
}

// The gate's tensors are part of the plan, so that explain and start see a missing or misshapen one.
absl::Status PlanGate(const ModelConfig& config, const Checkpoint& checkpoint, Finder& finder, int layer) {
  const GateNames names = FindGateNames(config, checkpoint, layer);
  const std::vector<StDtype> floats = {StDtype::kBf16, StDtype::kF16, StDtype::kF32};
  const std::pair<const std::string*, std::vector<int64_t>> tensors[] = {
      {&names.weight, {config.num_experts, config.hidden}},
      {&names.bias, {config.num_experts}},
      {&names.correction_bias, {config.num_experts}}};
  for (const auto& [name, shape] : tensors) {
    if (name->empty()) continue;
    const TensorRef tensor = finder.Want(*name);
    MOED_RETURN_IF_ERROR(Finder::CheckShape(tensor, *name, {shape}));
    MOED_RETURN_IF_ERROR(Finder::CheckDtype(tensor, *name, floats));
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

}  // namespace

absl::StatusOr<LayerPlan> PlanLayer(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  LayerPlan plan;
  plan.layer = layer;
  Finder finder(checkpoint, &plan);
  MOED_RETURN_IF_ERROR(PlanRouted(config, checkpoint, finder, &plan));
  MOED_RETURN_IF_ERROR(PlanShared(config, checkpoint, finder, &plan));
  MOED_RETURN_IF_ERROR(PlanGate(config, checkpoint, finder, layer));
  if (!finder.missing().empty()) return MissingTensors(absl::StrCat(checkpoint.path(), ": layer ", layer), finder.missing());
  return plan;
}

absl::StatusOr<GateWeights> ReadGate(const ModelConfig& config, const Checkpoint& checkpoint, int layer) {
  const GateNames names = FindGateNames(config, checkpoint, layer);
  GateWeights gate;
  const std::pair<const std::string*, std::vector<float>*> tensors[] = {
      {&names.weight, &gate.weight}, {&names.bias, &gate.bias}, {&names.correction_bias, &gate.correction_bias}};
  for (const auto& [name, target] : tensors) {
    if (name->empty()) continue;
    const TensorRef tensor = checkpoint.Find(*name);
    if (!tensor) return MissingTensors(absl::StrCat(checkpoint.path(), ": layer ", layer), {*name});
    MOED_RETURN_IF_ERROR(ReadFloats(tensor, *name, target));
    for (size_t at = 0; at < target->size(); ++at) {
      if (std::isfinite((*target)[at])) continue;
      return Finder::Error(tensor, *name, absl::StrCat("element ", at, " is ", (*target)[at], ", want a finite number"));
    }
  }
  return gate;
}

absl::Status CheckNoUnknownExperts(const ModelConfig& config, const Checkpoint& checkpoint, std::span<const LayerPlan> plans) {
  std::unordered_set<const TensorInfo*> used;
  for (const LayerPlan& plan : plans) used.insert(plan.used.begin(), plan.used.end());
  std::vector<std::string> unknown;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (name.find("expert") == std::string::npos || used.contains(tensor.info)) continue;
    const int layer = LayerOf(name);
    if (layer >= config.num_layers) continue;
    unknown.push_back(name);
  }
  if (unknown.empty()) return absl::OkStatus();
  std::sort(unknown.begin(), unknown.end());
  std::string text = absl::StrCat(checkpoint.path(), ": ", unknown.size(), " expert tensors are not part of the model as configured (E = ",
                                  config.num_experts, ", ", config.moe_layers.size(), " MoE layers): ");
  for (size_t at = 0; at < std::min<size_t>(unknown.size(), 10); ++at) absl::StrAppend(&text, at == 0 ? "" : ", ", unknown[at]);
  if (unknown.size() > 10) absl::StrAppend(&text, ", and ", unknown.size() - 10, " more");
  return absl::InvalidArgumentError(text);
}

}  // namespace moed
