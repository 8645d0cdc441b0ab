// Latencies in bounded memory: a histogram whose buckets widen with the value, for quantiles of any number of samples.
// Not thread-safe: one per thread, merged at the end.
#ifndef MOED_CLIENT_HISTOGRAM_H_
#define MOED_CLIENT_HISTOGRAM_H_

#include <cstdint>
#include <vector>

namespace moed::client {

class LatencyHistogram {
 public:
  LatencyHistogram();

  // A sample in nanoseconds; negative ones count as 0.
  void Add(int64_t nanoseconds);
  void Merge(const LatencyHistogram& other);

  int64_t count() const { return count_; }
  // The value in microseconds below which the share `q` (0 to 1) of the samples lies, at most 0.8 % above the true one and
  // never above the largest sample; 0 without samples.
  double QuantileMicros(double q) const;

 private:
  std::vector<int64_t> buckets_;
  int64_t count_ = 0;
  int64_t max_ = 0;
};

}  // namespace moed::client

#endif  // MOED_CLIENT_HISTOGRAM_H_
