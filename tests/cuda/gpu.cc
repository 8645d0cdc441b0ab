#include "tests/cuda/gpu.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace moed::testing {
namespace {

void Require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

}  // namespace

bool HaveGpu() {
  int count = 0, major = 0, minor = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
  cudaGetLastError();  // a missing driver is no error of the test
  return found && major == 9 && minor == 0;
}

DeviceInfo ThisGpu() {
  DeviceInfo device = ThisDevice();
  device.has_gpu = true;
  Require(cudaDeviceGetAttribute(&device.cuda_major, cudaDevAttrComputeCapabilityMajor, 0));
  Require(cudaDeviceGetAttribute(&device.cuda_minor, cudaDevAttrComputeCapabilityMinor, 0));
  Require(cudaDeviceGetAttribute(&device.gpu_multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  size_t free_bytes = 0, total = 0;
  Require(cudaMemGetInfo(&free_bytes, &total));
  device.gpu_free_bytes = free_bytes;
  return device;
}

DeviceBytes::DeviceBytes(std::span<const uint8_t> bytes, size_t offset) : offset_(offset), size_(bytes.size()) {
  void* memory = nullptr;
  Require(cudaMalloc(&memory, offset + bytes.size() + 1));
  memory_ = static_cast<uint8_t*>(memory);
  Require(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  Require(cudaDeviceSynchronize());
}

DeviceBytes::~DeviceBytes() { cudaFree(memory_); }

std::vector<uint8_t> DeviceBytes::Read() const {
  std::vector<uint8_t> bytes(size_);
  Require(cudaMemcpy(bytes.data(), data(), size_, cudaMemcpyDeviceToHost));
  return bytes;
}

}  // namespace moed::testing
