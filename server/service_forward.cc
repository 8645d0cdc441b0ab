// Forward: bytes in, bytes out.
//
// The hidden states are copied once, from the transport's slices to where the layer's device reads them (see received_forward.h);
// the rest of the request is parsed into the message that the call then views. The output is computed straight into the slice that
// is sent: the answer's other fields go around it (see OutputHead in wire.h).
//
// For a layer on a GPU a call runs while its hidden states are still being copied: what a compute thread does for it hides behind
// the copy, and the first rows cross the bus before the last ones are there. Whoever copies holds the job, and so the memory on
// both sides, however early the call ends.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "server/message_forward.h"
#include "server/service.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

// On gRPC's own threads, which others wait for: no longer than handing the call to a compute thread and waking that can take.
constexpr std::chrono::microseconds kHere(100);

}  // namespace

// A unary call.
class MoeService::UnaryForward final : public MessageForward {
 public:
  UnaryForward(Call* call, std::unique_ptr<ReceivedForward> parsed, grpc::ByteBuffer* response)
      : MessageForward(std::move(parsed)), call_(call), response_(response),
        deadline_(std::min(call->deadline(), RequestDeadline(request->message(), call->started()))) {}

  TimePoint started() const override { return call_->started(); }
  TimePoint deadline() const override { return deadline_; }
  bool Gone() const override { return call_->Gone(); }
  void Fail(const absl::Status& why) override { call_->Done(why); }
  absl::Status TakeRows(int64_t rows) override { return call_->TakeRows(rows); }
  ForwardRecord& record() override { return call_->record(); }

 private:
  void Deliver(grpc::ByteBuffer response) override {
    *response_ = std::move(response);
    call_->Done(absl::OkStatus());
  }

  Call* const call_;
  grpc::ByteBuffer* const response_;
  const TimePoint deadline_;
};

grpc::ServerUnaryReactor* MoeService::Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  return Handle<ReceivedForward>("Forward", Kind::kComputes, context, request, [&](Call* call, auto parsed) {
    return StartForward(call, std::move(parsed), response);
  });
}

absl::Status MoeService::StartForward(Call* call, std::unique_ptr<ReceivedForward> request, grpc::ByteBuffer* response) {
  call->SetRequestId(request->message().request_id());
  const WorkQueue::Duration here = runs_here_ ? WorkQueue::Duration(kHere) : WorkQueue::Duration();
  return SubmitMessage(std::make_shared<UnaryForward>(call, std::move(request), response), here);
}

// Checks a parsed request and queues it, or runs it on this thread within `here`. After an error neither took place.
absl::Status MoeService::SubmitMessage(const std::shared_ptr<MessageForward>& caller, WorkQueue::Duration here) {
  const v1::ForwardRequest& message = caller->request->message();
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<CheckedForward> checked = CheckForward(message, *models, caller->request->hidden_bytes());
  if (!checked.ok()) return caller->record().SetAsked(*models, message.model(), message.layer()), checked.status();
  caller->record().SetCall(*checked);
  if (absl::Status status = caller->TakeRows(checked->call.hidden.rows); !status.ok()) return status;
  if (absl::Status status = CheckRoomOrTellWhen(queue_, checked->call.hidden.rows); !status.ok()) {
    caller->record().SetDrop(Drop::kQueue);
    return status;
  }
  Sample(*models, message.request_id(), caller->record(), &*checked);
  caller->output = {nullptr, checked->output_dtype, checked->call.hidden.rows, checked->call.hidden.cols};
  caller->output_follows = checked->output_in_answer();
  if (absl::Status status = PlaceHidden(caller, &*checked); !status.ok()) return status;
  ForwardWork work;
  work.checked = *std::move(checked);
  work.want_routing = message.return_routing();
  work.caller = caller;
  if (absl::Status status = UseSession(caller.get(), &work); !status.ok()) return status;
  const bool still_to_copy = work.checked.call.incoming != nullptr;
  absl::Status status = runner_->Submit(std::move(work), still_to_copy ? WorkQueue::Duration() : here);
  if (absl::IsResourceExhausted(status)) caller->record().SetDrop(Drop::kQueue);
  if (status.ok() && still_to_copy) CopyHidden(caller);
  return status;
}

// Gives a call its recording when it is sampled, before anything is made of what came.
void MoeService::Sample(const ModelTable& models, const std::string& request_id, const ForwardRecord& record,
                        CheckedForward* checked) {
  if (recorder_ == nullptr) return;
  const absl::StatusOr<const ModelFacts*> model = models.Find(checked->model);
  if (model.ok()) checked->recording = recorder_->Sample(*checked, **model, request_id, record.transport());
}

// Gives the hidden states that the message does not hold their memory: where the layer's device reads them. Of a layer on a GPU
// they are copied there later.
absl::Status MoeService::PlaceHidden(const std::shared_ptr<MessageForward>& caller, CheckedForward* checked) {
  ReceivedForward* const request = caller->request.get();
  if (checked->must_be_made()) return MakeHidden(caller.get(), checked);
  if (request->hidden_bytes() == 0) return absl::OkStatus();
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked->model, checked->call.layer, request->hidden_bytes());
  if (!memory.ok()) return memory.status();
  caller->hidden.emplace(*std::move(memory));
  request->PlaceHidden(static_cast<std::byte*>(caller->hidden->data()));
  checked->call.hidden.data = caller->hidden->data();
  if (uses_gpu_) {
    checked->call.incoming = request;
  } else {
    CopyHidden(caller);  // processors have other work than to copy, or to wait for who does
  }
  return absl::OkStatus();
}

// Makes hidden states that are not what came, wherever that is.
absl::Status MoeService::MakeHidden(MessageForward* caller, CheckedForward* checked) {
  ReceivedForward* const request = caller->request.get();
  std::optional<CallMemory> held_back;
  const void* came = checked->packed ? checked->packed->codes : checked->rows_data;
  if (request->hidden_bytes() > 0) {
    absl::StatusOr<CallMemory> memory = CallMemory::FromHeap(request->hidden_bytes());
    if (!memory.ok()) return memory.status();
    held_back.emplace(*std::move(memory));
    request->PlaceHidden(static_cast<std::byte*>(held_back->data()));
    request->TakePart();
    request->LetGo();
    came = held_back->data();
  } else if (checked->hidden_session) {
    absl::StatusOr<std::byte*> data =
        OpenSessionPlace("hidden.session_memory", *checked->hidden_session, checked->hidden_bytes(), &caller->hidden_region);
    if (!data.ok()) return data.status();
    came = *data;
  }
  return MakeHiddenOf(came, checked, &caller->hidden);
}

// Makes them of `came`, in memory of the call.
absl::Status MoeService::MakeHiddenOf(const void* came, CheckedForward* checked, std::optional<CallMemory>* hidden) const {
  if (checked->recording != nullptr) checked->recording->KeepHidden(came, checked->hidden_bytes());
  TensorView& view = checked->call.hidden;
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked->model, checked->call.layer, view.bytes());
  if (!memory.ok()) return memory.status();
  hidden->emplace(*std::move(memory));
  view.data = (*hidden)->data();
  const int64_t rows = view.rows / checked->rows_each;
  std::optional<CallMemory> expanded;
  if (checked->packed) {
    void* to = (*hidden)->data();
    if (checked->rows_each != 1) {
      absl::StatusOr<CallMemory> once = CallMemory::FromHeap(view.slice(0, rows).bytes());
      if (!once.ok()) return once.status();
      to = expanded.emplace(*std::move(once)).data();
    }
    ExpandPayload(checked->packed->code, static_cast<const uint8_t*>(came), checked->packed->scales, view.cols, static_cast<uint16_t*>(to));
    came = to;
  }
  if (checked->rows_each == 1) return absl::OkStatus();
  RepeatRows(static_cast<const std::byte*>(came), rows, view.slice(0, 1).bytes(), checked->rows_each,
             static_cast<std::byte*>((*hidden)->data()));
  return absl::OkStatus();
}

// The addresses of what lies in the memory of sessions, which the caller then holds.
absl::Status MoeService::UseSession(MessageForward* caller, ForwardWork* work) {
  CheckedForward& checked = work->checked;
  if (checked.hidden_session && !checked.must_be_made()) {
    absl::StatusOr<std::byte*> data = OpenSessionPlace("hidden.session_memory", *checked.hidden_session, checked.hidden_bytes(),
                                                       &caller->hidden_region);
    if (!data.ok()) return data.status();
    checked.call.hidden.data = *data;
  }
  if (checked.output_session) {
    absl::StatusOr<std::byte*> data =
        OpenSessionPlace("output_session_memory", *checked.output_session, checked.output_bytes(), &caller->output_region);
    if (!data.ok()) return data.status();
    work->output = *data;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> MoeService::OpenSessionPlace(const std::string& field, const SessionPlace& place, size_t bytes,
                                                        std::shared_ptr<Region>* held) const {
  if (sessions_ == nullptr) return absl::UnimplementedError(absl::StrCat(field, ": this server has no session socket"));
  absl::StatusOr<std::shared_ptr<Region>> region = sessions_->Find(place.key);
  if (!region.ok()) return absl::Status(region.status().code(), absl::StrCat(field, ": ", region.status().message()));
  *held = *std::move(region);
  return (*held)->At(field, place.offset, bytes);
}

// Copies them there, with the help of threads that have nothing else to do; where the call was queued before, also of the one that
// computes it.
void MoeService::CopyHidden(const std::shared_ptr<MessageForward>& caller) {
  ReceivedForward* const request = caller->request.get();
  if (request->hidden_bytes() == 0) return;
  const int helpers = uses_gpu_ ? CopyHelpers::For(request->hidden_bytes()) : 0;
  helpers_->Copy(std::shared_ptr<SharedCopy>(caller, request), helpers);
  request->LetGo();
}

}  // namespace moed
