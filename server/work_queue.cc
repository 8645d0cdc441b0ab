#include "server/work_queue.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <utility>

#include "server/look_out.h"

namespace moed {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(1);  // of a full queue at what must not run
constexpr size_t kUsualRuns = 16;  // at a time
constexpr double kMemory = 0.9;  // what a run still counts for in the rate after the next one

}  // namespace

WorkQueue::WorkQueue(const Limits& limits, Clock clock) : clock_(std::move(clock)), batcher_(limits) {
  running_.reserve(kUsualRuns);  // what a run is made of must not need memory once it was taken
}

WorkQueue::~WorkQueue() { Shutdown(); }

void WorkQueue::Start(int threads, const std::function<void()>& first, std::chrono::microseconds linger) {
  at_once_ = threads;
  linger_ = linger;
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, first] {
      pthread_setname_np(pthread_self(), "compute");  // as `top -H` shows it
      if (first) first();
      ThreadMain();
    });
  }
}

void WorkQueue::CountDead(const Batcher::Dead& dead) {
  for (const auto& [work, why] : dead) ++(absl::IsDeadlineExceeded(why) ? counters_.expired : counters_.cancelled);
}

void WorkQueue::Drop(const Batcher::Dead& dead) {
  for (const auto& [work, why] : dead) work->Drop(why);
}

// Whether a work for which there is room is best run by who brought it: not beside other runs, nor where a thread looks out for it.
bool WorkQueue::FitsHere(const QueuedWork& work, Duration here) const {
  return here > Duration::zero() && !closed_ && running_.empty() && here_ + looking_ + expected_ + batcher_.waiting() == 0 &&
         batcher_.Expected(work) <= here;
}

// Room for a work of so many rows, made by taking out what must not run, which goes to `dead`.
absl::Status WorkQueue::Room(int64_t rows, Batcher::Dead* dead) {
  absl::Status room = batcher_.CheckRoom(rows);
  if (room.ok()) return room;
  const TimePoint now = clock_();
  if (now < next_look_) return room;
  next_look_ = now + kBetweenLooks;
  *dead = batcher_.TakeDead(now);
  CountDead(*dead);
  NoteWork();
  return batcher_.CheckRoom(rows);
}

absl::Status WorkQueue::CheckRoom(int64_t rows) {
  Batcher::Dead dead;
  absl::Status room;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) room = Room(rows, &dead);
    counters_.refused += room.ok() ? 0 : 1;
  }
  Drop(dead);
  return room;
}

absl::Status WorkQueue::Push(std::shared_ptr<QueuedWork> work, Duration here) {
  Batcher::Dead dead;
  absl::Status result;
  std::optional<Taken> run;
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    result = closed_ ? absl::UnavailableError("the server is draining") : Room(work->terms().rows, &dead);
    if (result.ok()) {
      const bool fits = FitsHere(*work, here);
      batcher_.Add(std::move(work), clock_());
      if (fits) run = Take(), ++here_;
    }
    ++(result.ok() ? counters_.accepted : counters_.refused);
    NoteWork();
    // Threads that look out, or woke to do so, come by themselves.
    wake = result.ok() && batcher_.waiting() > looking_ + expected_;
  }
  Drop(dead);
  if (wake) wake_.notify_one();
  if (run) RunHere(*std::move(run));
  return result;
}

// Runs what was taken on this thread, which has other things to do afterwards.
void WorkQueue::RunHere(Taken taken) {
  Execute(std::move(taken));
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --here_;
    wake = batcher_.waiting() > looking_ + expected_;  // what is left of the work
    left_.notify_all();  // with the lock: whoever waits for it may destroy the queue
  }
  if (wake) wake_.notify_one();
}

WorkQueue::Duration WorkQueue::RetryDelay() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::chrono::duration<double> unknown = std::chrono::milliseconds(100), least = std::chrono::milliseconds(1),
                                      most = std::chrono::minutes(1);
  if (rows_ == 0) return std::chrono::duration_cast<Duration>(unknown);
  const double rows = static_cast<double>(std::max<int64_t>(batcher_.waiting_rows(), batcher_.waiting()));
  const std::chrono::duration<double> delay(rows * seconds_ / rows_ / at_once_);
  return std::chrono::duration_cast<Duration>(std::clamp(delay, least, most));
}

void WorkQueue::Measure(Duration took, int64_t rows) {
  seconds_ = kMemory * seconds_ + std::chrono::duration<double>(took).count();
  rows_ = kMemory * rows_ + static_cast<double>(std::max<int64_t>(rows, 1));
}

void WorkQueue::Expect() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (looking_ + expected_ > 0 || sleeping_ == 0) return;
    ++expected_;
  }
  wake_.notify_one();
}

void WorkQueue::NoteWork() { work_.store(closed_ || batcher_.waiting() > 0, std::memory_order_relaxed); }

// What runs next, and what must not run. Needs the lock.
WorkQueue::Taken WorkQueue::Take() {
  Taken taken;
  taken.at = clock_();
  taken.parts = batcher_.Take(taken.at, closed_, &taken.dead);
  CountDead(taken.dead);
  NoteWork();
  if (!taken.parts.empty()) running_.push_back({taken.parts.front().work.get(), taken.at});
  return taken;
}

// Drops and runs what was taken; false when that was nothing.
bool WorkQueue::Execute(Taken taken) {
  Drop(taken.dead);
  if (taken.parts.empty()) return !taken.dead.empty();
  try {
    taken.parts.front().work->Run(taken.parts);
  } catch (const std::bad_alloc&) {
    for (Part& part : taken.parts) {
      if (part.done) continue;
      part.work->Drop(absl::ResourceExhaustedError("no memory to run this call"));
      part.done = true;
    }
  }
  EndRun(std::move(taken.parts), taken.at);
  return true;
}

bool WorkQueue::RunNext() {
  Taken taken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (batcher_.waiting() == 0) return false;
    taken = Take();
  }
  return Execute(std::move(taken));
}

// False without memory for it.
bool WorkQueue::PutBack(const Part& part, TimePoint now) {
  try {
    batcher_.Return(part, now);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void WorkQueue::EndRun(std::vector<Part> parts, TimePoint began) {
  const QueuedWork* const first = parts.front().work.get();
  size_t lost = 0;  // parts that are neither done nor put back, moved to the front
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto own = [first](const Started& run) { return run.first == first; };
    running_.erase(std::find_if(running_.begin(), running_.end(), own));
    const TimePoint now = clock_();
    int64_t rows = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      rows += parts[i].rows;
      if (!parts[i].done && PutBack(parts[i], now)) continue;
      ++counters_.finished;
      if (!parts[i].done) std::swap(parts[lost++], parts[i]);
    }
    ++counters_.runs;
    counters_.rows += static_cast<uint64_t>(rows);
    counters_.merged += parts.size() > 1 ? parts.size() : 0;
    Measure(now - began, rows);
    batcher_.Measure(first->terms().group, rows, now - began);
    NoteWork();
  }
  for (size_t i = 0; i < lost; ++i) parts[i].work->Drop(absl::ResourceExhaustedError("no memory to go on with this call"));
}

void WorkQueue::ThreadMain() {
  do {
    bool ran = false;
    do {
      while (RunNext()) ran = true;
    } while (ran && Linger());
  } while (WaitForWork());
}

// After a run: looks out for the next call of who got the answer. True when there is work.
bool WorkQueue::Linger() {
  if (linger_.count() == 0) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  ++looking_;
  lock.unlock();
  LookOut(work_, linger_);
  lock.lock();
  --looking_;
  return batcher_.waiting() > 0 && batcher_.Due() <= clock_();
}

// False when the thread may end: once the queue is closed, only a thread that has a run can put something into it (what is not
// done), and that thread goes on with it, so the others may leave when they find the queue empty. True may be for nothing.
bool WorkQueue::WaitForWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleeping_;
  while (!closed_ && expected_ == 0) {
    const TimePoint due = batcher_.Due(), now = clock_();
    if (due <= now) break;
    if (due == TimePoint::max()) {
      wake_.wait(lock);
    } else {
      wake_.wait_for(lock, due - now);
    }
  }
  --sleeping_;
  if (expected_ > 0) --expected_;  // also where the work came before this thread was awake
  if (batcher_.waiting() > 0) return true;
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
  {
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [this] { return here_ == 0; });
  }
  while (RunNext()) {  // without a thread of its own the caller finishes the work
  }
}

std::optional<WorkQueue::Running> WorkQueue::LongestRun() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto earlier = [](const Started& a, const Started& b) { return a.at < b.at; };
  const auto longest = std::min_element(running_.begin(), running_.end(), earlier);
  if (longest == running_.end()) return std::nullopt;
  return Running{longest->first->terms().group, longest->first->terms().rows, longest->at};
}

WorkQueue::Counters WorkQueue::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Counters counters = counters_;
  counters.waiting = batcher_.waiting();
  counters.waiting_rows = batcher_.waiting_rows();
  return counters;
}

}  // namespace moed
