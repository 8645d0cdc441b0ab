// Waiting for a moment with a processor at hand, by threads that were woken for work that is near but not there yet.
#ifndef MOED_SERVER_LOOK_OUT_H_
#define MOED_SERVER_LOOK_OUT_H_

#include <atomic>

namespace moed {

// Returns when `work` is true, and after 100 microseconds in any case: longer than it takes to parse what usual requests hold
// beside their hidden states, shorter than what an idle server should burn. Lets others have the processor, since they may need it
// for the work to come. The caller then looks for the work itself, under the lock that guards it.
void LookOut(const std::atomic<bool>& work);

}  // namespace moed

#endif  // MOED_SERVER_LOOK_OUT_H_
