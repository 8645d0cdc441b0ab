// Submissions and completions of rings, as the messages of moe.v1 that they stand for: so that what can be said is checked in one
// place, whatever the transport.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

absl::Status Invalid(const std::string& field, const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": wanted ", wanted, ", got ", got));
}

// The [rows, cols] elements of 4 bytes at `offset` of `region`.
absl::StatusOr<std::span<const std::byte>> Words(const std::string& field, std::span<const std::byte> region, uint64_t offset,
                                                 uint64_t rows, uint64_t cols) {
  uint64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(rows, cols, &bytes) || __builtin_mul_overflow(bytes, uint64_t{4}, &bytes);
  if (offset % ring::kAlignment != 0) {
    return Invalid(field, absl::StrCat("an offset that is a multiple of ", ring::kAlignment), absl::StrCat(offset));
  }
  if (!overflow && offset <= region.size() && bytes <= region.size() - offset) return region.subspan(offset, bytes);
  return Invalid(field, absl::StrCat("a tensor within the ", region.size(), " bytes of the session"),
                 absl::StrCat("[", rows, ", ", cols, "] of 4 bytes from ", offset, " on"));
}

// A tensor with a copy of what lies there.
absl::Status CopyWords(const std::string& field, std::span<const std::byte> region, uint64_t offset, uint64_t rows, uint64_t cols,
                       v1::DType dtype, v1::Tensor* tensor) {
  const absl::StatusOr<std::span<const std::byte>> words = Words(field, region, offset, rows, cols);
  if (!words.ok()) return words.status();
  tensor->set_dtype(dtype);
  tensor->add_shape(static_cast<int64_t>(rows));
  tensor->add_shape(static_cast<int64_t>(cols));
  tensor->set_data(words->data(), words->size());
  return absl::OkStatus();
}

void SetPlace(uint64_t offset, v1::SessionMemory* memory) {
  memory->set_key(std::string(sizeof(ring::SessionKey), '\0'));
  memory->set_offset(offset);
}

template <size_t kSize>
void SetText(const std::string& text, char (&out)[kSize]) {
  out[text.copy(out, kSize - 1)] = 0;
}

absl::Status CopyRouting(const ring::Submission& from, std::span<const std::byte> region, v1::ForwardRequest* request) {
  switch (from.routing) {
    case ring::Routing::kGate: return absl::OkStatus();
    case ring::Routing::kTopK: {
      v1::TopK* const top_k = request->mutable_top_k();
      absl::Status status =
          CopyWords("top_k.ids", region, from.ids_offset, from.rows, from.top_k, v1::DTYPE_I32, top_k->mutable_ids());
      if (!status.ok()) return status;
      return CopyWords("top_k.weights", region, from.weights_offset, from.rows, from.top_k, v1::DTYPE_F32, top_k->mutable_weights());
    }
    case ring::Routing::kLogits:
      return CopyWords("router_logits", region, from.logits_offset, from.rows, from.num_experts, v1::DTYPE_F32,
                       request->mutable_router_logits());
  }
  return Invalid("routing", "0 to 2", absl::StrCat(static_cast<uint32_t>(from.routing)));
}

}  // namespace

absl::Status FromRing(const ring::Submission& from, std::span<const std::byte> region, v1::ForwardRequest* request) {
  constexpr uint32_t kFlags = ring::kRoutedOnly | ring::kReturnRouting | ring::kPerSlot;
  if ((from.flags & ~kFlags) != 0) return Invalid("flags", absl::StrCat("none but ", kFlags), absl::StrCat(from.flags));
  const auto is_set = [](uint8_t byte) { return byte != 0; };
  if (std::any_of(std::begin(from.reserved), std::end(from.reserved), is_set)) return Invalid("reserved", "zero bytes", "others");
  // As int64 in the message, where a negative number is refused.
  request->set_model(from.model);
  request->set_layer(from.layer);
  v1::Tensor* const hidden = request->mutable_hidden();
  hidden->set_dtype(static_cast<v1::DType>(from.hidden_dtype));
  hidden->add_shape(static_cast<int64_t>(from.rows));
  hidden->add_shape(static_cast<int64_t>(from.cols));
  SetPlace(from.hidden_offset, hidden->mutable_session_memory());
  if (from.hidden_dtype == v1::DTYPE_F8E4M3 || from.hidden_dtype == v1::DTYPE_I8) {
    const absl::StatusOr<std::span<const std::byte>> scales = Words("hidden.scales", region, from.scales_offset, from.rows, 1);
    if (!scales.ok()) return scales.status();
    hidden->set_scales(scales->data(), scales->size());
  }
  request->set_output_dtype(static_cast<v1::DType>(from.output_dtype));
  request->set_routed_only((from.flags & ring::kRoutedOnly) != 0);
  request->set_return_routing((from.flags & ring::kReturnRouting) != 0);
  request->set_per_slot((from.flags & ring::kPerSlot) != 0);
  request->set_request_id(from.request_id);
  SetPlace(from.output_offset, request->mutable_output_session_memory());
  return CopyRouting(from, region, request);
}

absl::Status CheckUsedRouting(const ring::Submission& submission, std::span<const std::byte> region, int64_t slots) {
  if ((submission.flags & ring::kReturnRouting) == 0) return absl::OkStatus();
  const uint64_t cols = static_cast<uint64_t>(slots);
  if (cols > submission.top_k) return Invalid("used_ids", absl::StrCat("room for ", slots, " slots a row"), absl::StrCat(submission.top_k));
  absl::Status status = Words("used_ids", region, submission.used_ids_offset, submission.rows, cols).status();
  if (!status.ok()) return status;
  return Words("used_weights", region, submission.used_weights_offset, submission.rows, cols).status();
}

ring::Completion ToCompletion(const ForwardInfo& info, const v1::Timing& timing) {
  ring::Completion completion = {};
  completion.generation = info.generation;
  completion.weights_id = info.weights_id;
  completion.top_k = info.want_routing ? static_cast<uint32_t>(info.top_k) : 0;
  completion.receive_us = timing.receive_us();
  completion.queue_us = timing.queue_us();
  completion.compute_us = timing.compute_us();
  completion.send_us = timing.send_us();
  completion.batch_rows = info.batch_rows;
  SetText(info.backend, completion.backend);
  SetText(info.scheme, completion.scheme);
  return completion;
}

}  // namespace moed
