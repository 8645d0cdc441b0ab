#include "client/shared_calls.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/messages.h"
#include "client/retry_after.h"

namespace moed::client {
namespace {

template <size_t kSize>
bool Fits(const std::string& text, const char (&)[kSize]) {
  return text.size() < kSize && text.find('\0') == std::string::npos;
}

template <typename T>
std::span<const uint8_t> Bytes(std::span<const T> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

template <typename T>
std::vector<T> Copy(const uint8_t* from, size_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), from, count * sizeof(T));
  return values;
}

std::string TextOf(const char* text, size_t size) { return std::string(text, strnlen(text, size)); }

void SetPlace(const SharedSession& session, uint64_t offset, moe::v1::SessionMemory* memory) {
  memory->set_key(session.key().data(), session.key().size());
  memory->set_offset(offset);
}

}  // namespace

bool SharedCall::CanSay(const ForwardCall& call) {
  const ring::Submission submission = {};
  return Fits(call.model, submission.model) && Fits(call.request_id, submission.request_id);
}

std::optional<SharedCall> SharedCall::Place(const std::shared_ptr<SharedSession>& session, const ForwardCall& call,
                                            std::span<uint8_t> output) {
  std::optional<SharedCall> placed(SharedCall(session, call, output));
  if (!placed->PlaceAll()) return std::nullopt;
  return placed;
}

bool SharedCall::PlaceAll() {
  submission_.layer = call_.layer;
  submission_.hidden_dtype = client::ToWire(call_.hidden.dtype);
  submission_.output_dtype = client::ToWire(OutputType(call_));
  submission_.rows = static_cast<uint64_t>(call_.hidden.rows);
  submission_.cols = static_cast<uint64_t>(call_.hidden.columns);
  submission_.flags = (call_.routed_only ? ring::kRoutedOnly : 0) | (call_.return_routing ? ring::kReturnRouting : 0) |
                      (call_.per_slot ? ring::kPerSlot : 0);
  std::memcpy(submission_.model, call_.model.data(), call_.model.size());
  std::memcpy(submission_.request_id, call_.request_id.data(), call_.request_id.size());
  const std::optional<uint64_t> hidden = In(call_.hidden.data), scales = In(Bytes(call_.hidden_scales));
  std::optional<uint64_t> output = output_.empty() ? std::nullopt : Held(output_);
  output_in_place_ = output.has_value();
  if (!output) output = NewPart(OutputBytes(call_));
  if (!hidden || !scales || !output) return false;
  submission_.hidden_offset = *hidden;
  submission_.scales_offset = *scales;
  submission_.output_offset = *output;
  return PlaceRouting();
}

bool SharedCall::PlaceRouting() {
  const bool by_ids = call_.top_k != 0, by_logits = call_.num_experts != 0;
  std::optional<uint64_t> first = 0, second = 0;
  if (by_ids) {
    submission_.routing = ring::Routing::kTopK;
    submission_.top_k = static_cast<uint64_t>(call_.top_k);
    first = In(Bytes(call_.ids)), second = In(Bytes(call_.weights));
    if (!first || !second) return false;
    submission_.ids_offset = *first, submission_.weights_offset = *second;
  } else if (by_logits) {
    submission_.routing = ring::Routing::kLogits;
    submission_.num_experts = static_cast<uint64_t>(call_.num_experts);
    first = In(Bytes(call_.router_logits));
    if (!first) return false;
    submission_.logits_offset = *first;
  }
  if (!call_.return_routing) return true;
  // Without ids of its own the call does not know k; no model has more slots than this.
  constexpr int64_t kMostSlots = 256;
  if (!by_ids) submission_.top_k = kMostSlots;
  const size_t bytes = static_cast<size_t>(call_.hidden.rows) * submission_.top_k * sizeof(int32_t);
  first = NewPart(bytes), second = NewPart(bytes);
  if (!first || !second) return false;
  submission_.used_ids_offset = *first, submission_.used_weights_offset = *second;
  return true;
}

std::optional<uint64_t> SharedCall::NewPart(size_t bytes) {
  std::optional<SharedSession::Part> part = session_->Allocate(bytes);
  if (!part) return std::nullopt;
  parts_.push_back(*std::move(part));
  return parts_.back().offset();
}

std::optional<uint64_t> SharedCall::Held(std::span<const uint8_t> bytes) {
  std::optional<SharedSession::Part> part = session_->Hold(bytes);
  if (!part) return std::nullopt;
  parts_.push_back(*std::move(part));
  return session_->OffsetOf(bytes);
}

std::optional<uint64_t> SharedCall::In(std::span<const uint8_t> bytes) {
  if (const std::optional<uint64_t> there = Held(bytes)) return there;
  const std::optional<uint64_t> offset = NewPart(bytes.size());
  if (offset && !bytes.empty()) std::memcpy(parts_.back().bytes().data(), bytes.data(), bytes.size());
  return offset;
}

const uint8_t* SharedCall::At(uint64_t offset) const { return session_->data() + offset; }

void SharedCall::TakeOutput(ForwardResult* result) const {
  result->dtype = OutputType(call_);
  result->rows = OutputRows(call_);
  result->columns = call_.hidden.columns;
  if (output_in_place_) return;
  const uint8_t* const from = At(submission_.output_offset);
  const size_t bytes = OutputBytes(call_);
  if (output_.data() != nullptr) {
    std::memcpy(output_.data(), from, bytes);
  } else {
    result->data.assign(reinterpret_cast<const char*>(from), bytes);
  }
}

std::optional<absl::StatusOr<ForwardResult>> SharedCall::Run(const CallOptions& options) {
  std::optional<absl::StatusOr<ring::Completion>> completion = session_->Run(submission_, options.timeout, &parts_);
  if (!completion) return std::nullopt;
  if (!completion->ok()) return absl::StatusOr<ForwardResult>(completion->status());
  return Take(**completion);
}

absl::StatusOr<ForwardResult> SharedCall::Take(const ring::Completion& completion) {
  if (completion.code != 0) {
    absl::Status status(static_cast<absl::StatusCode>(completion.code), TextOf(completion.message, sizeof(completion.message)));
    AddRetryAfter(completion.retry_us, &status);
    return status;
  }
  ForwardResult result;
  TakeOutput(&result);
  result.backend = TextOf(completion.backend, sizeof(completion.backend));
  result.scheme = TextOf(completion.scheme, sizeof(completion.scheme));
  result.generation = completion.generation;
  result.weights_id = completion.weights_id;
  result.timing = {completion.receive_us, completion.queue_us, completion.compute_us, completion.send_us,
                   completion.batch_rows};
  if (!call_.return_routing) return result;
  result.top_k = static_cast<int64_t>(completion.top_k);
  const size_t count = static_cast<size_t>(result.rows * result.top_k);
  result.ids = Copy<int32_t>(At(submission_.used_ids_offset), count);
  result.weights = Copy<float>(At(submission_.used_weights_offset), count);
  return result;
}

moe::v1::ForwardRequest SharedCall::Request() const {
  moe::v1::ForwardRequest request;
  FillWire(call_, &request);
  SetPlace(*session_, submission_.hidden_offset, request.mutable_hidden()->mutable_session_memory());
  SetPlace(*session_, submission_.output_offset, request.mutable_output_session_memory());
  return request;
}

absl::StatusOr<ForwardResult> SharedCall::ResultOf(const moe::v1::ForwardResponse& response) {
  absl::StatusOr<ForwardResult> result = client::ResultOf(call_, response);
  if (result.ok()) TakeOutput(&*result);
  return result;
}

}  // namespace moed::client
