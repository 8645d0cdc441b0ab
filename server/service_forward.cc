// Forward: bytes in, bytes out.
//
// The request is parsed once, from the transport's slices into the message that the call then views. The output is
// computed straight into the slice that is sent: the answer's other fields go around it (see OutputHead in wire.h).
#include <memory>
#include <string>
#include <utility>

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
grpc::Slice SliceOf(OutputMemory memory, size_t bytes) {
  auto owner = std::make_unique<OutputMemory>(std::move(memory));
  void* data = owner->data();
  return grpc::Slice(data, bytes, [](void* held) { delete static_cast<OutputMemory*>(held); }, owner.release());
}

grpc::ByteBuffer Assemble(const std::string& head, grpc::Slice data, const std::string& rest) {
  const grpc::Slice slices[] = {grpc::Slice(head), std::move(data), grpc::Slice(rest)};
  return grpc::ByteBuffer(slices, 3);
}

}  // namespace

// A parsed call on its way through the queue. `checked` views `*request`.
struct MoeService::ForwardJob {
  Call* call;
  grpc::ByteBuffer* response;
  std::unique_ptr<v1::ForwardRequest> request;
  CheckedForward checked;
  int64_t receive_us = 0;

  // While it runs.
  MutableTensorView out;
  grpc::Slice output;  // owns out, unless that is in device memory
  std::shared_ptr<const SharedMemory> hidden_memory, output_memory;
};

grpc::ServerUnaryReactor* MoeService::Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  return Handle<v1::ForwardRequest>("Forward", Kind::kComputes, context, request, [&](Call* call, auto parsed) {
    return StartForward(call, std::move(parsed), response);
  });
}

absl::Status MoeService::StartForward(Call* call, std::unique_ptr<v1::ForwardRequest> request, grpc::ByteBuffer* response) {
  auto job = std::make_shared<ForwardJob>();
  job->call = call;
  job->response = response;
  job->request = std::move(request);
  absl::StatusOr<CheckedForward> checked = CheckForward(*job->request, models_);
  if (!checked.ok()) return checked.status();
  job->checked = *std::move(checked);
  call->SetRequestId(job->request->request_id());
  job->receive_us = Microseconds(steady_clock::now() - call->started());
  return call->Queue(queue_, [this, job](WorkQueue::Duration waited) {
    job->call->Done(RunForward(job.get(), waited));
    return WorkQueue::Next::kDone;
  });
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
  absl::StatusOr<OutputMemory> memory = engine_->AllocateOutput(checked.model, checked.call.layer, checked.output_bytes());
  if (!memory.ok()) return memory.status();
  job->out.data = memory->data();
  job->output = SliceOf(*std::move(memory), checked.output_bytes());
  return absl::OkStatus();
}

absl::Status MoeService::RunForward(ForwardJob* job, WorkQueue::Duration waited) {
  if (absl::Status status = PrepareMemory(job); !status.ok()) return status;
  ForwardInfo info;
  info.want_routing = job->request->return_routing();
  absl::Status status = engine_->Forward(job->checked.model, job->checked.call, job->out, &info);
  if (!status.ok()) return status;  // the output is dropped: of a layer on an accelerator it may be partly written
  return AnswerForward(job, info, waited);
}

absl::Status MoeService::AnswerForward(ForwardJob* job, const ForwardInfo& info, WorkQueue::Duration waited) {
  const CheckedForward& checked = job->checked;
  const int64_t rows = checked.call.hidden.rows, cols = checked.call.hidden.cols;
  const steady_clock::time_point computed = steady_clock::now();
  if (info.want_routing && info.ids.size() != static_cast<size_t>(rows * info.top_k)) {
    return absl::InternalError(absl::StrCat("the engine returned ", info.ids.size(), " ids for ", rows, " rows"));
  }
  v1::ForwardResponse rest = ForwardAnswer(*job->request, info, rows);
  const std::string head = OutputHead(checked.output_dtype, rows, cols, !checked.output_memory);
  v1::Timing* timing = rest.mutable_timing();
  timing->set_receive_us(job->receive_us);
  timing->set_queue_us(Microseconds(waited));
  timing->set_send_us(Microseconds(steady_clock::now() - computed));
  *job->response = Assemble(head, std::move(job->output), rest.SerializeAsString());
  return absl::OkStatus();
}

}  // namespace moed
