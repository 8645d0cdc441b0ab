#include "server/forward_runner.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/recorder.h"
#include "server/retry_info.h"

namespace moed {
namespace {

using std::chrono::steady_clock;

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

void Append(const ForwardInfo& piece, ForwardInfo* all) {
  all->compute_us += piece.compute_us;
  all->batch_rows = std::max(all->batch_rows, piece.batch_rows);
  all->ids.insert(all->ids.end(), piece.ids.begin(), piece.ids.end());
  all->weights.insert(all->weights.end(), piece.weights.begin(), piece.weights.end());
}

}  // namespace

class ForwardRunner::Job final : public QueuedWork {
 public:
  // `ask_routing`: also where only the observer wants to know which experts ran.
  Job(Engine* engine, ForwardWork work, Terms terms, bool ask_routing)
      : QueuedWork(std::move(terms)), engine_(engine), work_(std::move(work)), ask_routing_(ask_routing),
        queued_(steady_clock::now()) {}

  bool Gone() const override { return work_.caller->Gone(); }
  void Drop(const absl::Status& why) override { Fail(why); }
  void Run(std::span<Part> parts) override;

 private:
  static Job& JobOf(const Part& part) { return static_cast<Job&>(*part.work); }
  void Tell(std::span<const ForwardPart> pieces) const;

  absl::Status Begin();
  ForwardPart Piece(const Part& part) const;
  void Take(ForwardPart piece, Part* part);
  absl::Status Complete();
  void Fail(const absl::Status& why);
  void CloseMemory() { hidden_memory_.reset(), output_memory_.reset(); }
  absl::Status PrepareMemory();
  absl::StatusOr<std::byte*> OpenPlace(const std::string& field, const SharedPlace& place, size_t bytes,
                                       std::shared_ptr<const SharedMemory>* held);

  Engine* const engine_;
  ForwardWork work_;
  const bool ask_routing_;
  const steady_clock::time_point queued_;

  // While it runs.
  MutableTensorView out_;
  std::shared_ptr<const SharedMemory> hidden_memory_, output_memory_;
  ForwardAnswer answer_;  // as far as pieces ran
};

QueuedWork::Terms ForwardRunner::TermsOf(const ForwardWork& work) const {
  const ForwardCall& call = work.checked.call;
  QueuedWork::Terms terms;
  terms.group = absl::StrCat(work.checked.model, "/", call.layer);
  terms.rows = call.hidden.rows;
  terms.deadline = work.caller->deadline();
  if (!engine_->RowsStandAlone(work.checked.model, call.layer)) return terms;
  terms.step = step_;
  if (work.checked.hidden_memory || work.checked.output_memory) return terms;
  const RoutingByIds* by_ids = std::get_if<RoutingByIds>(&call.routing);
  terms.kind = absl::StrCat(DTypeName(call.hidden.dtype), " ", call.routing.index(), " ", by_ids == nullptr ? 0 : by_ids->top_k,
                            " ", call.routed_only ? 1 : 0);
  return terms;
}

absl::Status ForwardRunner::Submit(ForwardWork work, WorkQueue::Duration here) {
  QueuedWork::Terms terms = TermsOf(work);
  const bool has_ids = std::holds_alternative<RoutingByIds>(work.checked.call.routing);
  const bool ask_routing = work.checked.observer != nullptr && routes_on_host_ && !has_ids;
  return PushOrTellWhen(queue_, std::make_shared<Job>(engine_, std::move(work), std::move(terms), ask_routing), here);
}

// Answers or fails every part that is over; what throws is dropped by the queue.
void ForwardRunner::Job::Run(std::span<Part> parts) {
  std::vector<ForwardPart> pieces;
  std::vector<Part*> running;
  pieces.reserve(parts.size());
  running.reserve(parts.size());
  for (Part& part : parts) {
    Job& job = JobOf(part);
    if (const absl::Status status = part.first == 0 ? job.Begin() : absl::OkStatus(); !status.ok()) {
      job.Fail(status);
      part.done = true;
      continue;
    }
    pieces.push_back(job.Piece(part));
    running.push_back(&part);
  }
  if (pieces.empty()) return;
  engine_->Forward(work_.checked.model, pieces);
  if (work_.checked.observer != nullptr) Tell(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) JobOf(*running[i]).Take(std::move(pieces[i]), running[i]);
}

// Tells the layer's observer what ran: as one run what was computed together.
void ForwardRunner::Job::Tell(std::span<const ForwardPart> pieces) const {
  std::vector<std::span<const int32_t>> ids;
  ids.reserve(pieces.size());
  FinishedRun run;
  const auto tell = [&] {
    run.ids = ids;
    if (run.calls > 0) work_.checked.observer->Ran(run);
    run = {};
    ids.clear();
  };
  for (const ForwardPart& piece : pieces) {
    if (!piece.status.ok()) continue;
    const RoutingByIds* given = std::get_if<RoutingByIds>(&piece.call.routing);
    ids.push_back(given != nullptr ? given->ids : std::span<const int32_t>(piece.info.ids));
    run.calls += 1;
    run.rows += piece.call.hidden.rows;
    run.compute_us = piece.info.compute_us;
    if (piece.info.batch_rows == piece.call.hidden.rows) tell();  // alone
  }
  tell();
}

// Before the first piece, also when the call starts again.
absl::Status ForwardRunner::Job::Begin() {
  answer_.info = {};
  if (out_.data != nullptr) return absl::OkStatus();
  if (absl::Status status = PrepareMemory(); !status.ok()) return status;
  work_.caller->Prepare();
  return absl::OkStatus();
}

// What the engine is to compute: the call as it is where it goes at once, so that it can start while its rows still come.
ForwardPart ForwardRunner::Job::Piece(const Part& part) const {
  ForwardPart piece;
  piece.info.want_routing = work_.want_routing || ask_routing_;
  piece.out = out_.slice(part.first, part.rows);
  const ForwardCall& call = work_.checked.call;
  if (part.rows == call.hidden.rows) {
    piece.call = call;
    return piece;
  }
  piece.call = RowsOf(call, part.first, part.rows);
  const size_t bytes = call.hidden.slice(0, part.first + part.rows).bytes();
  if (call.incoming != nullptr && bytes > 0) call.incoming->WaitPast(bytes - 1);
  return piece;
}

// After a run: the answer, the failure, or another piece.
void ForwardRunner::Job::Take(ForwardPart piece, Part* part) {
  absl::Status status = std::move(piece.status);
  if (!work_.want_routing) {  // it was for the observer
    piece.info.want_routing = false;
    piece.info.ids.clear();
    piece.info.weights.clear();
  }
  if (!status.ok()) {
    if (absl::IsInvalidArgument(status) && part->first > 0) {
      status = absl::InvalidArgumentError(absl::StrCat(status.message(), " (rows counted from row ", part->first, " of the call)"));
    }
    part->done = true;
    return Fail(status);  // the output is dropped: it may be partly written
  }
  if (part->first == 0) {
    answer_.info = std::move(piece.info);
  } else if (piece.info.generation != answer_.info.generation) {
    part->next = 0;
    return;
  } else {
    Append(piece.info, &answer_.info);
  }
  if (part->next < terms().rows) return;
  try {
    status = Complete();
    if (status.ok() && work_.checked.recording != nullptr) {
      work_.checked.recording->Complete(work_.checked, out_.data, answer_.info, answer_.receive_us, answer_.queue_us);
    }
    if (status.ok()) work_.caller->Answer(std::move(answer_));
  } catch (const std::bad_alloc&) {  // here, since others of the run still wait for their answers
    status = absl::ResourceExhaustedError("no memory for the answer");
  }
  part->done = true;
  if (!status.ok()) Fail(status);
}

absl::Status ForwardRunner::Job::Complete() {
  CloseMemory();  // before the answer, after which their owner may free them
  ForwardInfo& info = answer_.info;
  answer_.computed = steady_clock::now();
  if (info.want_routing && info.ids.size() != static_cast<size_t>(out_.rows * info.top_k)) {
    return absl::InternalError(absl::StrCat("the engine returned ", info.ids.size(), " ids for ", out_.rows, " rows"));
  }
  answer_.receive_us = Microseconds(queued_ - work_.caller->started());
  answer_.queue_us = std::max<int64_t>(Microseconds(answer_.computed - queued_) - info.compute_us, 0);
  return absl::OkStatus();
}

void ForwardRunner::Job::Fail(const absl::Status& why) {
  CloseMemory();
  work_.caller->Fail(why);
}

// Finds what the request says about memory: addresses in device memory, or memory for the output.
absl::Status ForwardRunner::Job::PrepareMemory() {
  CheckedForward& checked = work_.checked;
  TensorView& hidden = checked.call.hidden;
  out_ = {work_.output, checked.output_dtype, hidden.rows, hidden.cols};
  if (checked.hidden_memory) {
    absl::StatusOr<std::byte*> data = OpenPlace("hidden.device_memory", *checked.hidden_memory, hidden.bytes(), &hidden_memory_);
    if (!data.ok()) return data.status();
    hidden.data = *data;
  }
  if (checked.output_memory) {
    absl::StatusOr<std::byte*> data = OpenPlace("output_memory", *checked.output_memory, checked.output_bytes(), &output_memory_);
    if (!data.ok()) return data.status();
    out_.data = *data;
    out_.place = Place::kDevice;
    return absl::OkStatus();
  }
  if (work_.output != nullptr) return absl::OkStatus();
  absl::StatusOr<CallMemory> memory = engine_->AllocateForCall(checked.model, checked.call.layer, checked.output_bytes());
  if (!memory.ok()) return memory.status();
  out_.data = memory->data();
  answer_.output.emplace(*std::move(memory));
  return absl::OkStatus();
}

// The address of a place in device memory; `held` keeps it open.
absl::StatusOr<std::byte*> ForwardRunner::Job::OpenPlace(const std::string& field, const SharedPlace& place, size_t bytes,
                                                         std::shared_ptr<const SharedMemory>* held) {
  const CheckedForward& checked = work_.checked;
  absl::StatusOr<std::shared_ptr<const SharedMemory>> memory =
      engine_->OpenShared(checked.model, checked.call.layer, place.handle);
  if (!memory.ok()) return absl::Status(memory.status().code(), absl::StrCat(field, ": ", memory.status().message()));
  *held = *std::move(memory);
  return AddressIn(field, **held, place, bytes);
}

}  // namespace moed
