// Loops of one kind of arithmetic in registers, without a load or store: what a core can do at most. A loop that the
// processor has no instructions for is absent.
//
// Each runs enough independent chains that the issue rate is the limit, not the latency. Plain functions, callable from any
// thread; the tile loops set the calling thread's tile configuration and release it before they return.
#ifndef MOED_BENCH_LOOPS_H_
#define MOED_BENCH_LOOPS_H_

#include <cstdint>
#include <optional>

#include "kernels/device_info.h"

namespace moed::bench {

struct Loop {
  void (*run)(int64_t steps) = nullptr;
  int64_t steps = 0;        // that take about 10 ms
  double operations = 0.0;  // of one step, two per multiply-add
};

// float32 fused multiply-adds (multiply, then add, before AVX2) in the widest vectors of `isa`.
Loop FloatFmaLoop(const IsaFlags& isa);
// uint8 x int8 products summed into int32: vpdpbusd in 512 or 256 bits, else vpmaddubsw + vpmaddwd + vpaddd; from AVX2 on.
std::optional<Loop> Int8DotLoop(const IsaFlags& isa);
// bf16 x bf16 products summed into float32: vdpbf16ps in 512 bits.
std::optional<Loop> Bf16DotLoop(const IsaFlags& isa);
// Tile products of int8 into int32 (tdpbssd), and of bf16 into float32 (tdpbf16ps): 2 x 2 tiles of sums. The process must have
// asked for tile data, as ThisDevice() does before it sets these flags.
std::optional<Loop> TileInt8Loop(const IsaFlags& isa);
std::optional<Loop> TileBf16Loop(const IsaFlags& isa);

}  // namespace moed::bench

#endif  // MOED_BENCH_LOOPS_H_
