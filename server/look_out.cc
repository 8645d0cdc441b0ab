#include "server/look_out.h"

#include <thread>

namespace moed {
namespace {

constexpr int kPausesPerLook = 8;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void LookOut(const std::atomic<bool>& work, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (work.load(std::memory_order_relaxed)) return;
      Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
}

}  // namespace moed
