// Which of the works that wait run next, and together: the rule alone, without threads and with the time as an argument.
//
// A run takes the work of one group that waits longest and, up to a budget of rows, those of its kind behind it. They wait for each
// other no longer than `wait`: by default not at all, so that what shares a run is what came while the device was busy. A work of
// more rows than the budget goes alone; one of more than its step a step at a time, and then behind those of its group that wait:
// small ones pass between.
// Groups share the device by what was run for them: the one that had least is next. A run counts as its rows and kRunCost more,
// since it reads weights whatever their number. A group that comes after it had nothing to do starts level with the others: it is
// owed nothing for that time. So between two runs of a group that has work every other gets what the first of them counted for,
// and at most one run more. Nobody runs in vain: a work whose deadline passed or whose caller is gone is handed back as dead
// instead. So is one that has less time left than twice what the next run of its group will take, by what its runs took lately,
// while another waits there that has the time. Without that, a queue that is longer than deadlines allow has each call run when
// it is just too late for it.
// Threads: one at a time.
#ifndef MOED_SERVER_BATCHER_H_
#define MOED_SERVER_BATCHER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/queued_work.h"

namespace moed {

class Batcher {
 public:
  using Duration = QueuedWork::Duration;
  using TimePoint = QueuedWork::TimePoint;
  using Part = QueuedWork::Part;
  using Dead = std::vector<std::pair<std::shared_ptr<QueuedWork>, absl::Status>>;

  static constexpr int64_t kRunCost = 64;  // rows that a run counts for beside its own

  struct Limits {
    int calls = 256;            // works that may wait, at least 1
    int64_t rows = 131072;      // of theirs that may wait; a work that finds nothing waiting is never too large
    int64_t batch_rows = 1024;  // that works may have together in one run, at least 1
    Duration wait{};            // for others to share a run with, from a work's arrival
  };

  explicit Batcher(const Limits& limits) : limits_(limits) {}

  // RESOURCE_EXHAUSTED with the numbers when a work of `rows` rows finds no room.
  absl::Status CheckRoom(int64_t rows) const;

  // Adds a work, whatever the limits.
  void Add(std::shared_ptr<QueuedWork> work, TimePoint now);
  // Puts back the rest of a work that ran a part, from row part.next. Nothing changes when it throws std::bad_alloc.
  void Return(const Part& part, TimePoint now);

  // The parts of the next run, the oldest work first; empty when nothing is due. `hurry`: whatever waits is due. Works that it
  // comes by and that must not run go to `dead`, with DEADLINE_EXCEEDED or CANCELLED.
  std::vector<Part> Take(TimePoint now, bool hurry, Dead* dead);
  // All works that must not run.
  Dead TakeDead(TimePoint now);

  // Tells how long a run of a group took.
  void Measure(const std::string& group, int64_t rows, Duration took);

  // How long a run of `work` alone will take at most, by what its group's runs took lately; max() as long as nothing ran there.
  Duration Expected(const QueuedWork& work) const;

  // When Take would find something: in the past, or later where works wait for others. TimePoint::max(): nothing waits.
  TimePoint Due() const;

  int waiting() const { return waiting_; }
  int64_t waiting_rows() const { return waiting_rows_; }

 private:
  struct Group {
    std::deque<Part> parts;  // that wait, in order; rows: all that is left
    int64_t served = 0;      // what its runs count for
    // Of its runs, the latest counting most.
    double seconds = 0, rows = 0, runs = 0;
  };

  bool Alone(const Part& part) const;
  TimePoint DueOf(const Group& group) const;
  // The deadline that a work of the group has to have to be through with a run that begins now with `head`; TimePoint::min()
  // when nobody who waits there has such a deadline, or nothing is known of its runs.
  TimePoint Earliest(const Group& group, const Part& head, TimePoint now) const;
  Group* Choose(TimePoint now, bool hurry);
  void Fill(Group* group, TimePoint now, TimePoint earliest, std::vector<Part>* batch, Dead* dead);
  void Put(Part part);
  Part Remove(Group* group, std::deque<Part>::iterator at);
  void Forget(const Part& part);

  const Limits limits_;
  std::map<std::string, Group> groups_;  // kept when they are empty: what they had counts
  int64_t level_ = 0;                    // served of the group that ran last, before it ran
  int waiting_ = 0;
  int64_t waiting_rows_ = 0;
};

}  // namespace moed

#endif  // MOED_SERVER_BATCHER_H_
