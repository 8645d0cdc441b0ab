// Forwards that come over a ring: checked and run as those of RPCs, with hidden states and outputs where the client has them.
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "server/ring_server.h"
#include "server/service.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using std::chrono::steady_clock;

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

// The end of a call's time; a day is out of reach of any call and of any overflow.
steady_clock::time_point DeadlineOf(const RingCall& call) {
  const uint64_t limit = call.submission().timeout_us;
  if (limit == 0 || limit > 86'400'000'000u) return steady_clock::time_point::max();
  return call.started() + std::chrono::microseconds(limit);
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
    share = ClientShare();  // before the answer: whoever has it may call again at once
    call->Answer(FailedCompletion(why));
  }

  const std::shared_ptr<RingCall> call;
  const TimePoint deadline_at;
  OpenCalls* const open;
  ByteBudget* budget = nullptr;  // null: nothing was taken
  size_t reserved = 0;
  ClientShare share;
  v1::ForwardRequest request;
  std::optional<CallMemory> made;  // hidden states that are not what came
};

void MoeService::RingForward::Answer(ForwardAnswer answer) {
  const ring::Submission& submission = call->submission();
  std::byte* const memory = call->region()->memory().data();
  if (answer.info.want_routing) {  // within the region: see CheckUsedRouting
    std::memcpy(memory + submission.used_ids_offset, answer.info.ids.data(), answer.info.ids.size() * sizeof(int32_t));
    std::memcpy(memory + submission.used_weights_offset, answer.info.weights.data(), answer.info.weights.size() * sizeof(float));
  }
  v1::Timing timing;
  timing.set_receive_us(answer.receive_us);
  timing.set_queue_us(answer.queue_us);
  timing.set_compute_us(answer.info.compute_us);
  timing.set_send_us(Microseconds(steady_clock::now() - answer.computed));
  share = ClientShare();
  call->Answer(ToCompletion(answer.info, timing));
}

void MoeService::StartRingForward(std::shared_ptr<RingCall> call, const std::string& token) {
  if (uses_gpu_) queue_->Expect();
  absl::Status status;
  try {
    const auto caller = std::make_shared<RingForward>(call, &open_);
    status = SubmitRingForward(caller, token);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (!status.ok()) call->Answer(FailedCompletion(status));
}

absl::Status MoeService::SubmitRingForward(const std::shared_ptr<RingForward>& caller, const std::string& token) {
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
  if (absl::Status status = caller->share.TakeBytes(static_cast<int64_t>(copied)); !status.ok()) return status;
  if (absl::Status status = budget_.Take(copied); !status.ok()) return status;
  caller->budget = &budget_, caller->reserved = copied;
  absl::StatusOr<CheckedForward> checked = CheckForward(request, *Models());
  if (!checked.ok()) return checked.status();
  if (absl::Status status = caller->share.TakeRows(checked->call.hidden.rows); !status.ok()) return status;
  ForwardWork work;
  work.want_routing = request.return_routing();
  if (work.want_routing) {
    absl::Status status = CheckUsedRouting(submission, region.memory(), RoutedSlots(*checked) * checked->rows_each);
    if (!status.ok()) return status;
  }
  absl::StatusOr<std::byte*> hidden = region.At("hidden", submission.hidden_offset, checked->hidden_bytes());
  if (!hidden.ok()) return hidden.status();
  absl::StatusOr<std::byte*> output = region.At("output", submission.output_offset, checked->output_bytes());
  if (!output.ok()) return output.status();
  checked->call.hidden.data = *hidden;
  if (checked->must_be_made()) {
    if (absl::Status status = MakeHiddenOf(*hidden, &*checked, &caller->made); !status.ok()) return status;
  }
  work.output = *output;
  work.checked = *std::move(checked);
  work.caller = caller;
  return runner_->Submit(std::move(work));
}

// Slots a row of the routing that a call uses.
int64_t MoeService::RoutedSlots(const CheckedForward& checked) const {
  if (const RoutingByIds* ids = std::get_if<RoutingByIds>(&checked.call.routing)) return ids->top_k;
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<const ModelFacts*> model = models->Find(checked.model);
  return model.ok() ? (*model)->top_k : 0;
}

}  // namespace moed
