#include "server/work_queue.h"

#include <pthread.h>

#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/look_out.h"

namespace moed {
namespace {

std::string Microseconds(WorkQueue::Duration duration) {
  return absl::StrCat(std::chrono::duration_cast<std::chrono::microseconds>(duration).count(), " us");
}

}  // namespace

WorkQueue::WorkQueue(int capacity, Clock clock) : capacity_(capacity), clock_(std::move(clock)) {}

WorkQueue::~WorkQueue() { Shutdown(); }

void WorkQueue::Start(int threads, const std::function<void()>& first) {
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, first] {
      pthread_setname_np(pthread_self(), "compute");  // as `top -H` shows it
      if (first) first();
      ThreadMain();
    });
  }
}

absl::Status WorkQueue::Verdict(const Job& job, TimePoint now) {
  // The deadline first: at a deadline the transport also cancels the call, and the count should say why.
  if (job.deadline <= now) {
    return absl::DeadlineExceededError(
        absl::StrCat("dropped before it ran: the deadline passed ", Microseconds(now - job.deadline), " ago"));
  }
  if (job.gone && job.gone()) return absl::CancelledError("dropped before it ran: the caller went away");
  return absl::OkStatus();
}

void WorkQueue::CountDrop(const absl::Status& why) {
  ++(absl::IsDeadlineExceeded(why) ? counters_.expired : counters_.cancelled);
}

std::vector<std::pair<WorkQueue::Entry, absl::Status>> WorkQueue::TakeDead() {
  std::vector<std::pair<Entry, absl::Status>> dead;
  std::deque<Entry> alive;
  const TimePoint now = clock_();
  for (Entry& entry : waiting_) {
    absl::Status verdict = Verdict(entry.job, now);
    if (verdict.ok()) {
      alive.push_back(std::move(entry));
    } else {
      CountDrop(verdict);
      dead.emplace_back(std::move(entry), std::move(verdict));
    }
  }
  waiting_.swap(alive);
  NoteWork();
  return dead;
}

absl::Status WorkQueue::Push(Job job) {
  std::vector<std::pair<Entry, absl::Status>> dead;
  absl::Status result;
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_ && static_cast<int>(waiting_.size()) >= capacity_) dead = TakeDead();
    if (closed_) {
      result = absl::UnavailableError("the server is draining");
    } else if (static_cast<int>(waiting_.size()) >= capacity_) {
      result = absl::ResourceExhaustedError(
          absl::StrCat("the queue is full: ", waiting_.size(), " calls wait, ", capacity_, " may"));
    }
    if (result.ok()) waiting_.push_back({std::move(job), clock_()});
    ++(result.ok() ? counters_.accepted : counters_.refused);
    NoteWork();
    // Threads that look out, or woke to do so, come by themselves.
    wake = result.ok() && static_cast<int>(waiting_.size()) > looking_ + expected_;
  }
  for (auto& [entry, why] : dead) entry.job.drop(why);
  if (wake) wake_.notify_one();
  return result;
}

void WorkQueue::Expect() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (looking_ + expected_ > 0 || sleeping_ == 0) return;
    ++expected_;
  }
  wake_.notify_one();
}

void WorkQueue::NoteWork() { work_.store(closed_ || !waiting_.empty(), std::memory_order_relaxed); }

bool WorkQueue::RunNext() {
  Entry entry;
  absl::Status verdict;
  TimePoint now;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.empty()) return false;
    entry = std::move(waiting_.front());
    waiting_.pop_front();
    NoteWork();
    now = clock_();
    verdict = Verdict(entry.job, now);
    if (!verdict.ok()) CountDrop(verdict);
  }
  if (!verdict.ok()) {
    entry.job.drop(verdict);
    return true;
  }
  Next next = Next::kDone;
  try {
    next = entry.job.run(now - entry.queued);
  } catch (const std::bad_alloc&) {
    entry.job.drop(absl::ResourceExhaustedError("no memory to run this call"));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (next == Next::kDone) {
    ++counters_.finished;
  } else {
    entry.queued = clock_();
    waiting_.push_back(std::move(entry));
    NoteWork();
  }
  return true;
}

void WorkQueue::ThreadMain() {
  do {
    while (RunNext()) {
    }
  } while (WaitForWork());
}

// False when the thread may end: once the queue is closed, only a thread that runs a job can put one into it (kAgain), and that
// thread goes on with it, so the others may leave when they find the queue empty. True may be for nothing.
bool WorkQueue::WaitForWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleeping_;
  wake_.wait(lock, [this] { return closed_ || !waiting_.empty() || expected_ > 0; });
  --sleeping_;
  if (expected_ > 0) --expected_;  // also where the job came before this thread was awake
  if (!waiting_.empty()) return true;
  if (closed_) return false;
  ++looking_;
  lock.unlock();
  LookOut(work_);
  lock.lock();
  --looking_;
  return true;
}

void WorkQueue::Shutdown() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    NoteWork();
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  while (RunNext()) {  // without a thread of its own the caller finishes the work
  }
}

WorkQueue::Counters WorkQueue::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Counters counters = counters_;
  counters.waiting = static_cast<int>(waiting_.size());
  return counters;
}

}  // namespace moed
