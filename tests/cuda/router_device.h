// Device memory for tests of launchers: poisoned before use, with a margin behind it that must stay poisoned.
#ifndef MOED_TESTS_CUDA_ROUTER_DEVICE_H_
#define MOED_TESTS_CUDA_ROUTER_DEVICE_H_

#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "tests/cuda/gpu.h"

namespace moed::testing {

// `count` elements that start `offset` bytes behind an address aligned to 256. All bytes are 0xFF until something is written.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count, size_t offset = 0) : count_(count), offset_(offset) {
    REQUIRE(cudaMalloc(&base_, offset + count * sizeof(T) + kMargin) == cudaSuccess);
    REQUIRE(cudaMemset(base_, 0xFF, offset + count * sizeof(T) + kMargin) == cudaSuccess);
  }
  DeviceArray(std::span<const T> values, size_t offset = 0) : DeviceArray(values.size(), offset) {
    if (!values.empty()) REQUIRE(cudaMemcpy(data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(base_); }

  T* data() const { return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + offset_); }

  // The first `used` elements; what lies behind them must be untouched.
  std::vector<T> Read(size_t used) const {
    std::vector<std::byte> bytes(count_ * sizeof(T) + kMargin);
    REQUIRE(cudaMemcpy(bytes.data(), data(), bytes.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    for (size_t i = used * sizeof(T); i < bytes.size(); ++i) {
      if (bytes[i] != std::byte{0xFF}) FAIL("byte " << i << " was written, behind the " << used << " elements in use");
    }
    std::vector<T> values(used);
    if (used > 0) std::memcpy(static_cast<void*>(values.data()), bytes.data(), used * sizeof(T));
    return values;
  }

 private:
  static constexpr size_t kMargin = 64;
  void* base_ = nullptr;
  const size_t count_;
  const size_t offset_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_ROUTER_DEVICE_H_
