// The queue in front of the device: bounded, first in first out, as many jobs at a time as it has threads.
//
// Threads: Push and counters may be called from any thread. Jobs start in the order of their arrival, on the threads that Start
// made (or, in tests, on the caller of RunNext); one thread runs them one after the other. The steps of one job never overlap.
// Callbacks are never called with the lock held, so they may Push. Invariants: an accepted job ends exactly once, by a run that
// returns kDone or by drop, also across Shutdown. Nobody waits for a job that cannot matter any more: a job whose deadline passed
// or whose caller is gone is dropped before its next step. A full queue refuses at once, after dropping such jobs.
#ifndef MOED_SERVER_WORK_QUEUE_H_
#define MOED_SERVER_WORK_QUEUE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace moed {

class WorkQueue {
 public:
  using Duration = std::chrono::steady_clock::duration;
  using TimePoint = std::chrono::steady_clock::time_point;
  using Clock = std::function<TimePoint()>;

  enum class Next {
    kDone,
    kAgain,  // the job has another step: it goes to the back of the queue, whatever the capacity, so that others get a turn
  };

  struct Job {
    // Called on a compute thread with the time since the job was last put into the queue. May throw std::bad_alloc as
    // long as it has not answered: then drop is called with RESOURCE_EXHAUSTED.
    std::function<Next(Duration waited)> run;
    // Called instead of run: DEADLINE_EXCEEDED or CANCELLED; or after it, see there.
    std::function<void(absl::Status)> drop;
    // Whether the caller went away; may be empty. Called on any thread, must not block.
    std::function<bool()> gone;
    TimePoint deadline = TimePoint::max();
  };

  struct Counters {
    uint64_t accepted = 0;
    uint64_t refused = 0;    // the queue was full or shut down
    uint64_t expired = 0;    // dropped: the deadline passed
    uint64_t cancelled = 0;  // dropped: the caller went away
    uint64_t finished = 0;
    int waiting = 0;
  };

  // At most `capacity` >= 1 jobs wait, the running ones not counted.
  WorkQueue(int capacity, Clock clock);
  // Shutdown.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Starts `threads` >= 1 compute threads, each of which calls `first` (may be empty) before any job. At most once.
  void Start(int threads, const std::function<void()>& first = {});

  // Hands over `job`. RESOURCE_EXHAUSTED when full (waiting and allowed jobs in the text), UNAVAILABLE after Shutdown: the
  // job's callbacks are not called then.
  absl::Status Push(Job job);

  // Says that a Push is near, so that waking a thread takes place beside what the caller still has to do: one that sleeps wakes and
  // looks out for the job, for 100 microseconds at most. Costs no more than the wake-up that Push then saves; never needed.
  void Expect();

  // Runs or drops the next job on this thread; false when none waits. For tests, instead of Start.
  bool RunNext();

  // Accepts nothing more, finishes (or drops, by the rules above) what was accepted, and returns when all is done.
  void Shutdown();

  Counters counters() const;

 private:
  struct Entry {
    Job job;
    TimePoint queued;
  };

  // OK, or why the job must not run.
  static absl::Status Verdict(const Job& job, TimePoint now);
  // Removes the jobs that must not run and returns them. Needs the lock.
  std::vector<std::pair<Entry, absl::Status>> TakeDead();
  void CountDrop(const absl::Status& why);  // needs the lock
  void ThreadMain();
  bool WaitForWork();
  void NoteWork();  // needs the lock

  const int capacity_;
  const Clock clock_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> waiting_;  // guarded by mutex_
  Counters counters_;          // guarded by mutex_, `waiting` unused
  bool closed_ = false;        // guarded by mutex_
  int sleeping_ = 0;           // threads that wait for wake_; guarded by mutex_
  // Whoever is counted in one of these calls RunNext after it no longer is, so Push need not wake another. Guarded by mutex_.
  int looking_ = 0;            // threads that look out
  int expected_ = 0;           // calls of Expect for which a thread was woken that is not awake yet
  std::atomic<bool> work_{false};  // closed_ or something waits; written under mutex_, read by those that look out
  std::vector<std::thread> threads_;  // written by Start and Shutdown
};

}  // namespace moed

#endif  // MOED_SERVER_WORK_QUEUE_H_
