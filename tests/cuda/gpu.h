// The GPU of the machine that runs the tests, without CUDA's headers: suites build everywhere, and skip where there is none.
#ifndef MOED_TESTS_CUDA_GPU_H_
#define MOED_TESTS_CUDA_GPU_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device_info.h"

namespace moed::testing {

// Whether this build has kernels and this machine a GPU that runs them. Use: `if (!HaveGpu()) return Skip("no GPU");`
bool HaveGpu();

// ThisDevice() with what is true of the GPU, where HaveGpu.
DeviceInfo ThisGpu();

// Bytes on the GPU, `offset` bytes after an aligned address. Complete when the constructor returns. Throws without a GPU.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::span<const uint8_t> bytes, size_t offset = 0);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  uint8_t* data() const { return memory_ + offset_; }
  std::vector<uint8_t> Read() const;

 private:
  uint8_t* memory_ = nullptr;
  size_t offset_, size_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_GPU_H_
