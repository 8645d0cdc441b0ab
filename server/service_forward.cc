// Forward: bytes in, bytes out.
//
// The hidden states are copied once, from the transport's slices to where the layer's device reads them (see received_forward.h);
// the rest of the request is parsed into the message that the call then views. The output is computed straight into the slice that
// is sent: the answer's other fields go around it (see OutputHead in wire.h).
//
// For a layer on a GPU a call runs while its hidden states are still being copied: what a compute thread does for it hides behind
// the copy, and the first rows cross the bus before the last ones are there. Whoever copies holds the job, and so the memory on
// both sides, however early the call ends.
#include <memory>
#include <optional>
#include <utility>

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

// A call from its parsed request to its answer. The checked call views `*request` and `hidden`.
struct MoeService::UnaryForward final : public ForwardCaller {
  UnaryForward(Call* call, std::unique_ptr<ReceivedForward> parsed, grpc::ByteBuffer* response)
      : call(call), request(std::move(parsed)), response(response) {}

  TimePoint started() const override { return call->started(); }
  TimePoint deadline() const override { return call->deadline(); }
  bool Gone() const override { return call->Gone(); }
  void Prepare() override;
  void Answer(ForwardAnswer answer) override;
  void Fail(const absl::Status& why) override { call->Done(why); }

  Call* const call;
  const std::unique_ptr<ReceivedForward> request;
  grpc::ByteBuffer* const response;
  std::optional<CallMemory> hidden;  // nothing when they are in the message or in memory that the client named
  std::shared_ptr<Region> hidden_region, output_region;  // of sessions
  MutableTensorView output;          // its shape and dtype
  bool output_follows = true;        // in the answer; else it is in memory that the client named
  grpc::Slice head;                  // of the answer: what comes before the output's data
  v1::ForwardResponse rest;          // and what comes after, as far as it is known
};

void MoeService::UnaryForward::Prepare() {
  head = grpc::Slice(OutputHead(output.dtype, output.rows, output.cols, output_follows));
  rest = BeginAnswer(request->message());
}

void MoeService::UnaryForward::Answer(ForwardAnswer answer) {
  EndAnswer(answer.info, output.rows, &rest);
  v1::Timing* timing = rest.mutable_timing();
  timing->set_receive_us(answer.receive_us);
  timing->set_queue_us(answer.queue_us);
  timing->set_send_us(Microseconds(steady_clock::now() - answer.computed));
  const grpc::Slice data = answer.output ? SliceOf(*std::move(answer.output), output.bytes()) : grpc::Slice();
  const grpc::Slice slices[] = {std::move(head), data, grpc::Slice(rest.SerializeAsString())};
  *response = grpc::ByteBuffer(slices, 3);
  call->Done(absl::OkStatus());
}

grpc::ServerUnaryReactor* MoeService::Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  return Handle<ReceivedForward>("Forward", Kind::kComputes, context, request, [&](Call* call, auto parsed) {
    return StartForward(call, std::move(parsed), response);
  });
}

absl::Status MoeService::StartForward(Call* call, std::unique_ptr<ReceivedForward> request, grpc::ByteBuffer* response) {
  auto caller = std::make_shared<UnaryForward>(call, std::move(request), response);
  const v1::ForwardRequest& message = caller->request->message();
  absl::StatusOr<CheckedForward> checked = CheckForward(message, *Models(), caller->request->hidden_bytes());
  if (!checked.ok()) return checked.status();
  call->SetRequestId(message.request_id());
  if (absl::Status status = call->TakeRows(checked->call.hidden.rows); !status.ok()) return status;
  caller->output = {nullptr, checked->output_dtype, checked->call.hidden.rows, checked->call.hidden.cols};
  caller->output_follows = checked->output_in_answer();
  if (absl::Status status = PlaceHidden(caller.get(), &*checked); !status.ok()) return status;
  if (!uses_gpu_) CopyHidden(caller);  // processors have other work than to copy, or to wait for who does
  ForwardWork work;
  work.checked = *std::move(checked);
  work.want_routing = message.return_routing();
  work.caller = caller;
  if (absl::Status status = UseSession(caller.get(), &work); !status.ok()) return status;
  absl::Status status = runner_->Submit(std::move(work));
  if (status.ok() && uses_gpu_) CopyHidden(caller);
  return status;
}

// Gives the hidden states that the message does not hold their memory: where the layer's device reads them.
absl::Status MoeService::PlaceHidden(UnaryForward* caller, CheckedForward* checked) {
  ReceivedForward* const request = caller->request.get();
  if (request->hidden_bytes() == 0) return absl::OkStatus();
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked->model, checked->call.layer, request->hidden_bytes());
  if (!memory.ok()) return memory.status();
  caller->hidden.emplace(*std::move(memory));
  request->PlaceHidden(static_cast<std::byte*>(caller->hidden->data()));
  checked->call.hidden.data = caller->hidden->data();
  if (uses_gpu_) checked->call.incoming = request;
  return absl::OkStatus();
}

// The addresses of what lies in the memory of sessions, which the caller then holds.
absl::Status MoeService::UseSession(UnaryForward* caller, ForwardWork* work) {
  CheckedForward& checked = work->checked;
  if (checked.hidden_session) {
    absl::StatusOr<std::byte*> data = OpenSessionPlace("hidden.session_memory", *checked.hidden_session, checked.call.hidden.bytes(),
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
void MoeService::CopyHidden(const std::shared_ptr<UnaryForward>& caller) {
  ReceivedForward* const request = caller->request.get();
  if (request->hidden_bytes() == 0) return;
  const int helpers = uses_gpu_ ? CopyHelpers::For(request->hidden_bytes()) : 0;
  helpers_->Copy(std::shared_ptr<SharedCopy>(caller, request), helpers);
  request->LetGo();
}

}  // namespace moed
