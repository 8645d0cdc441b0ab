#include "server/copy_helpers.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "server/look_out.h"

namespace moed {
namespace {

constexpr size_t kBytesPerHelper = size_t{224} << 10;  // a thread takes some 30 microseconds for them

}  // namespace

int CopyHelpers::For(size_t bytes) { return static_cast<int>(std::min(bytes / kBytesPerHelper, size_t{kMost})); }

void CopyHelpers::Start(int threads, std::chrono::microseconds linger) {
  linger_ = linger;
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "copy");  // as `top -H` shows it
      ThreadMain();
    });
  }
}

void CopyHelpers::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    NoteWork();
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CopyHelpers::NoteWork() { work_.store(closed_ || offered_ != nullptr, std::memory_order_relaxed); }

// Those that look out come by themselves; of the others the first is woken by the caller, and each wakes the next.
bool CopyHelpers::Call(int helpers) {
  const int more = std::min(helpers - looking_, sleeping_);
  if (closed_ || more <= called_) return false;
  return std::exchange(called_, more) == 0;
}

void CopyHelpers::Expect(int helpers) {
  if (helpers <= 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!Call(helpers)) return;
  }
  wake_.notify_one();
}

void CopyHelpers::Copy(const std::shared_ptr<SharedCopy>& copy, int helpers) {
  if (helpers <= 0) return copy->TakePart();
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) offered_ = copy, wanted_ = helpers;  // the one before, if any, is held by its own Copy
    NoteWork();
    wake = Call(helpers);
  }
  if (wake) wake_.notify_one();
  copy->TakePart();
  std::lock_guard<std::mutex> lock(mutex_);
  if (offered_ != copy) return;
  offered_.reset();
  NoteWork();
}

std::shared_ptr<SharedCopy> CopyHelpers::TakeOffer() {
  std::shared_ptr<SharedCopy> copy = offered_;
  if (copy != nullptr && --wanted_ == 0) offered_.reset();
  NoteWork();
  return copy;
}

void CopyHelpers::Look(std::unique_lock<std::mutex>* lock, std::chrono::microseconds limit) {
  ++looking_;
  lock->unlock();
  LookOut(work_, limit);
  lock->lock();
  --looking_;
}

void CopyHelpers::ThreadMain() {
  std::unique_lock<std::mutex> lock(mutex_);
  bool helped = false;  // since it last slept or looked in vain
  while (!closed_) {
    std::shared_ptr<SharedCopy> copy = TakeOffer();
    if (copy != nullptr) {
      lock.unlock();
      copy->TakePart();
      copy.reset();  // perhaps the last that held it
      lock.lock();
      helped = true;
      continue;
    }
    if (std::exchange(helped, false) && linger_.count() > 0) {
      Look(&lock, linger_);
      continue;
    }
    ++sleeping_;
    wake_.wait(lock, [this] { return closed_ || called_ > 0; });
    --sleeping_;
    if (closed_) return;
    if (--called_ > 0) wake_.notify_one();
    Look(&lock, kLookOut);
  }
}

}  // namespace moed
