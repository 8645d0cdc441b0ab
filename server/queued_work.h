// What compute threads are given to do: pieces of work that are measured in rows, may share a run, and may be cut into several.
//
// Threads: the queue that holds a work calls Run on a compute thread and Drop on any, one at a time; Gone is called on any thread,
// also beside Run. A work is held until it has ended.
#ifndef MOED_SERVER_QUEUED_WORK_H_
#define MOED_SERVER_QUEUED_WORK_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace moed {

class QueuedWork {
 public:
  using Duration = std::chrono::steady_clock::duration;
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Terms {
    // Works of one group run in the order of their arrival; groups share the device by rows. There must be few of them for the life
    // of a queue, such as the layers.
    std::string group;
    // Works of one group and kind may share a run. Empty: with nothing.
    std::string kind;
    int64_t rows = 1;
    // With more rows than these the work goes in several runs of so many, alone in each. 0: in one run, however many they are.
    int64_t step = 0;
    TimePoint deadline = TimePoint::max();
  };

  // What one run does of one work: rows [first, first + rows).
  struct Part {
    std::shared_ptr<QueuedWork> work;
    int64_t first = 0;
    int64_t rows = 0;
    TimePoint queued;    // when the work was last put into the queue
    Duration waited{};   // since then, when the run began
    // Written by Run. False: the work is not answered, and goes on from row `next`, whatever the queue's limits, after those of its
    // group that wait now.
    bool done = false;
    int64_t next = 0;    // first + rows unless Run says otherwise
  };

  explicit QueuedWork(Terms terms) : terms_(std::move(terms)) {}
  virtual ~QueuedWork() = default;
  QueuedWork(const QueuedWork&) = delete;
  QueuedWork& operator=(const QueuedWork&) = delete;

  const Terms& terms() const { return terms_; }

  // Whether nobody waits for the result any more. Must not block.
  virtual bool Gone() const { return false; }
  // Runs `parts`, the first of which is of this work; all have its group, and its kind where there are several. Every work that it
  // answers must be `done`. May throw std::bad_alloc: what is not done then is dropped with RESOURCE_EXHAUSTED.
  virtual void Run(std::span<Part> parts) = 0;
  // The end of a work that no run answered: DEADLINE_EXCEEDED, CANCELLED or RESOURCE_EXHAUSTED. Must not throw.
  virtual void Drop(const absl::Status& why) = 0;

 private:
  const Terms terms_;
};

}  // namespace moed

#endif  // MOED_SERVER_QUEUED_WORK_H_
