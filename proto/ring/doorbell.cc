#include "proto/ring/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <thread>

namespace moed::ring {
namespace {

constexpr int kPausesPerLook = 16;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t* Address(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

// Looks at the word until it changes or `spin` is over, and lets others run where there are more of them than processors.
bool LookAt(const std::atomic<uint32_t>& word, uint32_t old, std::chrono::microseconds spin) {
  const auto end = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (word.load(std::memory_order_acquire) != old) return true;
      Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return word.load(std::memory_order_acquire) != old;
}

}  // namespace

void Ring(std::atomic<uint32_t>& word, std::atomic<uint32_t>& waits) {
  // The change of the word and this look must not swap places, nor the waiter's store and its last look.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (waits.load(std::memory_order_relaxed) == 0) return;
  waits.store(0, std::memory_order_relaxed);
  syscall(SYS_futex, Address(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool Wait(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& waits, std::chrono::microseconds spin,
          std::chrono::microseconds limit) {
  if (LookAt(word, old, spin < limit ? spin : limit)) return true;
  if (limit <= spin) return false;
  waits.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (word.load(std::memory_order_acquire) != old) return true;
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(limit - spin).count();
  const timespec relative = {static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  syscall(SYS_futex, Address(word), FUTEX_WAIT, old, &relative, nullptr, 0);
  return word.load(std::memory_order_acquire) != old;
}

}  // namespace moed::ring
