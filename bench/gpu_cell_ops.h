// The ops of a cell in the GPU's memory: hidden states, routings, output and workspace, and the graph that the ops are captured in.
// One thread, one stream.
#ifndef MOED_BENCH_GPU_CELL_OPS_H_
#define MOED_BENCH_GPU_CELL_OPS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu_backends.h"
#include "bench/gpu_cells.h"
#include "bench/gpu_replays.h"
#include "bench/gpu_routing.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {

// `status` of the thing `name`.
absl::Status In(const std::string& name, const absl::Status& status);

struct CellInput {
  const GpuCell& cell;
  const MoeDesc& desc;
  const Routings& routings;
  // Batched experts: each has as many rows as a routing gives it, and room for the most that one of the routings gives one.
  bool batched = false;
};

// `rotations` ops, each with a routing of its own. They share hidden states, output and workspace.
class GpuCellOps {
 public:
  using Layers = std::span<const std::unique_ptr<GpuLayer>>;

  // Op i runs on layer i mod their number. The layers and `stream`, which must be idle, must outlive the result.
  static absl::StatusOr<std::unique_ptr<GpuCellOps>> Make(const CellInput& input, Layers layers, cudaStream_t stream);

  // Of all ops.
  GpuReplays& replays() { return *replays_; }

  // After a replay. A time counts only if something was computed: every output is finite, and they are neither all zero nor huge.
  // Of batched experts the first rows of each expert are looked at.
  absl::Status CheckOutput() const;

 private:
  struct Rows {
    int64_t begin = 0, count = 0;
  };

  GpuCellOps(int64_t hidden, cudaStream_t stream) : hidden_(hidden), stream_(stream) {}
  absl::Status MakeInputs(const CellInput& input);
  absl::Status MakeRows(int64_t rows);
  absl::Status AddTurn(const Routing& routing, int64_t rows, int32_t top_k);
  absl::Status AddBatchedTurn(const std::vector<int32_t>& counts, int32_t max_m);
  absl::Status PlanOps(Layers layers);
  cuda::DeviceOp OpOf(int64_t rows, int32_t top_k) const;
  int64_t row_bytes() const { return hidden_ * static_cast<int64_t>(sizeof(uint16_t)); }

  const int64_t hidden_;
  const cudaStream_t stream_;
  cuda::DeviceBuffer x_, out_, workspace_;
  std::vector<cuda::DeviceBuffer> routings_;
  std::vector<cuda::DeviceOp> inputs_;
  std::vector<Rows> checked_;  // of the output, which the last op wrote
  std::vector<std::unique_ptr<GpuOp>> ops_;
  std::unique_ptr<GpuReplays> replays_;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_CELL_OPS_H_
