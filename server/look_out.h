// Waiting for a moment with a processor at hand, by threads that expect work: it was announced, or comes as
// soon as the last was answered.
#ifndef MOED_SERVER_LOOK_OUT_H_
#define MOED_SERVER_LOOK_OUT_H_

#include <atomic>
#include <chrono>

namespace moed {

// For work that was announced: longer than it takes to parse what usual requests hold beside their hidden states, shorter than what an
// idle server should burn.
inline constexpr std::chrono::microseconds kLookOut(100);

// Returns when `work` is true, and after `limit` in any case. Lets others have the processor, since they may need it for the work to
// come. The caller then looks for the work itself, under the lock that guards it.
void LookOut(const std::atomic<bool>& work, std::chrono::microseconds limit = kLookOut);

}  // namespace moed

#endif  // MOED_SERVER_LOOK_OUT_H_
