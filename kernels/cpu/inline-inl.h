// MOED_INLINE and MOED_TILE, for the functions of instruction-set files: they must never be emitted on their own (see kernel_table.h).
#ifndef MOED_KERNELS_CPU_INLINE_INL_H_
#define MOED_KERNELS_CPU_INLINE_INL_H_

#define MOED_INLINE inline __attribute__((always_inline))
// For register tiles: inlined into a larger function they lose their registers.
#define MOED_TILE __attribute__((noinline))

namespace moed::cpu {
namespace {

// Fetches what lies `ahead` bytes beyond `at`, `bytes` of it (a multiple of 64): the processor's own prefetchers stop at each border of
// 4 KiB. Never faults, also beyond the end.
constexpr long kFetchAhead = 2048;
MOED_INLINE void FetchAhead(const unsigned char* at, long bytes, long ahead = kFetchAhead) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch(at + ahead + i, 0, 3);
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_INLINE_INL_H_
