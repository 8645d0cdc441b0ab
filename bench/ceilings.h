// What the machine can do, measured in the same run as the kernels: the denominators of every fraction.
#ifndef MOED_BENCH_CEILINGS_H_
#define MOED_BENCH_CEILINGS_H_

#include "kernels/device_info.h"
#include "kernels/worker_pool.h"

namespace moed::bench {

// Reads a buffer far larger than the caches once, each worker its own contiguous share; bytes per second.
class ReadStream {
 public:
  explicit ReadStream(size_t bytes);
  double Measure(WorkerPool& pool, const IsaFlags& isa) const;

 private:
  std::vector<float> data_;
};

// Independent float32 fused multiply-adds in registers on every worker, in the widest vectors the processor has;
// floating-point operations per second (two per multiply-add).
double MeasureFma(WorkerPool& pool, const IsaFlags& isa);

}  // namespace moed::bench

#endif  // MOED_BENCH_CEILINGS_H_
