// The accelerator on CUDA: device 0 of the process (CUDA_VISIBLE_DEVICES picks it), its failure, its lanes and whole layers.
#ifndef MOED_KERNELS_CUDA_CUDA_DEVICE_H_
#define MOED_KERNELS_CUDA_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/accelerator.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::cuda {

class CudaDevice : public Accelerator {
 public:
  // NOT_FOUND where the machine has no usable GPU or driver, with CUDA's reason.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open();
  ~CudaDevice() override;

  std::string Name() const override { return name_; }
  void Describe(DeviceInfo* device) const override;
  absl::Status Health() override;
  absl::StatusOr<std::unique_ptr<Lane>> NewLane() override;
  absl::StatusOr<std::unique_ptr<DeviceLayer>> Assemble(const DeviceLayerParts& parts) override;
  absl::StatusOr<std::unique_ptr<PinnedBuffer>> AllocatePinned(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<PinnedBuffer>> Pin(std::span<std::byte> memory) override;
  absl::StatusOr<std::unique_ptr<SharedMemory>> OpenShared(const SharedHandle& handle) override;

  // The first failure, or OK: cheap, asks nobody.
  absl::Status failure() const;
  // Keeps the first UNAVAILABLE of a call; returns what the caller should return: `status`, or the failure that came first.
  absl::Status Report(const absl::Status& status);

 private:
  explicit CudaDevice(const cudaDeviceProp& properties);

  const std::string name_;
  const int major_, minor_, multiprocessors_;
  cudaStream_t health_stream_ = nullptr;
  DeviceBuffer health_word_;
  mutable std::mutex mutex_;
  absl::Status failure_;  // guarded by mutex_
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_DEVICE_H_
