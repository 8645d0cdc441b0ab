#include "server/forward_record.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/log.h"

namespace moed {
namespace {

constexpr size_t kMaxMessage = 2000;  // bytes

// Why a call with this end was dropped, where nobody said more.
Drop DropOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kDeadlineExceeded: return Drop::kExpired;
    case absl::StatusCode::kCancelled: return Drop::kCancelled;
    case absl::StatusCode::kResourceExhausted: return Drop::kMemory;
    default: return Drop::kNone;
  }
}

}  // namespace

std::string PrintableId(const std::string& id) {
  std::string out = id.substr(0, kMaxRequestIdBytes);
  // Free text of a caller must not be able to forge log lines.
  std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
  return out;
}

void ForwardRecord::Begin(CallObserver* observer, Transport transport, size_t received_bytes) {
  begun_ = true;
  observer_ = observer;
  forward_.transport = transport;
  forward_.received_bytes = static_cast<int64_t>(received_bytes);
}

void ForwardRecord::SetAsked(const ModelTable& models, const std::string& model, int layer) {
  const absl::StatusOr<const ModelFacts*> found = models.Find(model);
  if (!found.ok() || !CheckLayer(**found, layer).ok()) return;
  model_ = (*found)->name;
  layer_ = layer;
  layer_observer_ = ObserverOf(**found, layer);
}

void ForwardRecord::SetCall(const CheckedForward& checked) {
  model_ = checked.model;
  layer_ = checked.call.layer;
  layer_observer_ = checked.observer;
  forward_.rows = checked.call.hidden.rows;
  const bool shared_hidden = checked.hidden_session || checked.hidden_memory;
  if (shared_hidden) forward_.received_bytes += static_cast<int64_t>(checked.hidden_bytes());
  const bool message = forward_.transport == Transport::kRpc || forward_.transport == Transport::kStream;
  if (message && (shared_hidden || !checked.output_in_answer())) forward_.transport = Transport::kSession;
}

void ForwardRecord::SetTimes(const ForwardAnswer& answer, int64_t send_us) {
  forward_.receive_us = answer.receive_us;
  forward_.queue_us = answer.queue_us;
  forward_.compute_us = answer.info.compute_us;
  forward_.send_us = send_us;
}

void ForwardRecord::End(const absl::Status& status, std::chrono::steady_clock::time_point started) {
  if (!begun_) return;
  begun_ = false;
  if (observer_ == nullptr) return;
  const auto took = std::chrono::steady_clock::now() - started;
  forward_.total_us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
  forward_.code = status.code();
  if (status.ok()) {
    forward_.drop = Drop::kNone;
  } else {
    forward_.sent_bytes = 0;
    SetDrop(DropOf(status.code()));
  }
  if (layer_observer_ != nullptr) return layer_observer_->Finished(forward_);
  observer_->Finished(forward_);
}

void ForwardRecord::Log(const char* method, const absl::Status& status, int64_t took_us, const std::string& request_id) const {
  const bool our_fault = absl::IsInternal(status) || absl::IsUnknown(status) || absl::IsDataLoss(status);
  const auto level = our_fault ? spdlog::level::err : spdlog::level::debug;
  if (!spdlog::should_log(level)) return;
  try {
    const std::string id = PrintableId(request_id);
    const std::string told = status.ToString().substr(0, kMaxMessage);
    const std::string text = absl::StrCat(method, " ", told, " in ", took_us, " us, request '", id, "'");
    std::vector<LogField> fields = {{"method", method}, {"code", absl::StatusCodeToString(status.code())},
                                    {"request_id", id}, {"total_us", took_us}};
    if (!model_.empty()) {
      fields.insert(fields.end(), {{"model", model_}, {"layer", int64_t{layer_}}, {"rows", forward_.rows}});
    }
    if (status.ok() && !model_.empty()) {
      fields.insert(fields.end(), {{"receive_us", forward_.receive_us}, {"queue_us", forward_.queue_us},
                                   {"compute_us", forward_.compute_us}, {"send_us", forward_.send_us}});
    }
    moed::Log(level, text, fields);
  } catch (const std::bad_alloc&) {  // the line is not worth the call's answer
  }
}

}  // namespace moed
