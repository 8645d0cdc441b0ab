#include "kernels/cuda/cuda_memory.h"

#include "absl/strings/str_cat.h"

namespace moed::cuda {

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // told here, so that no later launch of the thread takes it for its own; one that ended the device stays
  const std::string text = absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(text);
  return absl::UnavailableError(text);
}

absl::Status CopyToDevice(void* to, const void* from, size_t bytes, const char* what) {
  if (bytes == 0) return absl::OkStatus();
  cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  return ToStatus(error, what);
}

absl::Status DeviceBuffer::Allocate(size_t bytes, const char* what) {
  Free();
  if (bytes == 0) return absl::OkStatus();
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the device goes on
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", bytes, " bytes of GPU memory are needed, ", free_bytes, " of ", total, " are free"));
  }
  if (error != cudaSuccess) return ToStatus(error, what);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  return absl::OkStatus();
}

void DeviceBuffer::Free() {
  if (data_ != nullptr) cudaFree(data_);
  data_ = nullptr;
  size_ = 0;
}

absl::Status HostBuffer::Allocate(size_t bytes, const char* what) {
  Free();
  if (bytes == 0) return absl::OkStatus();
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, bytes, cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return absl::ResourceExhaustedError(absl::StrCat(what, ": the system gives no ", bytes, " bytes of pinned memory"));
  }
  if (error != cudaSuccess) return ToStatus(error, what);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  return absl::OkStatus();
}

void HostBuffer::Free() {
  if (data_ != nullptr) cudaFreeHost(data_);
  data_ = nullptr;
  size_ = 0;
}

}  // namespace moed::cuda
