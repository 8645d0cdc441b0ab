// Reading all experts of a layer in parallel, one canonical buffer per worker.
#ifndef MOED_KERNELS_PREPARE_EXPERTS_H_
#define MOED_KERNELS_PREPARE_EXPERTS_H_

#include <mutex>
#include <new>
#include <vector>

#include "absl/status/status.h"
#include "kernels/expert_weights.h"
#include "kernels/moe_kernel.h"
#include "kernels/worker_pool.h"

namespace moed {

// INTERNAL unless `weights` are what `desc` promises (shapes, schemes, biases): packers and decoders index by the promise.
absl::Status CheckExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights);

// Bytes of one expert in canonical form, scales, zero points, group indices and biases included.
size_t CanonicalExpertBytes(const MoeDesc& desc);

// Calls take(expert, weights) -> absl::Status once for each expert in [0, experts), from the pool's threads, after reading
// it; `weights` may be moved from. Stops handing out work after the first error and returns that error.
template <typename Take>
absl::Status ForEachExpert(int experts, const ExpertReader& reader, WorkerPool& pool, const Take& take) {
  std::vector<ExpertWeights> buffers(pool.threads());
  std::mutex mutex;
  absl::Status first_error;
  pool.ParallelFor(experts, [&](int64_t expert, int worker) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (!first_error.ok()) return;
    }
    absl::Status status;
    try {
      status = reader.Read(static_cast<int>(expert), &buffers[worker]);
      if (status.ok()) status = take(static_cast<int>(expert), buffers[worker]);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("no memory for an expert while loading");
    }
    if (status.ok()) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (first_error.ok()) first_error = status;
  });
  return first_error;
}

}  // namespace moed

#endif  // MOED_KERNELS_PREPARE_EXPERTS_H_
