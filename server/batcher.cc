#include "server/batcher.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr double kMemory = 0.9;  // what a run still counts for after the next one
constexpr double kMargin = 2;    // times the mean that a run may take

// OK, or why the work must not run. `earliest`: the deadline that it has to have beside.
absl::Status Verdict(const QueuedWork& work, QueuedWork::TimePoint now,
                     QueuedWork::TimePoint earliest = QueuedWork::TimePoint::min()) {
  // The deadline first: at a deadline the transport also cancels the call, and the count should say why.
  const QueuedWork::TimePoint deadline = work.terms().deadline;
  if (deadline <= now) {
    const auto late = std::chrono::duration_cast<std::chrono::microseconds>(now - deadline).count();
    return absl::DeadlineExceededError(absl::StrCat("dropped before it ran: the deadline passed ", late, " us ago"));
  }
  if (work.Gone()) return absl::CancelledError("dropped before it ran: the caller went away");
  if (deadline < earliest) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - now).count();
    return absl::DeadlineExceededError(absl::StrCat("dropped before it ran: ", left, " us were left, too few for it, and others wait"));
  }
  return absl::OkStatus();
}

}  // namespace

// Whether the work, or what is left of it, shares no run.
bool Batcher::Alone(const Part& part) const {
  const QueuedWork::Terms& terms = part.work->terms();
  return terms.kind.empty() || part.first > 0 || part.rows > limits_.batch_rows || (terms.step > 0 && part.rows > terms.step);
}

absl::Status Batcher::CheckRoom(int64_t rows) const {
  if (waiting_ >= limits_.calls) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", waiting_, " calls wait, ", limits_.calls, " may"));
  }
  if (waiting_ > 0 && rows > limits_.rows - waiting_rows_) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", waiting_rows_, " rows wait, with these ",
                                                     waiting_rows_ + rows, ", ", limits_.rows, " may"));
  }
  return absl::OkStatus();
}

void Batcher::Add(std::shared_ptr<QueuedWork> work, TimePoint now) {
  Part part;
  part.rows = work->terms().rows;
  part.queued = now;
  part.work = std::move(work);
  Put(std::move(part));
}

void Batcher::Return(const Part& part, TimePoint now) {
  Part rest = part;
  rest.first = part.next;
  rest.rows = part.work->terms().rows - rest.first;
  rest.queued = now;
  Put(std::move(rest));
}

void Batcher::Put(Part part) {
  Group& group = groups_[part.work->terms().group];
  if (group.parts.empty()) group.served = std::max(group.served, level_);
  const int64_t rows = part.rows;
  group.parts.push_back(std::move(part));
  ++waiting_;  // after all that may throw
  waiting_rows_ += rows;
}

void Batcher::Forget(const Part& part) {
  --waiting_;
  waiting_rows_ -= part.rows;
}

Batcher::TimePoint Batcher::DueOf(const Group& group) const {
  const Part& head = group.parts.front();
  if (limits_.wait == Duration::zero() || Alone(head)) return head.queued;
  int64_t rows = 0;
  for (const Part& part : group.parts) {
    if (!Alone(part) && part.work->terms().kind == head.work->terms().kind) rows += part.rows;
  }
  if (rows >= limits_.batch_rows) return head.queued;
  // Who is in a hurry gives half of the time for it, so that nobody expires for lack of company.
  const TimePoint deadline = head.work->terms().deadline;
  return head.queued + std::min(limits_.wait, deadline == TimePoint::max() ? limits_.wait : (deadline - head.queued) / 2);
}

Batcher::TimePoint Batcher::Due() const {
  TimePoint due = TimePoint::max();
  for (const auto& [name, group] : groups_) {
    if (!group.parts.empty()) due = std::min(due, DueOf(group));
  }
  return due;
}

// The group whose turn it is; null when none is due.
Batcher::Group* Batcher::Choose(TimePoint now, bool hurry) {
  Group* best = nullptr;
  for (auto& [name, group] : groups_) {
    if (group.parts.empty() || (!hurry && DueOf(group) > now)) continue;
    const bool earlier = best != nullptr && group.parts.front().queued < best->parts.front().queued;
    if (best == nullptr || group.served < best->served || (group.served == best->served && earlier)) best = &group;
  }
  return best;
}

Batcher::TimePoint Batcher::Earliest(const Group& group, const Part& head, TimePoint now) const {
  if (group.runs == 0) return TimePoint::min();
  const int64_t step = head.work->terms().step;
  int64_t rows = step > 0 ? std::min(head.rows, step) : head.rows;
  if (!Alone(head)) {
    for (const Part& part : group.parts) rows += part.rows;
    rows = std::min(rows, std::max(limits_.batch_rows, head.rows));
  }
  // Both alone are too long at times: small runs make a row seem slow, large ones a run.
  const double seconds = std::min(group.seconds / group.runs, group.seconds / group.rows * static_cast<double>(rows)) * kMargin;
  const TimePoint earliest = now + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  const auto has_time = [&](const Part& part) { return part.work->terms().deadline >= earliest; };
  const bool any = has_time(head) || std::any_of(group.parts.begin(), group.parts.end(), has_time);
  return any ? earliest : TimePoint::min();
}

void Batcher::Measure(const std::string& name, int64_t rows, Duration took) {
  Group& group = groups_[name];
  group.seconds = kMemory * group.seconds + std::chrono::duration<double>(took).count();
  group.rows = kMemory * group.rows + static_cast<double>(std::max<int64_t>(rows, 1));
  group.runs = kMemory * group.runs + 1;
}

Batcher::Duration Batcher::Expected(const QueuedWork& work) const {
  const auto found = groups_.find(work.terms().group);
  if (found == groups_.end() || found->second.runs == 0) return Duration::max();
  const Group& group = found->second;
  const double rows = static_cast<double>(work.terms().rows);
  // Of the two the longer: small runs say little of a large work, large ones little of a small one.
  const double seconds = std::max(group.seconds / group.runs, group.seconds / group.rows * rows);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// Adds to the batch, which is the first part of a work that may share, what is of its kind and fits.
void Batcher::Fill(Group* group, TimePoint now, TimePoint earliest, std::vector<Part>* batch, Dead* dead) {
  const std::string& kind = batch->front().work->terms().kind;
  int64_t rows = batch->front().rows;
  std::deque<Part> left;
  auto at = group->parts.begin();
  for (; at != group->parts.end(); ++at) {
    if (Alone(*at) || at->work->terms().kind != kind) {
      left.push_back(std::move(*at));
      continue;
    }
    if (absl::Status verdict = Verdict(*at->work, now, earliest); !verdict.ok()) {
      Forget(*at);
      dead->emplace_back(std::move(at->work), std::move(verdict));
      continue;
    }
    if (rows + at->rows > limits_.batch_rows) break;  // those behind it do not overtake it
    rows += at->rows;
    Forget(*at);
    batch->push_back(std::move(*at));
  }
  left.insert(left.end(), std::make_move_iterator(at), std::make_move_iterator(group->parts.end()));
  group->parts.swap(left);
}

std::vector<Batcher::Part> Batcher::Take(TimePoint now, bool hurry, Dead* dead) {
  std::vector<Part> batch;
  Group* group = nullptr;
  TimePoint earliest = TimePoint::min();
  while (batch.empty()) {
    group = Choose(now, hurry);
    if (group == nullptr) return batch;
    Part head = std::move(group->parts.front());
    group->parts.pop_front();
    Forget(head);
    earliest = Earliest(*group, head, now);
    if (absl::Status verdict = Verdict(*head.work, now, earliest); !verdict.ok()) {
      dead->emplace_back(std::move(head.work), std::move(verdict));
      continue;
    }
    batch.push_back(std::move(head));
  }
  if (!Alone(batch.front())) {
    if (!group->parts.empty()) Fill(group, now, earliest, &batch, dead);
  } else if (const int64_t step = batch.front().work->terms().step; step > 0) {
    batch.front().rows = std::min(batch.front().rows, step);
  }
  level_ = std::max(level_, group->served);
  group->served += kRunCost;
  for (Part& part : batch) {
    group->served += part.rows;
    part.waited = now - part.queued;
    part.next = part.first + part.rows;
    part.done = false;
  }
  return batch;
}

Batcher::Dead Batcher::TakeDead(TimePoint now) {
  Dead dead;
  for (auto& [name, group] : groups_) {
    std::deque<Part> alive;
    for (Part& part : group.parts) {
      absl::Status verdict = Verdict(*part.work, now);
      if (verdict.ok()) {
        alive.push_back(std::move(part));
      } else {
        Forget(part);
        dead.emplace_back(std::move(part.work), std::move(verdict));
      }
    }
    group.parts.swap(alive);
  }
  return dead;
}

}  // namespace moed
