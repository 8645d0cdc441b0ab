#include "kernels/cuda/cuda_lane.h"

namespace moed::cuda {

absl::StatusOr<std::unique_ptr<CudaLane>> CudaLane::Make() {
  std::unique_ptr<CudaLane> lane(new CudaLane);
  absl::Status status = ToStatus(cudaStreamCreateWithFlags(&lane->stream_, cudaStreamNonBlocking), "stream");
  if (status.ok()) status = lane->block_.Allocate(kBlockBytes + kArrayBytes, "arguments of a lane");
  if (!status.ok()) return status;
  return lane;
}

CudaLane::~CudaLane() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (const Graph& graph : graphs_) cudaGraphExecDestroy(graph.graph);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::StatusOr<std::byte*> CudaLane::Workspace(size_t bytes) {
  if (workspace_.size() < bytes) {
    absl::Status status = Finish();
    if (status.ok()) status = workspace_.Allocate(bytes, "workspace of a lane");
    if (!status.ok()) return status;
  }
  return workspace_.data();
}

absl::StatusOr<std::byte*> CudaLane::StagingIn(size_t bytes) {
  if (in_.size() < bytes) {
    absl::Status status = Finish();
    if (status.ok()) status = in_.Allocate(bytes, "staging buffer of a lane");
    if (!status.ok()) return status;
  }
  return in_.data();
}

absl::StatusOr<std::byte*> CudaLane::StagingOut(size_t bytes) {
  if (out_.size() < bytes) {
    absl::Status status = Finish();
    if (status.ok()) status = out_.Allocate(bytes, "staging buffer of a lane");
    if (!status.ok()) return status;
  }
  return out_.data();
}

cudaGraphExec_t CudaLane::Find(const LaunchPlan& plan) const {
  for (const Graph& graph : graphs_) {
    if (graph.plan == plan) return graph.graph;
  }
  return nullptr;
}

absl::Status CudaLane::Launch(const LaunchPlan& plan) {
  const cudaGraphExec_t graph = Find(plan);
  if (graph != nullptr) return ToStatus(cudaGraphLaunch(graph, stream_), "launch of a captured call");
  return ToStatus(Enqueue(plan, device_block(), stream_), "launch of a call");
}

absl::Status CudaLane::Capture(const LaunchPlan& plan) {
  if (Captured(plan)) return absl::OkStatus();
  absl::Status status = ToStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
  if (!status.ok()) return status;
  const cudaError_t enqueued = Enqueue(plan, device_block(), stream_);
  cudaGraph_t graph = nullptr;
  status = ToStatus(cudaStreamEndCapture(stream_, &graph), "capture");
  if (status.ok()) status = ToStatus(enqueued, "capture of a call");
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(&executable, graph, 0), "instantiation of a captured call");
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  graphs_.push_back({plan, executable});
  return ToStatus(cudaGraphUpload(executable, stream_), "upload of a captured call");
}

absl::Status CudaLane::Finish() { return ToStatus(cudaStreamSynchronize(stream_), "a call on the GPU"); }

}  // namespace moed::cuda
