#include "server/call.h"

#include <memory>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/retry_info.h"

namespace moed {
namespace {

constexpr size_t kMaxMessage = 2000;  // bytes; percent-encoding may triple them on the wire

// What Call::Queue puts into the queue.
class StepsOfCall final : public QueuedWork {
 public:
  StepsOfCall(Call* call, Terms terms, std::function<bool()> run)
      : QueuedWork(std::move(terms)), call_(call), run_(std::move(run)) {}
  bool Gone() const override { return call_->Gone(); }
  void Run(std::span<Part> parts) override { parts.front().done = run_(); }
  void Drop(const absl::Status& why) override { call_->Done(why); }

 private:
  Call* const call_;
  const std::function<bool()> run_;
};

}  // namespace

std::chrono::steady_clock::time_point SteadyDeadline(std::chrono::system_clock::time_point deadline) {
  const auto left = deadline - std::chrono::system_clock::now();
  // No deadline is the largest time point; a day is out of reach of any call and of any overflow.
  if (deadline == std::chrono::system_clock::time_point::max() || left > std::chrono::hours(24)) {
    return WorkQueue::TimePoint::max();
  }
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<WorkQueue::Duration>(left);
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().data(), status.message().size());
  if (message.size() > kMaxMessage) {
    message.resize(kMaxMessage);
    absl::StrAppend(&message, "... (cut)");
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, StatusDetails(status, message));
}

void OpenCalls::Add() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++count_;
  ++added_;
}

void OpenCalls::Remove() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--count_ == 0) none_.notify_all();
}

bool OpenCalls::WaitForNone(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return none_.wait_for(lock, limit, [this] { return count_ == 0; });
}

bool OpenCalls::WaitForQuiet(std::chrono::milliseconds quiet, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!none_.wait_until(lock, end, [this] { return count_ == 0; })) return false;
    const uint64_t seen = added_;
    lock.unlock();
    std::this_thread::sleep_for(quiet);
    lock.lock();
    if (count_ == 0 && added_ == seen) return true;
    if (std::chrono::steady_clock::now() >= end) return false;
  }
}

Call::Call(const char* method, grpc::CallbackServerContext* context, OpenCalls* open)
    : method_(method), context_(context), open_(open), started_(std::chrono::steady_clock::now()),
      deadline_(SteadyDeadline(context->deadline())) {
  open_->Add();
}

void Call::SetRequestId(const std::string& id) {
  request_id_ = PrintableId(id);
}

absl::Status Call::Reserve(ByteBudget* budget, size_t bytes) {
  absl::Status status = budget->Take(bytes);
  if (status.ok()) budget_ = budget, reserved_ = bytes;
  if (absl::IsResourceExhausted(status)) record_.SetDrop(Drop::kBytes);
  return status;
}

absl::Status Call::OfClient(absl::Status status) {
  if (absl::IsResourceExhausted(status)) record_.SetDrop(Drop::kClient);
  return status;
}

absl::Status Call::Enter(ClientGate* gate, Plane plane) {
  if (gate == nullptr) return absl::OkStatus();
  absl::Status status = gate->Admit(plane, *context_);
  if (status.ok()) share_ = gate->ShareOf(plane, *context_);
  return status;
}

absl::Status Call::CheckDeadline() const {
  if (deadline_ > std::chrono::steady_clock::now()) return absl::OkStatus();
  return absl::DeadlineExceededError("the deadline passed before the call was handled");
}

absl::Status Call::Queue(WorkQueue* queue, const std::string& group, int64_t steps, std::function<bool()> run) {
  QueuedWork::Terms terms;
  terms.group = group;
  terms.rows = steps;
  terms.step = 1;
  terms.deadline = deadline_;
  return PushOrTellWhen(queue, std::make_shared<StepsOfCall>(this, std::move(terms), std::move(run)));
}

void Call::Done(const absl::Status& status) {
  share_ = ClientShare();  // before the answer: whoever has it may call again at once
  grpc::Status answer;
  try {
    const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - started_);
    record_.End(status, started_);
    record_.Log(method_, status, took.count(), request_id_);
    answer = ToGrpc(status);
  } catch (const std::bad_alloc&) {
    answer = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory");  // short enough to need none
  }
  Finish(std::move(answer));
}

void Call::OnDone() {
  OpenCalls* open = open_;
  if (budget_ != nullptr) budget_->Give(reserved_);
  delete this;
  open->Remove();
}

}  // namespace moed
