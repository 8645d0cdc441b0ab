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
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/service.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using std::chrono::steady_clock;

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

// A slice of `bytes` that owns `memory`: it goes back where it came from with the slice's last reference, on whatever thread.
grpc::Slice SliceOf(CallMemory memory, size_t bytes) {
  auto owner = std::make_unique<CallMemory>(std::move(memory));
  void* data = owner->data();
  return grpc::Slice(data, bytes, [](void* held) { delete static_cast<CallMemory*>(held); }, owner.release());
}

}  // namespace

// A parsed call on its way through the queue. `checked` views `*request` and `hidden`.
struct MoeService::ForwardJob {
  Call* call;
  grpc::ByteBuffer* response;
  std::unique_ptr<ReceivedForward> request;
  std::optional<CallMemory> hidden;  // nothing when they are in the message or in device memory
  CheckedForward checked;
  steady_clock::time_point queued;

  // While it runs.
  MutableTensorView out;
  grpc::Slice output;  // owns out, unless that is in device memory
  std::shared_ptr<const SharedMemory> hidden_memory, output_memory;
  grpc::Slice head;          // of the answer: what comes before the output's data
  v1::ForwardResponse rest;  // and what comes after, as far as it is known
};

grpc::ServerUnaryReactor* MoeService::Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  return Handle<ReceivedForward>("Forward", Kind::kComputes, context, request, [&](Call* call, auto parsed) {
    return StartForward(call, std::move(parsed), response);
  });
}

absl::Status MoeService::StartForward(Call* call, std::unique_ptr<ReceivedForward> request, grpc::ByteBuffer* response) {
  auto job = std::make_shared<ForwardJob>();
  job->call = call;
  job->response = response;
  job->request = std::move(request);
  const v1::ForwardRequest& message = job->request->message();
  absl::StatusOr<CheckedForward> checked = CheckForward(message, models_, job->request->hidden_bytes());
  if (!checked.ok()) return checked.status();
  job->checked = *std::move(checked);
  call->SetRequestId(message.request_id());
  if (absl::Status status = PlaceHidden(job.get()); !status.ok()) return status;
  if (!uses_gpu_) CopyHidden(job);  // processors have other work than to copy, or to wait for who does
  job->queued = steady_clock::now();
  absl::Status status = call->Queue(queue_, [this, job](WorkQueue::Duration) {
    job->call->Done(RunForward(job.get()));
    return WorkQueue::Next::kDone;
  });
  if (status.ok() && uses_gpu_) CopyHidden(job);
  return status;
}

// Gives the hidden states that the message does not hold their memory: where the layer's device reads them.
absl::Status MoeService::PlaceHidden(ForwardJob* job) {
  if (job->request->hidden_bytes() == 0) return absl::OkStatus();
  CheckedForward& checked = job->checked;
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked.model, checked.call.layer, job->request->hidden_bytes());
  if (!memory.ok()) return memory.status();
  job->hidden.emplace(*std::move(memory));
  job->request->PlaceHidden(static_cast<std::byte*>(job->hidden->data()));
  checked.call.hidden.data = job->hidden->data();
  if (uses_gpu_) checked.call.incoming = job->request.get();
  return absl::OkStatus();
}

// Copies them there, with the help of threads that have nothing else to do; where the call was queued before, also of the one that
// computes it.
void MoeService::CopyHidden(const std::shared_ptr<ForwardJob>& job) {
  ReceivedForward* const request = job->request.get();
  if (request->hidden_bytes() == 0) return;
  const int helpers = uses_gpu_ ? CopyHelpers::For(request->hidden_bytes()) : 0;
  helpers_->Copy(std::shared_ptr<SharedCopy>(job, request), helpers);
  request->LetGo();
}

// The address of a place in device memory; `held` keeps it open.
absl::StatusOr<std::byte*> MoeService::OpenPlace(const std::string& field, const CheckedForward& checked, const SharedPlace& place,
                                                 size_t bytes, std::shared_ptr<const SharedMemory>* held) {
  absl::StatusOr<std::shared_ptr<const SharedMemory>> memory =
      engine_->OpenShared(checked.model, checked.call.layer, place.handle);
  if (!memory.ok()) return absl::Status(memory.status().code(), absl::StrCat(field, ": ", memory.status().message()));
  *held = *std::move(memory);
  return AddressIn(field, **held, place, bytes);
}

// Finds what the message says about memory: addresses in device memory, or new memory for the output.
absl::Status MoeService::PrepareMemory(ForwardJob* job) {
  CheckedForward& checked = job->checked;
  TensorView& hidden = checked.call.hidden;
  job->out = {nullptr, checked.output_dtype, hidden.rows, hidden.cols};
  if (checked.hidden_memory) {
    absl::StatusOr<std::byte*> data =
        OpenPlace("hidden.device_memory", checked, *checked.hidden_memory, hidden.bytes(), &job->hidden_memory);
    if (!data.ok()) return data.status();
    hidden.data = *data;
  }
  if (checked.output_memory) {
    absl::StatusOr<std::byte*> data =
        OpenPlace("output_memory", checked, *checked.output_memory, checked.output_bytes(), &job->output_memory);
    if (!data.ok()) return data.status();
    job->out.data = *data;
    job->out.place = Place::kDevice;
    return absl::OkStatus();
  }
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked.model, checked.call.layer, checked.output_bytes());
  if (!memory.ok()) return memory.status();
  job->out.data = memory->data();
  job->output = SliceOf(*std::move(memory), checked.output_bytes());
  return absl::OkStatus();
}

absl::Status MoeService::RunForward(ForwardJob* job) {
  // Before any answer, after which their owner may free them.
  const absl::Cleanup let_go = [job] { job->hidden_memory.reset(), job->output_memory.reset(); };
  if (absl::Status status = PrepareMemory(job); !status.ok()) return status;
  const CheckedForward& checked = job->checked;
  job->head = grpc::Slice(OutputHead(checked.output_dtype, job->out.rows, job->out.cols, !checked.output_memory));
  job->rest = BeginAnswer(job->request->message());
  ForwardInfo info;
  info.want_routing = job->request->message().return_routing();
  absl::Status status = engine_->Forward(checked.model, checked.call, job->out, &info);
  if (!status.ok()) return status;  // the output is dropped: of a layer on an accelerator it may be partly written
  return AnswerForward(job, info);
}

absl::Status MoeService::AnswerForward(ForwardJob* job, const ForwardInfo& info) {
  const int64_t rows = job->out.rows;
  const steady_clock::time_point computed = steady_clock::now();
  if (info.want_routing && info.ids.size() != static_cast<size_t>(rows * info.top_k)) {
    return absl::InternalError(absl::StrCat("the engine returned ", info.ids.size(), " ids for ", rows, " rows"));
  }
  EndAnswer(info, rows, &job->rest);
  v1::Timing* timing = job->rest.mutable_timing();
  timing->set_receive_us(Microseconds(job->queued - job->call->started()));
  // Also the wait for a lane or for the host's turn, which the engine does not count as computing.
  timing->set_queue_us(std::max<int64_t>(Microseconds(computed - job->queued) - info.compute_us, 0));
  timing->set_send_us(Microseconds(steady_clock::now() - computed));
  const grpc::Slice slices[] = {std::move(job->head), std::move(job->output), grpc::Slice(job->rest.SerializeAsString())};
  *job->response = grpc::ByteBuffer(slices, 3);
  return absl::OkStatus();
}

}  // namespace moed
