// Ops captured into one graph, and the time of its replays. One thread.
#ifndef MOED_BENCH_GPU_REPLAYS_H_
#define MOED_BENCH_GPU_REPLAYS_H_

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu_backends.h"

namespace moed::bench {

class GpuReplays {
 public:
  // Captures `ops` one after the other on `stream`, which must be idle and outlive the result, as must what the ops use.
  static absl::StatusOr<std::unique_ptr<GpuReplays>> Make(const std::vector<std::unique_ptr<GpuOp>>& ops, cudaStream_t stream);
  ~GpuReplays();

  // Milliseconds of a replay, median of at least 10 and of those that `seconds` hold. Replays follow each other without a gap; the
  // first of each series, which waits for the host, is not counted.
  absl::StatusOr<double> MedianMs(double seconds);
  // The same of each of `all`, on one stream, a series of each in turn, so that what changes the clock changes it for all; as many
  // series of each, for `seconds` each on average.
  static absl::StatusOr<std::vector<double>> MedianMs(std::span<GpuReplays* const> all, double seconds);

 private:
  static constexpr int kSeries = 10;  // counted replays of a series

  explicit GpuReplays(cudaStream_t stream) : stream_(stream) {}
  absl::Status Capture(const std::vector<std::unique_ptr<GpuOp>>& ops);
  absl::Status RunSeries(std::vector<double>* times);

  const cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
  std::array<cudaEvent_t, kSeries + 1> events_ = {};  // after each replay
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_REPLAYS_H_
