// Threads that help to copy large messages and do nothing else.
//
// A processor copies some 9 GB/s out of what another one received, so a message of a megabyte is worth several threads. Helpers
// sleep, but for some 100 microseconds after they were expected and for a given time after a copy, in which they look out for
// one. Nobody waits for a helper to come: a copy ends as well without.
// Threads: Expect and Copy may be called from any thread. No lock is held while anybody copies.
#ifndef MOED_SERVER_COPY_HELPERS_H_
#define MOED_SERVER_COPY_HELPERS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moed {

// A copy that any number of threads may take part in at once.
class SharedCopy {
 public:
  virtual ~SharedCopy() = default;
  // Copies pieces until none is left to begin. Does not throw.
  virtual void TakePart() = 0;
};

class CopyHelpers {
 public:
  static constexpr int kMost = 4;

  CopyHelpers() = default;
  ~CopyHelpers() { Stop(); }
  CopyHelpers(const CopyHelpers&) = delete;
  CopyHelpers& operator=(const CopyHelpers&) = delete;

  // Starts `threads` in [0, kMost], which may be more than ever help at once. One that helped looks out for `linger` before it
  // sleeps: the next message of a model's decoding follows soon, and they would wake one after the other. At most once.
  void Start(int threads, std::chrono::microseconds linger = {});
  // Ends them, after the copy that each is at. From then on it is as if none had been started.
  void Stop();

  // How many are worth waking for a message of `bytes`, beside the two threads that receive and compute it.
  static int For(size_t bytes);

  // Says that a Copy for so many helpers is near: those that sleep wake one after the other, at the price of one wake-up here.
  void Expect(int helpers);

  // Takes part in `copy`, and lets up to `helpers` do so. Returns when no piece is left to begin: others may still be at theirs,
  // and hold `copy` until they are done.
  void Copy(const std::shared_ptr<SharedCopy>& copy, int helpers);

 private:
  void ThreadMain();
  void Look(std::unique_lock<std::mutex>* lock, std::chrono::microseconds limit);
  bool Call(int helpers);  // needs the lock; true: wake one
  void NoteWork();         // needs the lock
  std::shared_ptr<SharedCopy> TakeOffer();  // needs the lock

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<SharedCopy> offered_;  // the latest, as long as helpers are wanted and its Copy runs; guarded by mutex_
  int wanted_ = 0;                       // helpers that offered_ may still have; guarded by mutex_
  bool closed_ = false;                  // guarded by mutex_
  int sleeping_ = 0, looking_ = 0;       // helpers; guarded by mutex_
  int called_ = 0;                       // of those that sleep, the ones that are to wake; guarded by mutex_
  std::atomic<bool> work_{false};        // closed_ or something is offered; written under mutex_, read by those that look out
  std::chrono::microseconds linger_{};   // before the threads start
  std::vector<std::thread> threads_;     // written by Start and Stop
};

}  // namespace moed

#endif  // MOED_SERVER_COPY_HELPERS_H_
