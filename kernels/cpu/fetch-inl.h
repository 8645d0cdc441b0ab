// Fetching weights before they are wanted, for kernels that read them straight from their packed form.
#ifndef MOED_KERNELS_CPU_FETCH_INL_H_
#define MOED_KERNELS_CPU_FETCH_INL_H_

#include <cstdint>

#include "kernels/cpu/inline-inl.h"

namespace moed::cpu {
namespace {

// What one tile of rows fetches while it walks over some panels: into the first-level cache what it will read itself 2 KiB later,
// since the processor's prefetchers stop at each border of 4 KiB; and, where several tiles share a pair of panels, into the
// second-level cache this tile's part of the next pair, so that memory is as busy in one tile as in another. Never faults, also
// beyond the end.
struct Fetch {
  static constexpr int kShareBits = 16;
  const uint8_t* weights;
  int64_t panel_bytes;
  const uint8_t* next;  // this tile's part of the next pair, in its first panel
  int64_t share;        // of a pair, in 2^-kShareBits; 0: nothing of the next pair

  // While the walk goes over `bytes` of each of kPanels panels, those at `at` of the first one.
  template <int kPanels>
  MOED_INLINE void Run(const uint8_t* at, int64_t bytes) const {
    const uint8_t* near = at + kFetchAhead;
    for (int64_t i = 0; i < bytes; i += 64) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) __builtin_prefetch(near + p * panel_bytes + i, 0, 3);
    }
    const uint8_t* far = next + ((at - weights) * share >> kShareBits);
    for (int64_t i = 0; i < (bytes * share >> kShareBits); i += 64) {
      __builtin_prefetch(far + i, 0, 2);
      __builtin_prefetch(far + panel_bytes + i, 0, 2);
    }
  }
};

// For tile `part` of `parts` of the pair at `weights`.
MOED_INLINE Fetch FetchFor(const uint8_t* weights, int64_t panel_bytes, int64_t part, int64_t parts) {
  const int64_t share = parts == 1 ? 0 : (int64_t{1} << Fetch::kShareBits) / parts;
  return {weights, panel_bytes, weights + 2 * panel_bytes + part * panel_bytes / parts, share};
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_FETCH_INL_H_
