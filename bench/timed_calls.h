// Timed calls of a prepared layer, with random inputs and routings. One thread.
#ifndef MOED_BENCH_TIMED_CALLS_H_
#define MOED_BENCH_TIMED_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/aligned_buffer.h"
#include "kernels/moe_kernel.h"
#include "tests/support/random_layer.h"

namespace moed::bench {

// A few distinct random experts, handed out in turn as those of the whole layer: their values do not matter for speed, their
// bytes are all packed.
class RepeatedExperts : public ExpertReader {
 public:
  explicit RepeatedExperts(const MoeDesc& desc);
  absl::Status Read(int expert, ExpertWeights* out) const override;

 private:
  testing::RandomExperts few_;
};

// Calls of one size on `layer`: bf16 in and out, each with the next of 16 random routings, so that where the experts of a
// layer are larger than the caches, weights are cold.
class TimedCalls {
 public:
  // All three must outlive it; `desc` is the layer's.
  TimedCalls(const PreparedMoe& layer, const MoeDesc& desc, int64_t tokens, WorkerPool& pool);
  TimedCalls(const TimedCalls&) = delete;
  TimedCalls& operator=(const TimedCalls&) = delete;

  // Seconds of one call; its error when it fails.
  absl::StatusOr<double> Next();
  // Distinct experts that a call reads, the mean over the routings.
  double TouchedExperts() const;

 private:
  const PreparedMoe& layer_;
  const int64_t tokens_, hidden_;
  std::vector<testing::RandomBatch> batches_;
  AlignedBuffer workspace_;
  std::vector<uint16_t> out_;
  ExecContext context_;
  size_t turn_ = 0;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_TIMED_CALLS_H_
