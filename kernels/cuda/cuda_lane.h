// A lane on CUDA: a stream, its workspace, pinned staging buffers, and the graphs captured for it. One call at a time.
#ifndef MOED_KERNELS_CUDA_CUDA_LANE_H_
#define MOED_KERNELS_CUDA_CUDA_LANE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/accelerator.h"
#include "kernels/cuda/call_block.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/launch_plan.h"

namespace moed::cuda {

class CudaLane : public Lane {
 public:
  static absl::StatusOr<std::unique_ptr<CudaLane>> Make();
  ~CudaLane() override;

  cudaStream_t stream() const { return stream_; }

  // Device memory of at least `bytes`, whose contents and address change when it grows. Growing waits for the stream.
  absl::StatusOr<std::byte*> Workspace(size_t bytes);
  // Pinned memory for what goes to the device, and for what comes back.
  absl::StatusOr<std::byte*> StagingIn(size_t bytes);
  absl::StatusOr<std::byte*> StagingOut(size_t bytes);

  // What the kernels of the lane's calls read; its address never changes, so that captured launches may hold it.
  CallBlock* device_block() const { return reinterpret_cast<CallBlock*>(block_.data()); }
  // Device memory for the small arrays of a call, kArrayBytes from kBlockBytes behind the start of the block: block and arrays take
  // one copy.
  std::byte* device_arrays() const { return block_.data() + kBlockBytes; }
  static constexpr size_t kBlockBytes = (sizeof(CallBlock) + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
  static constexpr size_t kArrayBytes = size_t{64} << 10;  // ids and weights of 512 rows with 16 slots

  // Launches `plan` on the stream: by its graph where one was captured, else kernel by kernel.
  absl::Status Launch(const LaunchPlan& plan);
  // Captures `plan`, unless it is captured already. The stream must be idle.
  absl::Status Capture(const LaunchPlan& plan);
  bool Captured(const LaunchPlan& plan) const { return Find(plan) != nullptr; }

  // Waits for the stream.
  absl::Status Finish();

 private:
  CudaLane() = default;
  cudaGraphExec_t Find(const LaunchPlan& plan) const;

  struct Graph {
    LaunchPlan plan;
    cudaGraphExec_t graph;
  };
  cudaStream_t stream_ = nullptr;
  DeviceBuffer block_, workspace_;
  HostBuffer in_, out_;
  std::vector<Graph> graphs_;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_LANE_H_
