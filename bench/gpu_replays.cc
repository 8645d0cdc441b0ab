#include "bench/gpu_replays.h"

#include <numeric>

#include "bench/ceilings.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {

using cuda::ToStatus;

absl::StatusOr<std::unique_ptr<GpuReplays>> GpuReplays::Make(const std::vector<std::unique_ptr<GpuOp>>& ops, cudaStream_t stream) {
  std::unique_ptr<GpuReplays> replays(new GpuReplays(stream));
  absl::Status status = replays->Capture(ops);
  for (cudaEvent_t& event : replays->events_) {
    if (status.ok()) status = ToStatus(cudaEventCreate(&event), "event");
  }
  if (!status.ok()) return status;
  return replays;
}

GpuReplays::~GpuReplays() {
  cudaStreamSynchronize(stream_);
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  for (const cudaEvent_t event : events_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status GpuReplays::Capture(const std::vector<std::unique_ptr<GpuOp>>& ops) {
  absl::Status begun = ToStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
  if (!begun.ok()) return begun;
  absl::Status status;
  for (const std::unique_ptr<GpuOp>& op : ops) {
    if (status.ok()) status = op->Enqueue(stream_);
  }
  cudaGraph_t graph = nullptr;
  const absl::Status ended = ToStatus(cudaStreamEndCapture(stream_, &graph), "capture");
  if (status.ok()) status = ended;
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(&graph_, graph, 0), "instantiation of a captured cell");
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (status.ok()) status = ToStatus(cudaGraphUpload(graph_, stream_), "upload of a captured cell");
  return status;
}

absl::Status GpuReplays::RunSeries(std::vector<double>* times) {
  absl::Status status;
  for (const cudaEvent_t event : events_) {
    if (status.ok()) status = ToStatus(cudaGraphLaunch(graph_, stream_), "replay");
    if (status.ok()) status = ToStatus(cudaEventRecord(event, stream_), "replay");
  }
  if (status.ok()) status = ToStatus(cudaStreamSynchronize(stream_), "replay");
  for (size_t at = 1; at < events_.size() && status.ok(); ++at) {
    float ms = 0.0f;
    status = ToStatus(cudaEventElapsedTime(&ms, events_[at - 1], events_[at]), "replay");
    times->push_back(ms);
  }
  return status;
}

absl::StatusOr<double> GpuReplays::MedianMs(double seconds) {
  GpuReplays* const one[] = {this};
  const absl::StatusOr<std::vector<double>> medians = MedianMs(one, seconds);
  if (!medians.ok()) return medians.status();
  return medians->front();
}

absl::StatusOr<std::vector<double>> GpuReplays::MedianMs(std::span<GpuReplays* const> all, double seconds) {
  std::vector<std::vector<double>> times(all.size());
  const auto run_each = [&] {
    absl::Status status;
    for (size_t at = 0; at < all.size() && status.ok(); ++at) status = all[at]->RunSeries(&times[at]);
    return status;
  };
  absl::Status status = run_each();
  for (std::vector<double>& warm : times) warm.clear();  // the first series warms up
  const double wanted_ms = seconds * 1e3 * static_cast<double>(all.size());
  for (double counted_ms = 0.0; status.ok() && (counted_ms == 0.0 || counted_ms < wanted_ms);) {
    status = run_each();
    counted_ms = 0.0;
    for (const std::vector<double>& counted : times) counted_ms = std::accumulate(counted.begin(), counted.end(), counted_ms);
  }
  if (!status.ok()) return status;
  std::vector<double> medians;
  for (const std::vector<double>& counted : times) medians.push_back(Median(counted));
  return medians;
}

}  // namespace moed::bench
