// Forward: from a request to a call.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

// A checked matrix of the request.
struct Matrix {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* data = nullptr;
};

absl::Status Invalid(const std::string& field, const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": wanted ", wanted, ", got ", got));
}

std::string DTypeText(int dtype) {
  const std::string& name = v1::DType_Name(static_cast<v1::DType>(dtype));
  return name.empty() ? absl::StrCat("the unknown dtype ", dtype) : name;
}

std::optional<PayloadCode> CodeOf(v1::DType dtype) {
  if (dtype == v1::DTYPE_F8E4M3) return PayloadCode::kF8E4m3;
  if (dtype == v1::DTYPE_I8) return PayloadCode::kI8;
  return std::nullopt;
}

int64_t ElementBytes(v1::DType dtype) {
  if (CodeOf(dtype)) return 1;
  return dtype == v1::DTYPE_F32 || dtype == v1::DTYPE_I32 ? 4 : 2;
}

std::optional<DType> ActivationType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32: return DType::kF32;
    case v1::DTYPE_BF16: return DType::kBf16;
    case v1::DTYPE_F16: return DType::kF16;
    default: return std::nullopt;
  }
}

std::string Shape(const v1::Tensor& tensor) {
  std::string text;
  const int shown = std::min(tensor.shape_size(), 8);
  for (int i = 0; i < shown; ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", tensor.shape(i));
  return absl::StrCat("[", text, shown < tensor.shape_size() ? ", ..." : "", "]");
}

// Two dimensions, none negative. Returns the bytes that they need; `got` came. The dtype must be known to be valid.
absl::StatusOr<int64_t> NeededBytes(const std::string& field, const v1::Tensor& tensor, size_t got) {
  if (tensor.shape_size() != 2) {
    return Invalid(field, "a shape of 2 dimensions", absl::StrCat(tensor.shape_size(), ": ", Shape(tensor)));
  }
  const int64_t rows = tensor.shape(0), cols = tensor.shape(1);
  if (rows < 0 || cols < 0) return Invalid(field, "no negative dimension", Shape(tensor));
  int64_t elements = 0, bytes = 0;
  const bool overflow = __builtin_mul_overflow(rows, cols, &elements) ||
                        __builtin_mul_overflow(elements, ElementBytes(tensor.dtype()), &bytes);
  if (!overflow) return bytes;
  return Invalid(field, "a size that fits into 64 bits", absl::StrCat(Shape(tensor), " with ", got, " bytes"));
}

// A matrix in the message, with exactly as many bytes as its shape needs. The dtype must be known to be valid. `held_back` of its
// bytes are not in the message: if any, it gets no address.
absl::StatusOr<Matrix> ReadMatrix(const std::string& field, const v1::Tensor& tensor, size_t held_back = 0) {
  if (tensor.has_device_memory()) return Invalid(field, "data", "device_memory");
  if (tensor.has_session_memory()) return Invalid(field, "data", "session_memory");
  if (!tensor.scales().empty() && !CodeOf(tensor.dtype())) return Invalid(field, "no scales", "some");
  const int64_t got = static_cast<int64_t>(tensor.data().size() + held_back);
  const absl::StatusOr<int64_t> bytes = NeededBytes(field, tensor, static_cast<size_t>(got));
  if (!bytes.ok()) return bytes.status();
  if (*bytes != got) {
    return Invalid(field, absl::StrCat(*bytes, " bytes for ", Shape(tensor), " ", DTypeText(tensor.dtype())),
                   absl::StrCat(got, " bytes"));
  }
  return Matrix{tensor.dtype(), tensor.shape(0), tensor.shape(1), held_back == 0 ? tensor.data().data() : nullptr};
}

absl::StatusOr<SharedPlace> ReadPlace(const std::string& field, const v1::DeviceMemory& memory) {
  SharedPlace place;
  const std::string& handle = memory.cuda_ipc_handle();
  if (handle.size() != place.handle.size()) {
    return Invalid(absl::StrCat(field, ".cuda_ipc_handle"), absl::StrCat(place.handle.size(), " bytes"),
                   absl::StrCat(handle.size()));
  }
  if (memory.offset() % kDeviceAlignment != 0) {
    return Invalid(absl::StrCat(field, ".offset"), absl::StrCat("a multiple of ", kDeviceAlignment), absl::StrCat(memory.offset()));
  }
  std::memcpy(place.handle.data(), handle.data(), handle.size());
  place.offset = memory.offset();
  return place;
}

absl::StatusOr<SessionPlace> ReadSessionPlace(const std::string& field, const v1::SessionMemory& memory) {
  SessionPlace place;
  if (memory.key().size() != place.key.size()) {
    return Invalid(absl::StrCat(field, ".key"), absl::StrCat(place.key.size(), " bytes"), absl::StrCat(memory.key().size()));
  }
  std::memcpy(place.key.data(), memory.key().data(), place.key.size());
  place.offset = memory.offset();
  return place;
}

// The bytes of a matrix that the message does not hold.
absl::StatusOr<int64_t> OutsideBytes(const std::string& field, const v1::Tensor& tensor, size_t held_back) {
  const bool has_data = !tensor.data().empty() || held_back > 0;
  if (has_data + tensor.has_device_memory() + tensor.has_session_memory() > 1) {
    return Invalid(field, "one of data, device_memory and session_memory", "several");
  }
  const absl::StatusOr<int64_t> bytes = NeededBytes(field, tensor, 0);
  if (bytes.ok() && *bytes > kMaxDeviceTensorBytes) {
    return Invalid(field, absl::StrCat("at most ", kMaxDeviceTensorBytes, " bytes"), absl::StrCat(*bytes));
  }
  return bytes;
}

// A matrix in a session's memory, without an address; `place` is where it lies.
absl::StatusOr<Matrix> ReadSessionMatrix(const std::string& field, const v1::Tensor& tensor, size_t held_back,
                                         std::optional<SessionPlace>* place) {
  if (const absl::StatusOr<int64_t> bytes = OutsideBytes(field, tensor, held_back); !bytes.ok()) return bytes.status();
  absl::StatusOr<SessionPlace> read = ReadSessionPlace(absl::StrCat(field, ".session_memory"), tensor.session_memory());
  if (!read.ok()) return read.status();
  *place = *read;
  return Matrix{tensor.dtype(), tensor.shape(0), tensor.shape(1), nullptr};
}

// The same in device memory.
absl::StatusOr<Matrix> ReadDeviceMatrix(const std::string& field, const v1::Tensor& tensor, size_t held_back,
                                        std::optional<SharedPlace>* place) {
  if (const absl::StatusOr<int64_t> bytes = OutsideBytes(field, tensor, held_back); !bytes.ok()) return bytes.status();
  absl::StatusOr<SharedPlace> read = ReadPlace(absl::StrCat(field, ".device_memory"), tensor.device_memory());
  if (!read.ok()) return read.status();
  *place = *read;
  return Matrix{tensor.dtype(), tensor.shape(0), tensor.shape(1), nullptr};
}

// A matrix of one fixed dtype.
absl::StatusOr<Matrix> ReadTyped(const std::string& field, bool present, const v1::Tensor& tensor, v1::DType dtype) {
  if (!present) return Invalid(field, absl::StrCat("a ", DTypeText(dtype), " tensor"), "none");
  if (tensor.dtype() != dtype) return Invalid(field, DTypeText(dtype), DTypeText(tensor.dtype()));
  return ReadMatrix(field, tensor);
}

// The scales of hidden states in one byte an element; `hidden` are these.
absl::Status ReadScales(const v1::Tensor& tensor, PayloadCode code, const Matrix& hidden, CheckedForward* checked) {
  const std::string& scales = tensor.scales();
  if (tensor.has_device_memory()) return Invalid("hidden", "16 or 32 bits an element in device_memory", DTypeText(tensor.dtype()));
  if (hidden.rows > std::numeric_limits<int64_t>::max() / 4 || static_cast<uint64_t>(hidden.rows) * 4 != scales.size()) {
    return Invalid("hidden.scales", absl::StrCat("a float32 for each of ", hidden.rows, " rows"), absl::StrCat(scales.size(), " bytes"));
  }
  checked->packed = {code, hidden.data, {scales.data(), scales.size()}};
  return absl::OkStatus();
}

// Hidden states, wherever they lie; `checked` is told where when that is not the message.
absl::StatusOr<TensorView> ReadHidden(const v1::ForwardRequest& request, const ModelFacts& model, size_t held_back,
                                      CheckedForward* checked) {
  if (!request.has_hidden()) return Invalid("hidden", absl::StrCat("a tensor [M, ", model.hidden, "]"), "none");
  const std::optional<PayloadCode> code = CodeOf(request.hidden().dtype());
  const std::optional<DType> dtype = code ? DType::kBf16 : ActivationType(request.hidden().dtype());
  if (!dtype) {
    return Invalid("hidden", "DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F8E4M3 or DTYPE_I8", DTypeText(request.hidden().dtype()));
  }
  const bool on_device = request.hidden().has_device_memory();
  absl::StatusOr<Matrix> hidden =
      on_device ? ReadDeviceMatrix("hidden", request.hidden(), held_back, &checked->hidden_memory)
      : request.hidden().has_session_memory()
          ? ReadSessionMatrix("hidden", request.hidden(), held_back, &checked->hidden_session)
          : ReadMatrix("hidden", request.hidden(), held_back);
  if (!hidden.ok()) return hidden.status();
  if (hidden->cols != model.hidden) {
    return Invalid("hidden", absl::StrCat("shape [M, ", model.hidden, "] for model '", model.name, "'"),
                   Shape(request.hidden()));
  }
  if (code) {
    if (absl::Status status = ReadScales(request.hidden(), *code, *hidden, checked); !status.ok()) return status;
    return TensorView{nullptr, *dtype, hidden->rows, hidden->cols};
  }
  if (!request.hidden().scales().empty()) return Invalid("hidden", "scales with one byte an element only", DTypeText(request.hidden().dtype()));
  return TensorView{hidden->data, *dtype, hidden->rows, hidden->cols, on_device ? Place::kDevice : Place::kHost};
}

template <typename T>
std::span<const T> Values(const Matrix& matrix) {
  return {static_cast<const T*>(matrix.data), static_cast<size_t>(matrix.rows * matrix.cols)};
}

absl::Status CheckIds(std::span<const int32_t> ids, int64_t slots, int experts) {
  for (size_t at = 0; at < ids.size(); ++at) {
    if (ids[at] >= -1 && ids[at] < experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("ids: row ", at / slots, ", slot ", at % slots, " is ", ids[at],
                                                   ", want -1 to ", experts - 1, " (E = ", experts, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckLogits(std::span<const float> logits, int experts) {
  for (size_t at = 0; at < logits.size(); ++at) {
    if (logits[at] <= std::numeric_limits<float>::max()) continue;  // false for NaN
    return absl::InvalidArgumentError(absl::StrCat("router_logits: row ", at / experts, ", expert ", at % experts, " is ",
                                                   logits[at], ", wanted finite or -Inf"));
  }
  return absl::OkStatus();
}

absl::StatusOr<RoutingByIds> ReadTopK(const v1::TopK& top_k, int64_t rows, const ModelFacts& model) {
  absl::StatusOr<Matrix> ids = ReadTyped("top_k.ids", top_k.has_ids(), top_k.ids(), v1::DTYPE_I32);
  if (!ids.ok()) return ids.status();
  absl::StatusOr<Matrix> weights = ReadTyped("top_k.weights", top_k.has_weights(), top_k.weights(), v1::DTYPE_F32);
  if (!weights.ok()) return weights.status();
  const auto got = [&] { return absl::StrCat("ids ", Shape(top_k.ids()), " and weights ", Shape(top_k.weights())); };
  if (ids->rows != weights->rows || ids->cols != weights->cols) return Invalid("top_k", "ids and weights of one shape", got());
  if (ids->rows != rows) return Invalid("top_k", absl::StrCat(rows, " rows, as hidden has"), got());
  if (ids->cols < 1 || ids->cols > model.num_experts) {
    return Invalid("top_k", absl::StrCat("1 to ", model.num_experts, " slots per row"), got());
  }
  if (absl::Status status = CheckIds(Values<int32_t>(*ids), ids->cols, model.num_experts); !status.ok()) return status;
  return RoutingByIds{static_cast<int>(ids->cols), Values<int32_t>(*ids), Values<float>(*weights)};
}

absl::StatusOr<RoutingByLogits> ReadLogits(const v1::Tensor& tensor, int64_t rows, const ModelFacts& model) {
  absl::StatusOr<Matrix> logits = ReadTyped("router_logits", true, tensor, v1::DTYPE_F32);
  if (!logits.ok()) return logits.status();
  if (logits->rows != rows || logits->cols != model.num_experts) {
    return Invalid("router_logits", absl::StrCat("shape [", rows, ", ", model.num_experts, "]"), Shape(tensor));
  }
  if (absl::Status status = CheckLogits(Values<float>(*logits), model.num_experts); !status.ok()) return status;
  return RoutingByLogits{Values<float>(*logits)};
}

absl::Status ReadRouting(const v1::ForwardRequest& request, const ModelFacts& model, ForwardCall* call) {
  switch (request.routing_case()) {
    case v1::ForwardRequest::kTopK: {
      absl::StatusOr<RoutingByIds> routing = ReadTopK(request.top_k(), call->hidden.rows, model);
      if (!routing.ok()) return routing.status();
      call->routing = *routing;
      return absl::OkStatus();
    }
    case v1::ForwardRequest::kRouterLogits: {
      absl::StatusOr<RoutingByLogits> routing = ReadLogits(request.router_logits(), call->hidden.rows, model);
      if (!routing.ok()) return routing.status();
      call->routing = *routing;
      return absl::OkStatus();
    }
    case v1::ForwardRequest::ROUTING_NOT_SET:
      call->routing = RoutingByGate{};
      return absl::OkStatus();
  }
  return absl::InternalError("routing: a case of the oneof that is not handled");
}

absl::StatusOr<DType> ReadOutputType(const v1::ForwardRequest& request, DType hidden) {
  if (request.output_dtype() == v1::DTYPE_UNSPECIFIED) return hidden;
  const std::optional<DType> dtype = ActivationType(request.output_dtype());
  if (dtype) return *dtype;
  return Invalid("output_dtype", "DTYPE_F32, DTYPE_BF16, DTYPE_F16 or nothing", DTypeText(request.output_dtype()));
}

// Whether the answer can travel. Slots are bounded by the request's own bytes or by the checkpoint's k.
absl::Status CheckAnswerSize(const v1::ForwardRequest& request, const CheckedForward& checked, const ModelFacts& model) {
  const RoutingByIds* by_ids = std::get_if<RoutingByIds>(&checked.call.routing);
  const int64_t slots = by_ids != nullptr ? by_ids->top_k : model.top_k;
  const int64_t rows = checked.call.hidden.rows;
  const int64_t routing = request.return_routing() ? rows * slots * 8 : 0;
  const int64_t bytes = (checked.output_in_answer() ? static_cast<int64_t>(checked.output_bytes()) : 0) + routing;
  if (bytes <= kMaxAnswerTensorBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the answer's tensors for ", rows, " rows: wanted at most ",
                                                   kMaxAnswerTensorBytes, " bytes, got ", bytes,
                                                   "; send fewer rows per call"));
}

// Turns a checked call into that of one slot a row.
absl::Status SplitSlots(const v1::ForwardRequest& request, CheckedForward* checked) {
  if (!request.per_slot()) return absl::OkStatus();
  const RoutingByIds* given = std::get_if<RoutingByIds>(&checked->call.routing);
  if (given == nullptr) return Invalid("per_slot", "top_k with it", "another routing");
  if (checked->hidden_memory || request.has_output_memory()) return Invalid("per_slot", "tensors in messages or sessions", "device_memory");
  ForwardCall& call = checked->call;
  checked->rows_each = given->top_k;
  checked->rows_data = call.hidden.data;
  call.hidden.data = nullptr;
  call.hidden.rows *= given->top_k;  // as many as ids came
  call.routing = RoutingByIds{1, given->ids, given->weights};
  call.routed_only = true;
  return absl::OkStatus();
}

// INVALID_ARGUMENT when the output at offset `output` and the hidden states at `hidden` of the same memory have a byte in common.
absl::Status CheckApart(const std::string& field, uint64_t hidden, uint64_t output, const CheckedForward& checked) {
  const uint64_t low = std::min(hidden, output), high = std::max(hidden, output);
  const uint64_t length = low == hidden ? checked.hidden_bytes() : checked.output_bytes();
  if (high - low >= length || checked.call.hidden.rows == 0) return absl::OkStatus();
  return Invalid(field, "no byte of hidden", absl::StrCat("offsets ", output, " and ", hidden));
}

// Where the output goes, when not into the answer.
absl::Status ReadOutputMemory(const v1::ForwardRequest& request, CheckedForward* checked) {
  if (!request.has_output_memory() && !request.has_output_session_memory()) return absl::OkStatus();
  if (request.has_output_memory() && request.has_output_session_memory()) {
    return Invalid("output_session_memory", "at most one place for the output", "output_memory as well");
  }
  const std::string field = request.has_output_memory() ? "output_memory" : "output_session_memory";
  const int64_t bytes = static_cast<int64_t>(checked->output_bytes());
  if (bytes > kMaxDeviceTensorBytes) {
    return Invalid(field, absl::StrCat("an output of at most ", kMaxDeviceTensorBytes, " bytes"), absl::StrCat(bytes));
  }
  if (request.has_output_session_memory()) {
    absl::StatusOr<SessionPlace> place = ReadSessionPlace(field, request.output_session_memory());
    if (!place.ok()) return place.status();
    checked->output_session = *place;
    const std::optional<SessionPlace>& hidden = checked->hidden_session;
    if (!hidden || hidden->key != place->key) return absl::OkStatus();
    return CheckApart(field, hidden->offset, place->offset, *checked);
  }
  absl::StatusOr<SharedPlace> place = ReadPlace(field, request.output_memory());
  if (!place.ok()) return place.status();
  checked->output_memory = *place;
  const std::optional<SharedPlace>& hidden = checked->hidden_memory;
  if (!hidden || hidden->handle != place->handle) return absl::OkStatus();
  return CheckApart(field, hidden->offset, place->offset, *checked);
}

// Whether CheckKnownFields would find nothing, without its walk through all fields.
bool AllFieldsKnown(const v1::ForwardRequest& request) {
  const auto known = [](const auto&... messages) {
    return (messages.GetReflection()->GetUnknownFields(messages).empty() && ...);
  };
  const auto tensors_known = [&known](const auto&... tensors) {
    return (known(tensors, tensors.device_memory(), tensors.session_memory()) && ...);
  };
  const v1::TopK& top_k = request.top_k();
  return known(request, top_k, request.output_memory(), request.output_session_memory()) &&
         tensors_known(request.hidden(), top_k.ids(), top_k.weights(), request.router_logits());
}

}  // namespace

absl::StatusOr<CheckedForward> CheckForward(const v1::ForwardRequest& request, const ModelTable& models, size_t held_back) {
  if (!AllFieldsKnown(request)) {
    if (absl::Status status = CheckKnownFields(request); !status.ok()) return status;
  }
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return Invalid("request_id", absl::StrCat("at most ", kMaxRequestIdBytes, " bytes"),
                   absl::StrCat(request.request_id().size()));
  }
  absl::StatusOr<const ModelFacts*> model = models.Find(request.model());
  if (!model.ok()) return model.status();
  if (absl::Status status = CheckLayer(**model, request.layer()); !status.ok()) return status;
  CheckedForward checked;
  absl::StatusOr<TensorView> hidden = ReadHidden(request, **model, held_back, &checked);
  if (!hidden.ok()) return hidden.status();
  absl::StatusOr<DType> output_dtype = ReadOutputType(request, hidden->dtype);
  if (!output_dtype.ok()) return output_dtype.status();
  checked.model = (*model)->name;
  checked.observer = ObserverOf(**model, request.layer());
  checked.call = {request.layer(), *hidden, RoutingByGate{}, request.routed_only()};
  checked.output_dtype = *output_dtype;
  if (absl::Status status = ReadRouting(request, **model, &checked.call); !status.ok()) return status;
  if (absl::Status status = SplitSlots(request, &checked); !status.ok()) return status;
  if (absl::Status status = ReadOutputMemory(request, &checked); !status.ok()) return status;
  if (absl::Status status = CheckAnswerSize(request, checked, **model); !status.ok()) return status;
  return checked;
}

absl::StatusOr<std::byte*> AddressIn(const std::string& field, const SharedMemory& memory, const SharedPlace& place, size_t bytes) {
  if (place.offset <= memory.bytes() && bytes <= memory.bytes() - place.offset) {
    return static_cast<std::byte*>(memory.data()) + place.offset;
  }
  return Invalid(field, absl::StrCat("a tensor within the ", memory.bytes(), " bytes of the allocation"),
                 absl::StrCat(bytes, " bytes from ", place.offset, " on"));
}

}  // namespace moed
