#include "server/forward_runner.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using std::chrono::steady_clock;

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

}  // namespace

struct ForwardRunner::Job {
  ForwardWork work;
  steady_clock::time_point queued;

  // While it runs.
  MutableTensorView out;
  std::shared_ptr<const SharedMemory> hidden_memory, output_memory;
};

absl::Status ForwardRunner::Submit(ForwardWork work) {
  auto job = std::make_shared<Job>();
  job->work = std::move(work);
  job->queued = steady_clock::now();
  ForwardCaller* const caller = job->work.caller.get();
  WorkQueue::Job queued;
  queued.deadline = caller->deadline();
  queued.gone = [caller] { return caller->Gone(); };
  queued.drop = [caller](const absl::Status& why) { caller->Fail(why); };
  queued.run = [this, job = std::move(job)](WorkQueue::Duration) {
    Run(job.get());
    return WorkQueue::Next::kDone;
  };
  return queue_->Push(std::move(queued));
}

void ForwardRunner::Run(Job* job) {
  ForwardCaller* const caller = job->work.caller.get();
  ForwardAnswer answer;
  const absl::Status status = Compute(job, &answer);
  if (!status.ok()) return caller->Fail(status);  // the output is dropped: of a layer on an accelerator it may be partly written
  caller->Answer(std::move(answer));
}

absl::Status ForwardRunner::Compute(Job* job, ForwardAnswer* answer) {
  // Before any answer, after which their owner may free them.
  const absl::Cleanup let_go = [job] { job->hidden_memory.reset(), job->output_memory.reset(); };
  if (absl::Status status = PrepareMemory(job, answer); !status.ok()) return status;
  const CheckedForward& checked = job->work.checked;
  job->work.caller->Prepare();
  ForwardInfo& info = answer->info;
  info.want_routing = job->work.want_routing;
  absl::Status status = engine_->Forward(checked.model, checked.call, job->out, &info);
  if (!status.ok()) return status;
  answer->computed = steady_clock::now();
  if (info.want_routing && info.ids.size() != static_cast<size_t>(job->out.rows * info.top_k)) {
    return absl::InternalError(absl::StrCat("the engine returned ", info.ids.size(), " ids for ", job->out.rows, " rows"));
  }
  answer->receive_us = Microseconds(job->queued - job->work.caller->started());
  answer->queue_us = std::max<int64_t>(Microseconds(answer->computed - job->queued) - info.compute_us, 0);
  return absl::OkStatus();
}

// Finds what the request says about memory: addresses in device memory, or memory for the output.
absl::Status ForwardRunner::PrepareMemory(Job* job, ForwardAnswer* answer) {
  CheckedForward& checked = job->work.checked;
  TensorView& hidden = checked.call.hidden;
  job->out = {job->work.output, checked.output_dtype, hidden.rows, hidden.cols};
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
  if (job->work.output != nullptr) return absl::OkStatus();
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked.model, checked.call.layer, checked.output_bytes());
  if (!memory.ok()) return memory.status();
  job->out.data = memory->data();
  answer->output.emplace(*std::move(memory));
  return absl::OkStatus();
}

// The address of a place in device memory; `held` keeps it open.
absl::StatusOr<std::byte*> ForwardRunner::OpenPlace(const std::string& field, const CheckedForward& checked,
                                                    const SharedPlace& place, size_t bytes,
                                                    std::shared_ptr<const SharedMemory>* held) {
  absl::StatusOr<std::shared_ptr<const SharedMemory>> memory =
      engine_->OpenShared(checked.model, checked.call.layer, place.handle);
  if (!memory.ok()) return absl::Status(memory.status().code(), absl::StrCat(field, ": ", memory.status().message()));
  *held = *std::move(memory);
  return AddressIn(field, **held, place, bytes);
}

}  // namespace moed
