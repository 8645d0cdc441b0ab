// CUDA's errors as Status, and its memory as objects. Host code; needs the CUDA runtime.
#ifndef MOED_KERNELS_CUDA_CUDA_MEMORY_H_
#define MOED_KERNELS_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "absl/status/status.h"

namespace moed::cuda {

// OK, RESOURCE_EXHAUSTED for out of memory, else UNAVAILABLE with CUDA's name and text of the error: after those that are not about
// one argument the device takes no more work. `what` was tried ("copy of the hidden states").
absl::Status ToStatus(cudaError_t error, const char* what);

// Copies host memory of any kind to the device; complete when it returns, for every stream. A plain cudaMemcpy from pageable memory
// returns when the bytes are staged, and the streams of lanes do not wait for it.
absl::Status CopyToDevice(void* to, const void* from, size_t bytes, const char* what);

// Memory of the current device, freed with the object.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer() { Free(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  // Replaces the memory by `bytes` uninitialised bytes. RESOURCE_EXHAUSTED names the bytes that are needed and free; the buffer is
  // then empty.
  absl::Status Allocate(size_t bytes, const char* what);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Free();
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Memory of the host that the device copies from and to without the processor.
class HostBuffer {
 public:
  HostBuffer() = default;
  ~HostBuffer() { Free(); }
  HostBuffer(HostBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  absl::Status Allocate(size_t bytes, const char* what);
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  void Free();
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_CUDA_MEMORY_H_
