#include "client/messages.h"

#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace moed::client {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors travel as little-endian bytes without conversion");

// OK when `got` elements are exactly rows x columns.
absl::Status CheckCount(const char* what, int64_t rows, int64_t columns, size_t got) {
  if (rows < 0 || columns < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": wanted a shape without negative numbers, got [", rows, ", ", columns, "]"));
  }
  const bool overflow = columns > 0 && rows > std::numeric_limits<int64_t>::max() / columns / 8;
  if (overflow || static_cast<uint64_t>(rows * columns) != got) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": wanted [", rows, ", ", columns, "] elements, got ", got));
  }
  return absl::OkStatus();
}

void SetTensor(moe::v1::DType dtype, int64_t rows, int64_t columns, const void* data, size_t bytes,
               moe::v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->add_shape(rows);
  tensor->add_shape(columns);
  if (bytes > 0) tensor->set_data(data, bytes);
}

absl::Status CheckHidden(const HiddenView& hidden) {
  const size_t element = ElementBytes(hidden.dtype);
  if (hidden.data.size() % element == 0) return CheckCount("hidden", hidden.rows, hidden.columns, hidden.data.size() / element);
  return absl::InvalidArgumentError(absl::StrCat("hidden: wanted a multiple of ", element, " bytes (", DTypeName(hidden.dtype),
                                                 "), got ", hidden.data.size()));
}

bool RoutesByIds(const ForwardCall& call) { return call.top_k != 0 || !call.ids.empty() || !call.weights.empty(); }
bool RoutesByLogits(const ForwardCall& call) { return call.num_experts != 0 || !call.router_logits.empty(); }

absl::Status CheckRouting(const ForwardCall& call) {
  const int64_t rows = call.hidden.rows;
  if (RoutesByIds(call) && RoutesByLogits(call)) {
    return absl::InvalidArgumentError("routing: wanted ids and weights, or router_logits, or neither, got both");
  }
  if (RoutesByIds(call)) {
    if (absl::Status status = CheckCount("ids", rows, call.top_k, call.ids.size()); !status.ok()) return status;
    return CheckCount("weights", rows, call.top_k, call.weights.size());
  }
  return RoutesByLogits(call) ? CheckCount("router_logits", rows, call.num_experts, call.router_logits.size()) : absl::OkStatus();
}

void SetRouting(const ForwardCall& call, moe::v1::ForwardRequest* request) {
  const int64_t rows = call.hidden.rows;
  if (RoutesByIds(call)) {
    SetTensor(moe::v1::DTYPE_I32, rows, call.top_k, call.ids.data(), call.ids.size_bytes(),
              request->mutable_top_k()->mutable_ids());
    SetTensor(moe::v1::DTYPE_F32, rows, call.top_k, call.weights.data(), call.weights.size_bytes(),
              request->mutable_top_k()->mutable_weights());
  } else if (RoutesByLogits(call)) {
    SetTensor(moe::v1::DTYPE_F32, rows, call.num_experts, call.router_logits.data(), call.router_logits.size_bytes(),
              request->mutable_router_logits());
  }
}

// OK when `tensor`, which came with `bytes` of data, is [rows, columns] of `dtype`; `columns` < 0: any.
absl::Status CheckAnswer(const char* what, const moe::v1::Tensor& tensor, size_t bytes, moe::v1::DType dtype, int64_t rows,
                         int64_t columns, size_t element) {
  const bool shape_ok = tensor.shape_size() == 2 && tensor.shape(0) == rows && tensor.shape(1) >= 0 &&
                        (columns < 0 || tensor.shape(1) == columns);
  const bool bytes_ok =
      shape_ok && (rows == 0 ? bytes == 0
                             : bytes % (rows * element) == 0 && bytes / (rows * element) == static_cast<uint64_t>(tensor.shape(1)));
  if (tensor.dtype() == dtype && bytes_ok) return absl::OkStatus();
  std::string got;
  for (int64_t dimension : tensor.shape()) absl::StrAppend(&got, got.empty() ? "[" : ", ", dimension);
  return absl::InternalError(absl::StrCat("answer's ", what, ": wanted ", moe::v1::DType_Name(dtype), " [", rows, ", ",
                                          columns < 0 ? std::string("k") : absl::StrCat(columns), "], got ",
                                          moe::v1::DType_Name(tensor.dtype()), " ", got.empty() ? "[" : got.c_str(), "] in ", bytes,
                                          " bytes"));
}

template <typename T>
std::vector<T> Elements(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

absl::Status TakeRouting(const moe::v1::TopK& routing, ForwardResult* result) {
  const moe::v1::Tensor &ids = routing.ids(), &weights = routing.weights();
  absl::Status status = CheckAnswer("ids", ids, ids.data().size(), moe::v1::DTYPE_I32, result->rows, -1, 4);
  if (!status.ok()) return status;
  result->top_k = ids.shape(1);
  status = CheckAnswer("weights", weights, weights.data().size(), moe::v1::DTYPE_F32, result->rows, result->top_k, 4);
  if (!status.ok()) return status;
  result->ids = Elements<int32_t>(routing.ids().data());
  result->weights = Elements<float>(routing.weights().data());
  return absl::OkStatus();
}

LayerState FromWire(moe::v1::LayerState state) {
  switch (state) {
    case moe::v1::LAYER_STATE_PLANNED: return LayerState::kPlanned;
    case moe::v1::LAYER_STATE_LOADING: return LayerState::kLoading;
    case moe::v1::LAYER_STATE_READY: return LayerState::kReady;
    case moe::v1::LAYER_STATE_FAILED: return LayerState::kFailed;
    default: return LayerState::kUnknown;  // a state that a newer server knows
  }
}

LayerStatus FromWire(const moe::v1::LayerStatus& layer) {
  return {.layer = layer.layer(),
          .state = FromWire(layer.state()),
          .scheme = layer.scheme(),
          .executed_scheme = layer.executed_scheme(),
          .backend = layer.backend(),
          .note = layer.note(),
          .bytes = layer.bytes(),
          .file_bytes = layer.file_bytes(),
          .numa_nodes = {layer.numa_nodes().begin(), layer.numa_nodes().end()}};
}

HostStatus FromWire(const moe::v1::HostStatus& host) {
  return {.threads = host.threads(),
          .threads_limit = host.threads_limit(),
          .pinned = host.pinned(),
          .processors = host.processors(),
          .cpu_quota = host.cpu_quota(),
          .numa_nodes = {host.numa_nodes().begin(), host.numa_nodes().end()},
          .gpu = host.gpu(),
          .gpu_free_bytes = host.gpu_free_bytes()};
}

QueueStatus FromWire(const moe::v1::QueueStatus& queue) {
  return {.waiting = queue.waiting(),
          .waiting_rows = queue.waiting_rows(),
          .accepted = queue.accepted(),
          .refused = queue.refused(),
          .expired = queue.expired(),
          .cancelled = queue.cancelled(),
          .finished = queue.finished(),
          .runs = queue.runs(),
          .rows = queue.rows(),
          .merged = queue.merged()};
}

LayerExplanation FromWire(const moe::v1::LayerExplanation& layer) {
  LayerExplanation result{.layer = layer.layer(),
                          .scheme = layer.scheme(),
                          .choice = layer.choice(),
                          .bytes = layer.bytes(),
                          .workspace_bytes = layer.workspace_bytes(),
                          .backends = {},
                          .note = layer.note(),
                          .shared_scheme = layer.shared_scheme(),
                          .shared_choice = layer.shared_choice()};
  for (const auto& backend : layer.backends()) {
    BackendVerdict& verdict = result.backends.emplace_back();
    verdict.name = backend.name();
    verdict.ok = backend.ok();
    for (const auto& reason : backend.reasons()) verdict.reasons.push_back({reason.code(), reason.text()});
  }
  return result;
}

}  // namespace

moe::v1::DType ToWire(DType dtype) {
  switch (dtype) {
    case DType::kF32: return moe::v1::DTYPE_F32;
    case DType::kBf16: return moe::v1::DTYPE_BF16;
    case DType::kF16: return moe::v1::DTYPE_F16;
    case DType::kF8E4m3: return moe::v1::DTYPE_F8E4M3;
    case DType::kI8: return moe::v1::DTYPE_I8;
  }
  return moe::v1::DTYPE_UNSPECIFIED;
}

DType OutputType(const ForwardCall& call) {
  const DType same = ElementBytes(call.hidden.dtype) == 1 ? DType::kBf16 : call.hidden.dtype;
  return call.output_dtype.value_or(same);
}

absl::Status CheckCall(const ForwardCall& call) {
  if (absl::Status status = CheckHidden(call.hidden); !status.ok()) return status;
  const int64_t scales = ElementBytes(call.hidden.dtype) == 1 ? call.hidden.rows : 0;
  if (absl::Status status = CheckCount("hidden_scales", scales, 1, call.hidden_scales.size()); !status.ok()) return status;
  if (call.per_slot && !RoutesByIds(call)) return absl::InvalidArgumentError("per_slot: wanted ids and weights with it, got none");
  if (call.output_dtype && ElementBytes(*call.output_dtype) == 1) {
    return absl::InvalidArgumentError(absl::StrCat("output_dtype: wanted f32, bf16 or f16, got ", DTypeName(*call.output_dtype)));
  }
  return CheckRouting(call);
}

int64_t OutputRows(const ForwardCall& call) { return call.hidden.rows * (call.per_slot ? call.top_k : 1); }

size_t OutputBytes(const ForwardCall& call) {
  return static_cast<size_t>(OutputRows(call) * call.hidden.columns) * ElementBytes(OutputType(call));
}

void FillWire(const ForwardCall& call, moe::v1::ForwardRequest* request) {
  request->set_model(call.model);
  request->set_layer(call.layer);
  SetTensor(ToWire(call.hidden.dtype), call.hidden.rows, call.hidden.columns, nullptr, 0, request->mutable_hidden());
  if (!call.hidden_scales.empty()) {
    request->mutable_hidden()->set_scales(call.hidden_scales.data(), call.hidden_scales.size_bytes());
  }
  SetRouting(call, request);
  if (call.output_dtype.has_value()) request->set_output_dtype(ToWire(*call.output_dtype));
  request->set_routed_only(call.routed_only);
  request->set_return_routing(call.return_routing);
  request->set_per_slot(call.per_slot);
  request->set_request_id(call.request_id);
}

absl::Status CheckOutput(const ForwardCall& call, const moe::v1::Tensor& output, size_t data_bytes) {
  const DType dtype = OutputType(call);
  return CheckAnswer("output", output, data_bytes, ToWire(dtype), OutputRows(call), call.hidden.columns, ElementBytes(dtype));
}

absl::StatusOr<ForwardResult> ResultOf(const ForwardCall& call, const moe::v1::ForwardResponse& response) {
  ForwardResult result;
  result.dtype = OutputType(call);
  result.rows = OutputRows(call);
  result.columns = call.hidden.columns;
  result.backend = response.backend();
  result.scheme = response.scheme();
  result.generation = response.generation();
  result.weights_id = response.weights_id();
  const moe::v1::Timing& timing = response.timing();
  result.timing = {timing.receive_us(), timing.queue_us(), timing.compute_us(), timing.send_us(),
                   timing.batch_rows()};
  if (!call.return_routing) return result;
  if (absl::Status routing = TakeRouting(response.routing(), &result); !routing.ok()) return routing;
  return result;
}

ServerStatus FromWire(const moe::v1::StatusResponse& response) {
  ServerStatus result{.version = response.version(), .models = {}, .host = FromWire(response.host()),
                      .queue = FromWire(response.queue())};
  for (const auto& model : response.models()) {
    ModelStatus& out = result.models.emplace_back();
    out.name = model.name();
    out.path = model.path();
    out.state = FromWire(model.state());
    out.error = model.error();
    out.generation = model.generation();
    out.weights_hash = model.weights_hash();
    out.hidden = model.hidden();
    out.num_experts = model.num_experts();
    out.top_k = model.top_k();
    for (const auto& layer : model.layers()) out.layers.push_back(FromWire(layer));
  }
  return result;
}

Explanation FromWire(const moe::v1::ExplainResponse& response) {
  Explanation result{.device = response.device(), .layers = {}, .fits = response.fits()};
  for (const auto& layer : response.layers()) result.layers.push_back(FromWire(layer));
  return result;
}

SelfCheckResult FromWire(const moe::v1::SelfCheckResponse& response) {
  SelfCheckResult result{.rows = {}, .passed = response.passed()};
  for (const auto& row : response.rows()) {
    result.rows.push_back(
        {row.layer(), row.backend(), row.scheme(), row.tokens(), row.max_rel(), row.bound(), row.passed()});
  }
  return result;
}

}  // namespace moed::client
