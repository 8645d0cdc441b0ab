// GPU benchmark: whole layers from hidden states on the device to outputs on the device, beside other programs' recorded times in
// the same cells and as fractions of what the memory and the tensor cores allow.
//
//   gpu_bench [OPTIONS] [FILTER]
//
// FILTER is a substring of "SHAPE/SCHEME/BACKEND/TOKENS". docs/performance.md has the method. Exit code: 0 ok, 1 no GPU or it
// failed, 2 usage.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/status/statusor.h"
#include "bench/gpu_cells.h"
#include "bench/gpu_routing.h"
#include "bench/gpu_runner.h"
#include "bench/gpu_variant_runner.h"
#include "bench/gpu_variants.h"
#include "bench/report.h"
#include "kernels/cuda/cuda_device.h"

namespace moed::bench {
namespace {

struct Options {
  GpuRunOptions run;
  std::vector<std::string> shapes;
  std::vector<int64_t> tokens;
  std::string json, peers, routing;
  bool variants = false;
};

int Fail(int code, const absl::Status& status) {
  std::fprintf(stderr, "gpu_bench: %s\n", std::string(status.message()).c_str());
  return code;
}

void PrintCeilings(const std::string& device, const GpuCells& recorded, const GpuRunner& runner) {
  const MeasuredGpu measured = runner.measured();
  std::printf("%s: read stream %.0f GB/s (recorded %.0f), copy %.0f GB/s, ", device.c_str(), measured.read_gbs, recorded.read_gbs,
              measured.copy_gbs);
  if (measured.gemm_tflops) {
    std::printf("bf16 GEMM %.0f TFLOPS (recorded %.0f)\n", *measured.gemm_tflops, recorded.bf16_tflops);
  } else {
    std::printf("no bf16 GEMM (%s): times that arithmetic bounds are not scaled\n", runner.no_gemm().c_str());
  }
}

absl::Status NoCell(const std::string& filter) {
  return absl::InvalidArgumentError("no cell contains \"" + filter + "\"");
}

int RunOnDevice(const Options& options, const GpuCells& recorded, const std::vector<GpuCell>& cells, const Routings& routings) {
  const absl::StatusOr<std::unique_ptr<cuda::CudaDevice>> device = cuda::CudaDevice::Open();
  if (!device.ok()) return Fail(1, device.status());
  const absl::StatusOr<std::unique_ptr<GpuRunner>> runner = GpuRunner::Make(options.run);
  if (!runner.ok()) return Fail(1, runner.status());
  const absl::StatusOr<std::vector<Row>> rows = (*runner)->Run(recorded, cells, routings);
  if (!rows.ok()) return Fail(1, rows.status());
  if (rows->empty()) return Fail(2, NoCell(options.run.filter));
  PrintCeilings((*device)->Name(), recorded, **runner);
  PrintTable(*rows);
  return options.json.empty() || WriteJson(*rows, options.json) ? 0 : 1;
}

int RunVariantsOnDevice(const Options& options, const std::vector<GpuCell>& cells, const Routings& routings) {
  const absl::StatusOr<std::unique_ptr<cuda::CudaDevice>> device = cuda::CudaDevice::Open();
  if (!device.ok()) return Fail(1, device.status());
  const absl::StatusOr<std::vector<Row>> rows = RunVariants(options.run, cells, routings);
  if (!rows.ok()) return Fail(1, rows.status());
  if (rows->empty()) return Fail(2, NoCell(options.run.filter));
  std::printf("%s\n", (*device)->Name().c_str());
  PrintVariants(*rows);
  return options.json.empty() || WriteJson(*rows, options.json) ? 0 : 1;
}

int RunWith(const Options& options) {
  const absl::StatusOr<GpuCells> recorded = options.peers.empty() ? UsualGpuCells() : ReadGpuCells(options.peers);
  if (!recorded.ok()) return Fail(2, recorded.status());
  const absl::StatusOr<Routings> routings = options.routing.empty() ? Routings() : Routings::Open(options.routing);
  if (!routings.ok()) return Fail(2, routings.status());
  const absl::StatusOr<std::vector<GpuCell>> cells =
      (options.variants ? VariantCells : ChooseGpuCells)(*recorded, options.shapes, options.tokens);
  if (!cells.ok()) return Fail(2, cells.status());
  if (options.variants) return RunVariantsOnDevice(options, *cells, *routings);
  return RunOnDevice(options, *recorded, *cells, *routings);
}

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) {
  moed::bench::Options options;
  options.run.min_time = 0.25;
  CLI::App app("Whole MoE layers on the GPU, beside other programs and as fractions of what the GPU allows");
  app.add_option("--json", options.json, "also write the rows to this file");
  app.add_option("--peers", options.peers, "cells with other programs' recorded times; default: a grid without them");
  app.add_option("--routing", options.routing, "safetensors file of the cells' routings; default: random ones");
  app.add_option("--shapes", options.shapes, "names with commas between; default: all")->delimiter(',')->allow_extra_args(false);
  app.add_option("--tokens", options.tokens, "sizes of a call, with commas between; default: all cells'")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(int64_t{1}, moed::bench::kMaxTokens));
  app.add_flag("--variants", options.variants,
               "instead: variants of the int4 and int8 layers in groups of 128, and their times by the base's");
  app.add_option("--min-time", options.run.min_time, "seconds of replays a cell, of each variant; at least 10 replays")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--gemm-library", options.run.gemm_library,
                 "cuBLAS, for the bf16 GEMM's rate; default: where the linker finds it");
  app.add_option("FILTER", options.run.filter, "only cells whose SHAPE/SCHEME/BACKEND/TOKENS contains this");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return moed::bench::RunWith(options);
}
