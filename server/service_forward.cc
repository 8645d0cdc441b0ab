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

// Where the job's tensors in device memory lie in this process; `held` keeps them open.
absl::StatusOr<std::byte*> MoeService::OpenPlace(const std::string& field, const CheckedForward& checked, const SharedPlace& place,
                                                 size_t bytes, std::shared_ptr<const SharedMemory>* held) {
  absl::StatusOr<std::shared_ptr<const SharedMemory>> memory = engine_->OpenShared(checked.model, checked.call.layer, place.handle);
  if (!memory.ok()) return absl::Status(memory.status().code(), absl::StrCat(field, ": ", memory.status().message()));
  *held = *std::move(memory);
  return AddressIn(field, **held, place, bytes);
}

absl::Status MoeService::RunForward(ForwardJob* job, WorkQueue::Duration waited) {
  CheckedForward& checked = job->checked;
  const int64_t rows = checked.call.hidden.rows, cols = checked.call.hidden.cols;
  std::shared_ptr<const SharedMemory> hidden_memory, output_memory;
  if (checked.hidden_memory) {
    absl::StatusOr<std::byte*> data =
        OpenPlace("hidden.device_memory", checked, *checked.hidden_memory, checked.call.hidden.bytes(), &hidden_memory);
    if (!data.ok()) return data.status();
    checked.call.hidden.data = *data;
  }
  MutableTensorView out = {nullptr, checked.output_dtype, rows, cols};
  grpc::Slice output;
  if (checked.output_memory) {
    absl::StatusOr<std::byte*> data =
        OpenPlace("output_memory", checked, *checked.output_memory, checked.output_bytes(), &output_memory);
    if (!data.ok()) return data.status();
    out.data = *data;
    out.place = Place::kDevice;
  } else {
    absl::StatusOr<OutputMemory> memory = engine_->AllocateOutput(checked.model, checked.call.layer, checked.output_bytes());
    if (!memory.ok()) return memory.status();
    out.data = memory->data();
    output = SliceOf(*std::move(memory), checked.output_bytes());
  }
  ForwardInfo info;
  info.want_routing = job->request->return_routing();
  absl::Status status = engine_->Forward(checked.model, checked.call, out, &info);
  if (!status.ok()) return status;  // the output is dropped: of a layer on an accelerator it may be partly written
  return AnswerForward(job, info, waited, std::move(output));
}

absl::Status MoeService::AnswerForward(ForwardJob* job, const ForwardInfo& info, WorkQueue::Duration waited, grpc::Slice output) {
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
  *job->response = Assemble(head, std::move(output), rest.SerializeAsString());
  return absl::OkStatus();
}

}  // namespace moed
