// Runs cells of the GPU benchmark and makes their rows. One thread, one stream.
#ifndef MOED_BENCH_GPU_RUNNER_H_
#define MOED_BENCH_GPU_RUNNER_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu_backends.h"
#include "bench/gpu_ceilings.h"
#include "bench/gpu_cells.h"
#include "bench/gpu_routing.h"
#include "bench/report.h"

namespace moed::bench {

struct GpuRunOptions {
  std::string filter;        // only cells whose SHAPE/SCHEME/BACKEND/TOKENS contains this
  double min_time = 0.0;     // seconds of replays a cell, at least
  std::string gemm_library;  // as GemmLibrary::Open
};

class GpuRunner {
 public:
  // On the current device.
  static absl::StatusOr<std::unique_ptr<GpuRunner>> Make(const GpuRunOptions& options);
  ~GpuRunner();

  // The rows of `cells` on all backends, those that the filter leaves; `recorded` has the ceilings that their times belong to. A
  // layer's copies are made anew for each shape, scheme and backend and freed before the next; before each of these and at the end
  // the ceilings are measured, and the medians of the run count. Says on stderr what each cell took as soon as it is known. The
  // error of a cell that cannot be run, with its name.
  absl::StatusOr<std::vector<Row>> Run(const GpuCells& recorded, const std::vector<GpuCell>& cells, const Routings& routings);

  // After Run.
  MeasuredGpu measured() const { return ceilings_->Median(); }
  const std::string& no_gemm() const { return ceilings_->no_gemm(); }

 private:
  struct Case {
    const GpuCell* cell;
    const GpuBackend* backend;
    MoeDesc desc;
    // Of all cases that run on the same layers.
    std::string layers() const { return cell->shape + "/" + cell->scheme + "/" + backend->name; }
    std::string name() const { return layers() + "/" + std::to_string(cell->tokens); }
  };

  explicit GpuRunner(const GpuRunOptions& options) : options_(options) {}
  absl::StatusOr<std::vector<Case>> Cases(const std::vector<GpuCell>& cells) const;
  absl::Status MakeLayers(const Case& one);
  absl::StatusOr<double> RunCase(const Case& one, const Routings& routings);

  const GpuRunOptions options_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<GpuCeilings> ceilings_;
  std::vector<std::unique_ptr<GpuLayer>> layers_;  // of layers_key_
  std::string layers_key_;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_RUNNER_H_
