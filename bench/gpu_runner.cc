#include "bench/gpu_runner.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "bench/gpu_cell_ops.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {

using cuda::ToStatus;

absl::StatusOr<std::unique_ptr<GpuRunner>> GpuRunner::Make(const GpuRunOptions& options) {
  std::unique_ptr<GpuRunner> runner(new GpuRunner(options));
  absl::Status status = ToStatus(cudaStreamCreateWithFlags(&runner->stream_, cudaStreamNonBlocking), "stream");
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GpuCeilings>> ceilings = GpuCeilings::Make(options.gemm_library, runner->stream_);
  if (!ceilings.ok()) return ceilings.status();
  runner->ceilings_ = *std::move(ceilings);
  return runner;
}

GpuRunner::~GpuRunner() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  layers_.clear();
  ceilings_.reset();
  cudaStreamDestroy(stream_);
}

absl::StatusOr<std::vector<GpuRunner::Case>> GpuRunner::Cases(const std::vector<GpuCell>& cells) const {
  std::vector<Case> cases;
  for (const GpuCell& cell : cells) {
    const absl::StatusOr<MoeDesc> desc = GpuDescOf(cell.shape, cell.scheme);
    if (!desc.ok()) return desc.status();
    for (const GpuBackend& backend : GpuBackends()) {
      Case one{&cell, &backend, *desc};
      if (backend.fits(*desc) && one.name().find(options_.filter) != std::string::npos) cases.push_back(std::move(one));
    }
  }
  // Layers are large: the cases of each come together, in the order of the first.
  std::vector<std::string> order;
  for (const Case& one : cases) {
    if (std::find(order.begin(), order.end(), one.layers()) == order.end()) order.push_back(one.layers());
  }
  const auto place = [&](const Case& one) { return std::find(order.begin(), order.end(), one.layers()); };
  std::stable_sort(cases.begin(), cases.end(), [&](const Case& a, const Case& b) { return place(a) < place(b); });
  return cases;
}

absl::StatusOr<std::vector<Row>> GpuRunner::Run(const GpuCells& recorded, const std::vector<GpuCell>& cells,
                                                const Routings& routings) {
  const absl::StatusOr<std::vector<Case>> cases = Cases(cells);
  if (!cases.ok()) return cases.status();
  std::vector<double> times;
  for (const Case& one : *cases) {
    const absl::StatusOr<double> ms = RunCase(one, routings);
    if (!ms.ok()) return In(one.name(), ms.status());
    std::fprintf(stderr, "%s: %.4f ms\n", one.name().c_str(), *ms);
    times.push_back(*ms);
  }
  layers_.clear();
  layers_key_.clear();
  absl::Status status = ceilings_->Measure();
  if (!status.ok()) return In("ceilings", status);
  std::vector<Row> rows(times.size());
  for (size_t at = 0; at < rows.size(); ++at) {
    rows[at].backend = (*cases)[at].backend->name;
    rows[at].ms = times[at];
    Compare(recorded, *(*cases)[at].cell, ceilings_->Median(), &rows[at]);
  }
  return rows;
}

absl::Status GpuRunner::MakeLayers(const Case& one) {
  const size_t wanted = static_cast<size_t>(one.cell->weight_sets);
  if (one.layers() == layers_key_ && layers_.size() == wanted) return absl::OkStatus();
  layers_.clear();
  layers_key_.clear();
  absl::Status status = ceilings_->Measure();
  if (!status.ok()) return status;
  while (layers_.size() < wanted) {
    absl::StatusOr<std::unique_ptr<GpuLayer>> layer = one.backend->make({one.desc}, layers_.size(), stream_);
    if (!layer.ok()) return layer.status();
    layers_.push_back(*std::move(layer));
  }
  layers_key_ = one.layers();
  return ToStatus(cudaStreamSynchronize(stream_), "random weights");
}

absl::StatusOr<double> GpuRunner::RunCase(const Case& one, const Routings& routings) {
  absl::Status status = MakeLayers(one);
  if (!status.ok()) return status;
  const absl::StatusOr<std::unique_ptr<GpuCellOps>> ops = GpuCellOps::Make({*one.cell, one.desc, routings}, layers_, stream_);
  if (!ops.ok()) return ops.status();
  const absl::StatusOr<double> ms = (*ops)->replays().MedianMs(options_.min_time);
  if (!ms.ok()) return ms.status();
  status = (*ops)->CheckOutput();
  if (!status.ok()) return status;
  return *ms / one.cell->rotations;
}

}  // namespace moed::bench
