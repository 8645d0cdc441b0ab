// Waiting for a word of shared memory to change: some microseconds of looking at it, then sleep in the kernel.
//
// One side changes the word and calls Ring; the other calls Wait. The word and the flag may be shared between processes. The flag
// makes waking free where nobody sleeps: the waiter sets it before it looks for the last time, and the waker looks at it after the
// change, both in one total order, so that one of them sees the other.
#ifndef MOED_PROTO_RING_DOORBELL_H_
#define MOED_PROTO_RING_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moed::ring {

// To call after `word` was changed. Wakes who sleeps on it.
void Ring(std::atomic<uint32_t>& word, std::atomic<uint32_t>& waits);

// Waits until `word` is not `old`, at most `limit`; looks at it for `spin` before it sleeps. True when it has changed. May return
// early, with false, when a signal comes or the other side wakes for nothing.
bool Wait(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& waits, std::chrono::microseconds spin,
          std::chrono::microseconds limit);

}  // namespace moed::ring

#endif  // MOED_PROTO_RING_DOORBELL_H_
