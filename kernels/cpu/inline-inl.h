// MOED_INLINE and MOED_TILE, for the functions of instruction-set files: they must never be emitted on their own (see kernel_table.h).
#ifndef MOED_KERNELS_CPU_INLINE_INL_H_
#define MOED_KERNELS_CPU_INLINE_INL_H_

#define MOED_INLINE inline __attribute__((always_inline))
// For register tiles: inlined into a larger function they lose their registers.
#define MOED_TILE __attribute__((noinline))

#endif  // MOED_KERNELS_CPU_INLINE_INL_H_
