// What the machine can do, measured in the same run as the kernels: the denominators of every fraction.
//
// Used from one thread, the one that calls the pool. A ceiling that the processor has no instructions for is absent.
#ifndef MOED_BENCH_CEILINGS_H_
#define MOED_BENCH_CEILINGS_H_

#include <array>
#include <optional>
#include <vector>

#include "bench/loops.h"
#include "kernels/device_info.h"
#include "kernels/worker_pool.h"

namespace moed::bench {

enum class Ceiling {
  kReadStream,  // bytes: each worker reads its contiguous share of a buffer far larger than the caches, once
  // Operations in registers on every worker at once, two per multiply-add (loops.h):
  kFloatFma,
  kInt8Dot,
  kBf16Dot,
  kTileInt8,
  kTileBf16,
};
constexpr int kCeilingCount = 6;

const char* CeilingName(Ceiling ceiling);  // "read stream", "float FMA", "int8 dot", ...
const char* CeilingUnit(Ceiling ceiling);  // of 1e9 a second: "GB/s", "GFLOPS", "Gop/s"

// The middle of `values`, the upper one of two; 0 when there are none.
double Median(std::vector<double> values);

class Ceilings {
 public:
  // `pool` must outlive it. The instructions of `isa` must be there, tiles asked for (ThisDevice() does). `stream_bytes` are
  // read by the read stream.
  Ceilings(WorkerPool& pool, const IsaFlags& isa, size_t stream_bytes = size_t{512} << 20);

  // Measures each ceiling of the processor once, about 10 ms each and the read stream.
  void Measure();
  // The median of what was measured, in bytes or operations a second; nothing where the processor lacks the instructions
  // or Measure was not called.
  std::optional<double> Of(Ceiling ceiling) const;

 private:
  double MeasureRead() const;
  double MeasureLoop(const Loop& loop) const;

  WorkerPool& pool_;
  const IsaFlags isa_;
  const std::vector<float> stream_;
  std::array<std::optional<Loop>, kCeilingCount> loops_;
  std::array<std::vector<double>, kCeilingCount> measured_;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_CEILINGS_H_
