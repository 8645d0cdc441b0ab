#include "server/run_watch.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr int kLooks = 4;                   // within the limit
constexpr std::chrono::seconds kLongest(1);  // between two looks

}  // namespace

RunWatch::RunWatch(Duration limit, Longest longest, Tell tell)
    : limit_(limit), longest_(std::move(longest)), tell_(std::move(tell)) {}

RunWatch::~RunWatch() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void RunWatch::Start() {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "run-watch");  // as `top -H` shows it
    const Duration between = std::min<Duration>(limit_ / kLooks, kLongest);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_.wait_for(lock, between, [this] { return stopping_; })) {
      lock.unlock();
      Look(std::chrono::steady_clock::now());
      lock.lock();
    }
  });
}

void RunWatch::Look(TimePoint now) {
  const std::optional<WorkQueue::Running> run = longest_();
  const bool hangs = run && now - run->began > limit_;
  if (hangs == hangs_) return;
  hangs_ = hangs;
  if (!hangs) return tell_("");
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - run->began).count();
  tell_(absl::StrCat("a run of ", run->group, " with ", run->rows, " rows is under way for ", seconds, " s"));
}

}  // namespace moed
