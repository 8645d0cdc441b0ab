#include "server/log_limiter.h"

#include <algorithm>

namespace moed {
namespace {

constexpr size_t kMaxKind = 80;  // bytes

std::string_view KindOf(std::string_view message) {
  return message.substr(0, std::min(message.find_first_of("0123456789'\"\n"), kMaxKind));
}

}  // namespace

bool LogLimiter::Admit(std::string_view message, int level, TimePoint now) {
  std::string_view kind = KindOf(message);
  auto at = intervals_.find(kind);
  if (at == intervals_.end()) {
    if (intervals_.size() >= limits_.kinds) kind = {};  // one for all that cannot be told apart
    at = intervals_.try_emplace(std::string(kind), Interval{now}).first;
  }
  Interval& interval = at->second;
  if (now - interval.began >= limits_.interval && interval.held_back == 0) interval = {now};
  if (interval.lines < limits_.first) return ++interval.lines, true;
  ++interval.held_back;
  interval.level = level;
  return false;
}

std::vector<LogLimiter::HeldBack> LogLimiter::TakeHeldBack(TimePoint now, bool all) {
  std::vector<HeldBack> out;
  for (auto at = intervals_.begin(); at != intervals_.end();) {
    const Interval& interval = at->second;
    if (!all && now - interval.began < limits_.interval) {
      ++at;
      continue;
    }
    if (interval.held_back > 0) out.push_back({at->first, interval.held_back, interval.level});
    at = intervals_.erase(at);
  }
  return out;
}

}  // namespace moed
