// What the GPU can do, measured in the same run as the layers: what a recorded time of another program is scaled by.
//
// Used from one thread. All work is on the stream that Make gets, which must be idle when Measure is called.
#ifndef MOED_BENCH_GPU_CEILINGS_H_
#define MOED_BENCH_GPU_CEILINGS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu_cells.h"
#include "bench/gpu_library.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {

class GpuCeilings {
 public:
  // Takes 4.4 GB of GPU memory, for as long as it lives, and fills it with random numbers. `gemm_library`: as GemmLibrary::Open.
  static absl::StatusOr<std::unique_ptr<GpuCeilings>> Make(const std::string& gemm_library, cudaStream_t stream);
  ~GpuCeilings();

  // Measures each once: a read of 4 GB and a copy of 2 GB, the best of several grids, and a bf16 GEMM of 8192 x 8192 x 8192. About
  // a tenth of a second.
  absl::Status Measure();
  // Medians of what was measured. Measure must have been called.
  MeasuredGpu Median() const;
  // Why there is no GEMM; empty where there is one.
  const std::string& no_gemm() const { return no_gemm_; }

 private:
  explicit GpuCeilings(cudaStream_t stream) : stream_(stream) {}
  absl::Status Allocate();
  // Milliseconds of one of `repeats` launches, which follow one that is not counted.
  template <typename Launch>
  absl::StatusOr<double> Time(int repeats, const Launch& launch) const;
  template <typename Launch>
  absl::StatusOr<double> BestGrid(const Launch& launch) const;

  const cudaStream_t stream_;
  int multiprocessors_ = 0;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  cuda::DeviceBuffer stream_bytes_, factors_, sink_;
  std::unique_ptr<GemmLibrary> gemm_;  // null: none
  std::string no_gemm_;
  std::vector<double> read_, copy_, gemm_rates_;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_CEILINGS_H_
