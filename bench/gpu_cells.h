// What the GPU benchmark runs: layers of published models by the names of a file of peers, and how a measured time is compared with
// what that file recorded. Plain values and pure functions; no CUDA.
#ifndef MOED_BENCH_GPU_CELLS_H_
#define MOED_BENCH_GPU_CELLS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/cases.h"
#include "bench/report.h"
#include "kernels/moe_kernel.h"

namespace moed::bench {

// The whole layers: "dsv3", "gptoss", "mixtral", "qwen3".
std::span<const Shape> GpuShapes();
// "bf16", "fp8_block", "int4_w4a16_g128", "int8_w8a16", "int8_w8a8", "mxfp4_w4a16".
std::span<const char* const> GpuSchemes();

// One of GpuShapes with one of GpuSchemes; INVALID_ARGUMENT with the known names for others. int8_w8a16 has groups of 128 inputs
// where they divide both products' inputs, else one scale a channel.
absl::StatusOr<MoeDesc> GpuDescOf(const std::string& shape, const std::string& scheme);

// Bytes of codes and scales of one expert, padding excluded.
double ExpertBytes(const MoeDesc& desc);

// One number of tokens through one layer.
struct GpuCell {
  std::string shape, scheme;
  int64_t tokens = 0;
  double flops = 0.0;  // two per multiply-add
  std::string peer;    // the fastest other program; empty: none known
  double peer_ms = 0.0;
  double limit_ms = 0.0;  // what recorded bandwidth and arithmetic allow
  std::optional<double> goal_ms;
  // Ops that follow each other before weights are used again, and the copies of the layer that they go through in turn.
  int rotations = 1, weight_sets = 1;
  bool operator==(const GpuCell&) const = default;
};

struct GpuCells {
  // Ceilings of the machine and the day that the cells' times are from.
  double read_gbs = 0.0;     // GB/s
  double bf16_tflops = 0.0;  // of a library's GEMM of 8192 x 8192 x 8192
  double fp8_tflops = 0.0;   // of the pipe for 8-bit factors
  std::vector<GpuCell> cells;
};

// A file of peers: an object with read_ceiling_GBs, bf16_TFLOPS, fp8_TFLOPS and the list cells; of a cell shape, scheme, tokens,
// flops, best_peer, best_peer_ms, limit_ms, goal_ms, rotations and weight_sets are read, other members are ignored.
// INVALID_ARGUMENT names the cell's place in the list, the key, what was wanted and got.
absl::StatusOr<GpuCells> ParseGpuCells(const std::string& text);
// ParseGpuCells of a file's text; errors name the file, NOT_FOUND when it cannot be read.
absl::StatusOr<GpuCells> ReadGpuCells(const std::string& path);

// Every layer with 1 to 8192 tokens, without peers and goals; limits are the bytes of the experts that uniform routing touches, at
// an H200's recorded read stream, or the operations at 93 % of its recorded rate.
GpuCells UsualGpuCells();

// The cells of `shapes` (empty: all) with one of `tokens` (empty: all), in the order of `cells`. INVALID_ARGUMENT for a shape that
// there is not.
absl::StatusOr<std::vector<GpuCell>> ChooseGpuCells(const GpuCells& cells, const std::vector<std::string>& shapes,
                                                    const std::vector<int64_t>& tokens);

// Ceilings of the run.
struct MeasuredGpu {
  double read_gbs = 0.0;
  double copy_gbs = 0.0;              // bytes read and bytes written
  std::optional<double> gemm_tflops;  // nothing where no library was found
};

// Whether arithmetic, not bandwidth, makes the cell's limit.
bool BoundByArithmetic(const GpuCells& recorded, const GpuCell& cell);

// Sets all of `row` that the cell tells, and ceiling, fraction, peer's time and goal: recorded times are multiplied by recorded
// ceiling by measured ceiling, of the read stream or of the GEMM as the limit is. `row.ms` must be set. Without a measured GEMM
// times that arithmetic bounds stay as recorded, and so is the ceiling, whose name says so.
void Compare(const GpuCells& recorded, const GpuCell& cell, const MeasuredGpu& measured, Row* row);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_CELLS_H_
