// A build without the CUDA toolkit has no GPU to test on.
#include <stdexcept>

#include "tests/cuda/gpu.h"

namespace moed::testing {

bool HaveGpu() { return false; }

DeviceInfo ThisGpu() { return ThisDevice(); }

DeviceBytes::DeviceBytes(std::span<const uint8_t> bytes, size_t offset) : offset_(offset), size_(bytes.size()) {
  throw std::runtime_error("built without CUDA");
}

DeviceBytes::~DeviceBytes() = default;

std::vector<uint8_t> DeviceBytes::Read() const { return {}; }

}  // namespace moed::testing
