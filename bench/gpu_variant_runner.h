// Runs the variants of cells beside each other. One thread, one stream.
#ifndef MOED_BENCH_GPU_VARIANT_RUNNER_H_
#define MOED_BENCH_GPU_VARIANT_RUNNER_H_

#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu_cells.h"
#include "bench/gpu_routing.h"
#include "bench/gpu_runner.h"
#include "bench/report.h"

namespace moed::bench {

// The rows of all variants of `cells` (of layers that HasVariants), on the current device: each on the backend that the oracle
// chooses for it here, with as many copies of the layer as the base has. `options.filter` is compared with the base's name,
// `options.min_time` is of each variant on average; ceilings are not measured. The layers of all variants of a shape and scheme
// are held at once, and freed before the next's. Says on stderr what each cell took as soon as it is known. The error of a variant
// that cannot be run, with its name.
absl::StatusOr<std::vector<Row>> RunVariants(const GpuRunOptions& options, const std::vector<GpuCell>& cells,
                                             const Routings& routings);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_VARIANT_RUNNER_H_
