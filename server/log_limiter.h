// Which of many like warnings are worth a line: the first of each kind in an interval, and then how many more there were.
//
// Not thread-safe: whoever owns it has a lock. Time is an argument. A kind is the beginning of a message up to its first digit or
// quotation mark, where what differs between like messages tends to begin; so many kinds at most are told apart, all others are
// one.
#ifndef MOED_SERVER_LOG_LIMITER_H_
#define MOED_SERVER_LOG_LIMITER_H_

#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace moed {

class LogLimiter {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Limits {
    int first = 10;                     // lines of a kind in an interval
    std::chrono::seconds interval{10};  // from the first line of a kind on
    size_t kinds = 64;
  };
  // What was held back of one kind in an interval that is over.
  struct HeldBack {
    std::string kind;
    int count = 0;
    int level = 0;  // of the last one
  };

  explicit LogLimiter(const Limits& limits) : limits_(limits) {}

  // Whether a message at `level` gets its line.
  bool Admit(std::string_view message, int level, TimePoint now);

  // Of intervals that are over, or of all: what there is to say of them, once.
  std::vector<HeldBack> TakeHeldBack(TimePoint now, bool all = false);

 private:
  struct Interval {
    TimePoint began;
    int lines = 0;
    int held_back = 0;
    int level = 0;
  };

  const Limits limits_;
  std::map<std::string, Interval, std::less<>> intervals_;  // by kind
};

}  // namespace moed

#endif  // MOED_SERVER_LOG_LIMITER_H_
