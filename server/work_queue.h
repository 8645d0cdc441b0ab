// The queue in front of the device: bounded, as many runs at a time as it has threads. What runs next, and together, is the
// batcher's rule (batcher.h).
//
// Threads: Push, RetryDelay and counters may be called from any thread. Runs take place on the threads that Start made, on the
// caller of a Push that allows it, or, in tests, on that of RunNext; one thread has one after the other. The runs of one work
// never overlap. Run and Drop are never called with the lock held, so they may Push. Invariants: an accepted work ends exactly
// once, by a run that is done with it or by Drop, also across Shutdown. Nobody waits for a work that cannot matter any more:
// one whose deadline passed or whose caller is gone is dropped before its next run. A full queue refuses at once, after
// dropping such works, for which it looks once a millisecond: a look costs as much as many refusals.
#ifndef MOED_SERVER_WORK_QUEUE_H_
#define MOED_SERVER_WORK_QUEUE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/batcher.h"
#include "server/queued_work.h"

namespace moed {

class WorkQueue {
 public:
  using Duration = QueuedWork::Duration;
  using TimePoint = QueuedWork::TimePoint;
  using Part = QueuedWork::Part;
  using Limits = Batcher::Limits;
  using Clock = std::function<TimePoint()>;

  struct Counters {
    uint64_t accepted = 0;
    uint64_t refused = 0;    // the queue was full or shut down
    uint64_t expired = 0;    // dropped: the deadline passed
    uint64_t cancelled = 0;  // dropped: the caller went away
    uint64_t finished = 0;   // answered by a run
    uint64_t runs = 0;
    uint64_t rows = 0;       // of runs
    uint64_t merged = 0;     // works that shared a run
    int waiting = 0;
    int64_t waiting_rows = 0;
  };

  // A run that has begun and not ended.
  struct Running {
    std::string group;
    int64_t rows = 0;  // of its first work
    TimePoint began;
  };

  // The limits are for what waits, the running not counted.
  WorkQueue(const Limits& limits, Clock clock);
  // Shutdown.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Starts `threads` >= 1 compute threads, each of which calls `first` (may be empty) before any work. After a run with nothing
  // else to do a thread looks out for `linger` before it sleeps: the next call of a model's decoding follows the answer by some
  // hundred microseconds, and waking a thread takes tens. At most once.
  void Start(int threads, const std::function<void()>& first = {}, std::chrono::microseconds linger = {});

  // Hands over `work`. When nothing waits or runs, and its run will take no longer than `here` by what runs of its group took
  // lately, it runs on this thread before Push returns, which saves what waking another takes. RESOURCE_EXHAUSTED when full
  // (what waits and what may in the text), UNAVAILABLE after Shutdown: nothing of the work is called then.
  absl::Status Push(std::shared_ptr<QueuedWork> work, Duration here = {});

  // Whether a Push of a work of `rows` rows would find room now, before memory and copies are spent on it: RESOURCE_EXHAUSTED as of
  // Push, and counted as refused, when not. OK after Shutdown, too: Push tells.
  absl::Status CheckRoom(int64_t rows);

  // How long what waits now will take, by the rows that runs had lately in their time: when to try again after a Push was refused.
  // 1 ms to a minute; 100 ms as long as nothing ran.
  Duration RetryDelay() const;

  // Says that a Push is near, so that waking a thread takes place beside what the caller still has to do: one that sleeps wakes and
  // looks out for the work, for 100 microseconds at most. Costs no more than the wake-up that Push then saves; never needed.
  void Expect();

  // Has the next run, or drops what must not run, on this thread; false when nothing is due. For tests, instead of Start.
  bool RunNext();

  // Accepts nothing more, finishes (or drops, by the rules above) what was accepted, and returns when all is done.
  void Shutdown();

  Counters counters() const;

  // The run that began first of those under way; nothing: none is.
  std::optional<Running> LongestRun() const;

 private:
  // What a thread is about to run, and to drop.
  struct Taken {
    std::vector<Part> parts;
    Batcher::Dead dead;
    TimePoint at;
  };

  absl::Status Room(int64_t rows, Batcher::Dead* dead);  // needs the lock
  void Drop(const Batcher::Dead& dead);
  void CountDead(const Batcher::Dead& dead);  // needs the lock
  void Measure(Duration took, int64_t rows);  // needs the lock
  bool FitsHere(const QueuedWork& work, Duration here) const;  // needs the lock
  Taken Take();  // needs the lock
  bool Execute(Taken taken);
  void RunHere(Taken taken);
  void EndRun(std::vector<Part> parts, TimePoint began);
  bool PutBack(const Part& part, TimePoint now);  // needs the lock
  void ThreadMain();
  bool Linger();
  bool WaitForWork();
  void NoteWork();  // needs the lock

  const Clock clock_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  Batcher batcher_;            // guarded by mutex_
  Counters counters_;          // guarded by mutex_, `waiting*` unused
  TimePoint next_look_ = TimePoint::min();  // for works that must not run, where there is no room; guarded by mutex_
  double seconds_ = 0;         // that runs took, the latest counting most; guarded by mutex_
  double rows_ = 0;            // of theirs, counted alike; guarded by mutex_
  bool closed_ = false;        // guarded by mutex_
  struct Started {
    const QueuedWork* first;  // which the run holds
    TimePoint at;
  };
  std::vector<Started> running_;  // runs that have begun; guarded by mutex_
  int here_ = 0;               // callers of Push that run theirs, one at most; guarded by mutex_
  std::condition_variable left_;  // here_ has become 0
  int sleeping_ = 0;           // threads that wait for wake_; guarded by mutex_
  // Whoever is counted in one of these calls RunNext after it no longer is, so Push need not wake another. Guarded by mutex_.
  int looking_ = 0;            // threads that look out
  int expected_ = 0;           // calls of Expect for which a thread was woken that is not awake yet
  std::atomic<bool> work_{false};  // closed_ or something waits; written under mutex_, read by those that look out
  std::vector<std::thread> threads_;  // written by Start and Shutdown
  std::chrono::microseconds linger_{};  // before the threads start
  std::atomic<int> at_once_{1};       // threads, for RetryDelay
};

}  // namespace moed

#endif  // MOED_SERVER_WORK_QUEUE_H_
