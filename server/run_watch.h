// Notices runs that take longer than any should: a kernel that never ends, or a layer that the machine is too slow for.
//
// Nobody can stop such a run, and whatever waits behind it waits as long. So all that is done is to tell, once when a run is beyond
// the limit, and once when none is any more.
// Threads: the one that Start makes calls `longest` and `tell`; Look is for it, and for tests without it.
#ifndef MOED_SERVER_RUN_WATCH_H_
#define MOED_SERVER_RUN_WATCH_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "server/work_queue.h"

namespace moed {

class RunWatch {
 public:
  using Duration = WorkQueue::Duration;
  using TimePoint = WorkQueue::TimePoint;
  using Longest = std::function<std::optional<WorkQueue::Running>()>;
  // What hangs, and for how long; empty: nothing does any more.
  using Tell = std::function<void(const std::string& what)>;

  // `limit` > 0.
  RunWatch(Duration limit, Longest longest, Tell tell);
  // Ends the thread, which may be telling.
  ~RunWatch();
  RunWatch(const RunWatch&) = delete;
  RunWatch& operator=(const RunWatch&) = delete;

  // Looks several times within the limit, at least once a second. At most once.
  void Start();
  // Looks at what runs at `now`.
  void Look(TimePoint now);

 private:
  const Duration limit_;
  const Longest longest_;
  const Tell tell_;
  bool hangs_ = false;  // as was told
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace moed

#endif  // MOED_SERVER_RUN_WATCH_H_
