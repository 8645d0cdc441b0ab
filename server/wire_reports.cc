// Models, unknown fields, and the answers that report: Status, Explain, SelfCheck.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/version.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

// What a layer that could run is to a caller.
v1::LayerState ReadyState(Phase phase) {
  switch (phase) {
    case Phase::kLoading: return v1::LAYER_STATE_LOADING;
    case Phase::kServing: return v1::LAYER_STATE_READY;
    case Phase::kDraining: return v1::LAYER_STATE_PLANNED;
  }
  return v1::LAYER_STATE_UNSPECIFIED;
}

v1::LayerState WireState(LayerState state, Phase phase) {
  switch (state) {
    case LayerState::kPlanned: return v1::LAYER_STATE_PLANNED;
    case LayerState::kLoading: return v1::LAYER_STATE_LOADING;
    case LayerState::kReady: return ReadyState(phase);
    case LayerState::kFailed: return v1::LAYER_STATE_FAILED;
  }
  return v1::LAYER_STATE_UNSPECIFIED;
}

void FillLayer(const LayerStatus& layer, Phase phase, v1::LayerStatus* out) {
  out->set_layer(layer.layer);
  out->set_state(WireState(layer.state, phase));
  out->set_scheme(layer.scheme);
  out->set_executed_scheme(layer.executed_scheme);
  out->set_backend(layer.backend);
  out->set_note(layer.note);
  out->set_bytes(layer.bytes);
  out->set_file_bytes(layer.file_bytes);
  for (const int node : layer.numa_nodes) out->add_numa_nodes(node);
}

void FillHost(const HostStatus& host, v1::HostStatus* out) {
  out->set_threads(host.threads);
  out->set_threads_limit(host.threads_limit);
  out->set_pinned(host.pinned);
  out->set_processors(host.processors);
  out->set_cpu_quota(host.cpu_quota);
  for (const int node : host.numa_nodes) out->add_numa_nodes(node);
  out->set_gpu(host.gpu);
  out->set_gpu_free_bytes(host.gpu_free_bytes);
}

void FillVerdict(const BackendVerdict& verdict, v1::BackendVerdict* out) {
  out->set_name(verdict.name);
  out->set_ok(verdict.verdict.ok());
  for (const Reason& reason : verdict.verdict.reasons) {
    v1::Reason* added = out->add_reasons();
    added->set_code(reason.code);
    added->set_text(reason.text);
  }
}

void FillExplanation(const LayerExplanation& layer, v1::LayerExplanation* out) {
  out->set_layer(layer.layer);
  out->set_scheme(layer.scheme);
  out->set_choice(layer.choice);
  out->set_bytes(layer.bytes);
  out->set_workspace_bytes(layer.workspace_bytes);
  out->set_note(layer.note);
  out->set_shared_scheme(layer.shared_scheme);
  out->set_shared_choice(layer.shared_choice);
  for (const BackendVerdict& verdict : layer.backends) FillVerdict(verdict, out->add_backends());
}

}  // namespace

ModelTable::ModelTable(const std::vector<ModelStatus>& models) {
  for (const ModelStatus& model : models) {
    ModelFacts facts{model.name, model.hidden, model.num_experts, model.top_k, {}, model.first_expert, model.end_expert, {}};
    for (const LayerStatus& layer : model.layers) facts.layers.push_back(layer.layer);
    std::sort(facts.layers.begin(), facts.layers.end());
    models_.push_back(std::move(facts));
  }
}

absl::StatusOr<const ModelFacts*> ModelTable::Find(const std::string& name) const {
  if (name.empty() && models_.size() == 1) return &models_.front();
  std::string names;
  for (const ModelFacts& model : models_) {
    if (model.name == name) return &model;
    absl::StrAppend(&names, names.empty() ? "" : ", ", model.name);
  }
  if (name.empty()) return absl::InvalidArgumentError(absl::StrCat("model: wanted one of ", names, ", got no name"));
  return absl::NotFoundError(absl::StrCat("model: wanted one of ", names, ", got '", name.substr(0, 128), "'"));
}

void ModelTable::Observe(CallObserver* observer) {
  for (ModelFacts& model : models_) {
    for (const int layer : model.layers) {
      model.observers.push_back(observer->OfLayer({model.name, layer, model.first_expert, model.end_expert}));
    }
  }
}

std::shared_ptr<LayerObserver> ObserverOf(const ModelFacts& model, int layer) {
  const auto at = std::lower_bound(model.layers.begin(), model.layers.end(), layer);
  if (model.observers.empty() || at == model.layers.end() || *at != layer) return nullptr;
  return model.observers[static_cast<size_t>(at - model.layers.begin())];
}

absl::Status CheckLayer(const ModelFacts& model, int layer) {
  if (std::binary_search(model.layers.begin(), model.layers.end(), layer)) return absl::OkStatus();
  std::string layers;
  for (size_t i = 0; i < model.layers.size();) {  // ranges: 1-3, 5
    size_t last = i;
    while (last + 1 < model.layers.size() && model.layers[last + 1] == model.layers[last] + 1) ++last;
    absl::StrAppend(&layers, layers.empty() ? "" : ", ", model.layers[i]);
    if (last > i) absl::StrAppend(&layers, "-", model.layers[last]);
    i = last + 1;
  }
  return absl::NotFoundError(
      absl::StrCat("layer: wanted a MoE layer of model '", model.name, "' (", layers, "), got ", layer));
}

absl::Status CheckKnownFields(const google::protobuf::Message& message) {
  const google::protobuf::Reflection* reflection = message.GetReflection();
  const google::protobuf::UnknownFieldSet& unknown = reflection->GetUnknownFields(message);
  if (!unknown.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(message.GetTypeName(), ": wanted fields of moe.v1 as this server knows them, got ",
                                                   unknown.field_count(), " unknown or of another type, the first is field ",
                                                   unknown.field(0).number()));
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    // Every message field of the requests is singular.
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE || field->is_repeated()) continue;
    absl::Status status = CheckKnownFields(reflection->GetMessage(message, field));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SelfCheckTokens(const v1::SelfCheckRequest& request) {
  if (request.tokens() == 0) return 8;
  if (request.tokens() >= 1 && request.tokens() <= 64) return request.tokens();
  return absl::InvalidArgumentError(absl::StrCat("tokens: wanted 1 to 64, or 0 for 8, got ", request.tokens()));
}

absl::Status FillHello(const v1::HelloRequest& request, const std::vector<ModelStatus>& models, v1::HelloResponse* response) {
  if (absl::Status known = CheckKnownFields(request); !known.ok()) return known;
  if (request.protocol() != kProtocol) {
    return absl::FailedPreconditionError(absl::StrCat("protocol: wanted version ", kProtocol, " of moe.v1, which this server (moed ", kVersion,
                                                      ") speaks, got ", request.protocol()));
  }
  if (request.client().size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("client: wanted at most ", kMaxRequestIdBytes, " bytes, got ", request.client().size()));
  }
  response->set_protocol(kProtocol);
  response->set_version(kVersion);
  response->set_max_message_bytes(kMaxMessageBytes);
  for (const v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_BF16, v1::DTYPE_F16, v1::DTYPE_F8E4M3, v1::DTYPE_I8}) response->add_hidden_dtypes(dtype);
  for (const ModelStatus& model : models) {
    v1::ModelHello* const out = response->add_models();
    out->set_name(model.name);
    out->set_hidden(model.hidden);
    out->set_num_experts(model.num_experts);
    out->set_top_k(model.top_k);
    out->set_generation(model.generation);
    out->set_first_expert(model.first_expert);
    out->set_end_expert(model.end_expert);
    out->set_weights_hash(model.weights_hash);
    for (const LayerStatus& layer : model.layers) out->add_layers(layer.layer);
  }
  return absl::OkStatus();
}

void FillStatus(const std::vector<ModelStatus>& models, const HostStatus& host, Phase phase, v1::StatusResponse* out) {
  out->set_version(kVersion);
  FillHost(host, out->mutable_host());
  for (const ModelStatus& model : models) {
    v1::ModelStatus* added = out->add_models();
    added->set_name(model.name);
    added->set_path(model.path);
    added->set_state(WireState(model.state, phase));
    added->set_error(model.error.empty() && phase == Phase::kDraining ? "the server is draining" : model.error);
    added->set_generation(model.generation);
    added->set_weights_hash(model.weights_hash);
    added->set_hidden(model.hidden);
    added->set_num_experts(model.num_experts);
    added->set_top_k(model.top_k);
    for (const LayerStatus& layer : model.layers) FillLayer(layer, phase, added->add_layers());
  }
}

void FillExplain(const ExplainReport& report, int layer, v1::ExplainResponse* out) {
  out->set_device(report.device);
  out->set_fits(report.fits);
  for (const LayerExplanation& explanation : report.layers) {
    if (layer < 0 || explanation.layer == layer) FillExplanation(explanation, out->add_layers());
  }
}

void AddSelfCheckRows(const std::vector<SelfCheckRow>& rows, v1::SelfCheckResponse* out) {
  if (out->rows().empty()) out->set_passed(true);
  for (const SelfCheckRow& row : rows) {
    v1::SelfCheckRow* added = out->add_rows();
    added->set_layer(row.layer);
    added->set_backend(row.backend);
    added->set_scheme(row.scheme);
    added->set_tokens(static_cast<int32_t>(row.tokens));
    added->set_max_rel(row.max_rel);
    added->set_bound(row.bound);
    added->set_passed(row.passed);
    if (!row.passed) out->set_passed(false);
  }
}

}  // namespace moed
