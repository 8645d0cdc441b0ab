// Forwards that come over a ring: checked and run as those of RPCs, with hidden states and outputs where the client has them.
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "server/retry_info.h"
#include "server/ring_server.h"
#include "server/service.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using std::chrono::steady_clock;

// On the ring's own thread, which only calls of the same client wait for, and none did when it was taken.
constexpr std::chrono::milliseconds kHere(1);

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

// The end of a call's time; a day is out of reach of any call and of any overflow.
steady_clock::time_point DeadlineOf(const RingCall& call) {
  const uint64_t limit = call.submission().timeout_us;
  if (limit == 0 || limit > 86'400'000'000u) return steady_clock::time_point::max();
  return call.started() + std::chrono::microseconds(limit);
}

ring::Completion Failed(const absl::Status& why) {
  ring::Completion completion = FailedCompletion(why);
  completion.retry_us = RetryMicroseconds(why);
  return completion;
}

}  // namespace

// A submission from its arrival to its answer. The checked call views `request` and the region.
struct MoeService::RingForward final : public ForwardCaller {
  RingForward(std::shared_ptr<RingCall> ring_call, OpenCalls* open_calls)
      : call(std::move(ring_call)), deadline_at(DeadlineOf(*call)), open(open_calls) {
    open->Add();
  }
  ~RingForward() override {
    if (budget != nullptr) budget->Give(reserved);
    open->Remove();
  }

  TimePoint started() const override { return call->started(); }
  TimePoint deadline() const override { return deadline_at; }
  bool Gone() const override { return call->Gone(); }
  void Answer(ForwardAnswer answer) override;
  void Fail(const absl::Status& why) override {
    End(why);
    call->Answer(Failed(why));
  }
  // Gives hidden states and output their addresses in the region.
  absl::Status Place(ForwardWork* work) const;
  // Before the answer: whoever has it may call again at once, and look at what was counted.
  void End(const absl::Status& status);
  // `status`, and when it refuses the call, why.
  absl::Status Refused(Drop why, absl::Status status) {
    if (absl::IsResourceExhausted(status)) record.SetDrop(why);
    return status;
  }

  const std::shared_ptr<RingCall> call;
  const TimePoint deadline_at;
  OpenCalls* const open;
  ByteBudget* budget = nullptr;  // null: nothing was taken
  size_t reserved = 0;
  ClientShare share;
  ForwardRecord record;
  std::string request_id;
  v1::ForwardRequest request;
  std::optional<CallMemory> made;  // hidden states that are not what came
};

absl::Status MoeService::RingForward::Place(ForwardWork* work) const {
  const ring::Submission& submission = call->submission();
  const Region& region = *call->region();
  absl::StatusOr<std::byte*> hidden = region.At("hidden", submission.hidden_offset, work->checked.hidden_bytes());
  if (!hidden.ok()) return hidden.status();
  absl::StatusOr<std::byte*> output = region.At("output", submission.output_offset, work->checked.output_bytes());
  if (!output.ok()) return output.status();
  work->checked.call.hidden.data = *hidden;
  work->output = *output;
  return absl::OkStatus();
}

void MoeService::RingForward::End(const absl::Status& status) {
  share = ClientShare();
  record.End(status, started());
  record.Log("Forward by ring", status, Microseconds(steady_clock::now() - started()), request_id);
}

void MoeService::RingForward::Answer(ForwardAnswer answer) {
  const ring::Submission& submission = call->submission();
  std::byte* const memory = call->region()->memory().data();
  if (answer.info.want_routing && !answer.info.ids.empty()) {  // within the region: see CheckUsedRouting
    std::memcpy(memory + submission.used_ids_offset, answer.info.ids.data(), answer.info.ids.size() * sizeof(int32_t));
    std::memcpy(memory + submission.used_weights_offset, answer.info.weights.data(), answer.info.weights.size() * sizeof(float));
  }
  v1::Timing timing;
  timing.set_receive_us(answer.receive_us);
  timing.set_queue_us(answer.queue_us);
  timing.set_compute_us(answer.info.compute_us);
  timing.set_send_us(Microseconds(steady_clock::now() - answer.computed));
  record.SetTimes(answer, timing.send_us());
  End(absl::OkStatus());
  call->Answer(ToCompletion(answer.info, timing));
}

void MoeService::StartRingForward(std::shared_ptr<RingCall> call, const std::string& token) {
  if (uses_gpu_) queue_->Expect();
  absl::Status status;
  std::shared_ptr<RingForward> caller;
  try {
    caller = std::make_shared<RingForward>(call, &open_);
    caller->record.Begin(observer_, Transport::kRing, 0);
    status = SubmitRingForward(caller, token);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (status.ok()) return;
  caller != nullptr ? caller->Fail(status) : call->Answer(Failed(status));
}

// Lets a submission in: reads it, and takes what it holds of the shares.
absl::Status MoeService::TakeRingForward(RingForward* caller, const std::string& token) {
  if (gate_ != nullptr) {  // for each call, since tokens may be taken out of their file
    if (absl::Status status = gate_->AdmitToken(Plane::kData, token); !status.ok()) return status;
    caller->share = gate_->ShareOfToken(Plane::kData, token);
  }
  if (absl::Status status = Admit(Kind::kComputes); !status.ok()) return status;
  const ring::Submission& submission = caller->call->submission();
  const Region& region = *caller->call->region();
  if (absl::Status status = FromRing(submission, region.memory(), &caller->request); !status.ok()) return status;
  const v1::ForwardRequest& request = caller->request;
  const size_t copied = request.top_k().ids().data().size() + request.top_k().weights().data().size() +
                        request.router_logits().data().size();
  caller->request_id = request.request_id();
  caller->record.AddReceived(copied);
  absl::Status taken = caller->Refused(Drop::kClient, caller->share.TakeBytes(static_cast<int64_t>(copied)));
  if (taken.ok()) taken = WithRetryInfo(caller->Refused(Drop::kBytes, budget_.Take(copied)), queue_->RetryDelay());
  if (!taken.ok()) return taken;
  caller->budget = &budget_, caller->reserved = copied;
  return absl::OkStatus();
}

absl::Status MoeService::SubmitRingForward(const std::shared_ptr<RingForward>& caller, const std::string& token) {
  if (absl::Status status = TakeRingForward(caller.get(), token); !status.ok()) return status;
  const ring::Submission& submission = caller->call->submission();
  const Region& region = *caller->call->region();
  const v1::ForwardRequest& request = caller->request;
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<CheckedForward> checked = CheckForward(request, *models);
  if (!checked.ok()) return caller->record.SetAsked(*models, request.model(), request.layer()), checked.status();
  caller->record.SetCall(*checked);
  caller->record.SetSent(checked->output_bytes());
  absl::Status taken = caller->Refused(Drop::kClient, caller->share.TakeRows(checked->call.hidden.rows));
  if (!taken.ok()) return taken;
  Sample(*models, request.request_id(), caller->record, &*checked);
  ForwardWork work;
  work.want_routing = request.return_routing();
  if (work.want_routing) {
    absl::Status status = CheckUsedRouting(submission, region.memory(), RoutedSlots(*checked) * checked->rows_each);
    if (!status.ok()) return status;
  }
  work.checked = *std::move(checked);
  if (absl::Status status = caller->Place(&work); !status.ok()) return status;
  if (const void* came = work.checked.call.hidden.data; work.checked.must_be_made()) {
    if (absl::Status status = MakeHiddenOf(came, &work.checked, &caller->made); !status.ok()) return status;
  }
  work.caller = caller;
  const bool here = runs_here_ && caller->call->last();
  return caller->Refused(Drop::kQueue, runner_->Submit(std::move(work), here ? kHere : WorkQueue::Duration()));
}

// Slots a row of the routing that a call uses.
int64_t MoeService::RoutedSlots(const CheckedForward& checked) const {
  if (const RoutingByIds* ids = std::get_if<RoutingByIds>(&checked.call.routing)) return ids->top_k;
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<const ModelFacts*> model = models->Find(checked.model);
  return model.ok() ? (*model)->top_k : 0;
}

}  // namespace moed
