#include "kernels/cuda/cuda_device.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/cuda_layer.h"

namespace moed::cuda {
namespace {

// Memory of others that was made known to the driver.
class CudaRegisteredMemory : public PinnedBuffer {
 public:
  explicit CudaRegisteredMemory(std::span<std::byte> memory) : memory_(memory) {}
  ~CudaRegisteredMemory() override { cudaHostUnregister(memory_.data()); }
  std::span<std::byte> bytes() override { return memory_; }

 private:
  const std::span<std::byte> memory_;
};

class CudaPinnedBuffer : public PinnedBuffer {
 public:
  explicit CudaPinnedBuffer(HostBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  HostBuffer buffer_;
};

class CudaSharedMemory : public SharedMemory {
 public:
  CudaSharedMemory(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~CudaSharedMemory() override {
    if (cudaIpcCloseMemHandle(data_) != cudaSuccess) cudaGetLastError();  // nobody to tell; else the thread's next launch would
  }
  void* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const size_t bytes_;
};

// Bytes from `data` to the end of its allocation, which only the driver knows; 0 when it does not say.
size_t AllocationBytes(void* data) {
  using GetRange = int (*)(unsigned long long* base, size_t* size, unsigned long long address);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 3020, cudaEnableDefault, &found) != cudaSuccess) return 0;
  if (entry == nullptr || found != cudaDriverEntryPointSuccess) return 0;
  unsigned long long base = 0;
  size_t size = 0;
  const auto address = reinterpret_cast<unsigned long long>(data);
  if (reinterpret_cast<GetRange>(entry)(&base, &size, address) != 0 || base > address) return 0;
  return size - static_cast<size_t>(address - base);
}

// The device on which `data` lies; -1 when CUDA does not say.
int DeviceOf(const void* data) {
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, data) == cudaSuccess)
    return attributes.type == cudaMemoryTypeDevice ? attributes.device : -1;
  cudaGetLastError();
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open() {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  cudaDeviceProp properties = {};
  if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, 0);
  if (error == cudaSuccess) error = cudaSetDevice(0);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return absl::NotFoundError(cudaGetErrorString(error));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice(properties));
  absl::Status status = ToStatus(cudaStreamCreateWithFlags(&device->health_stream_, cudaStreamNonBlocking), "stream");
  if (status.ok()) status = device->health_word_.Allocate(sizeof(int), "health word");
  if (!status.ok()) return absl::NotFoundError(absl::StrCat("the GPU cannot be used: ", status.message()));
  return device;
}

CudaDevice::CudaDevice(const cudaDeviceProp& properties)
    : name_(properties.name),
      major_(properties.major),
      minor_(properties.minor),
      multiprocessors_(properties.multiProcessorCount) {}

CudaDevice::~CudaDevice() {
  if (health_stream_ != nullptr) cudaStreamDestroy(health_stream_);
}

void CudaDevice::Describe(DeviceInfo* device) const {
  size_t free_bytes = 0, total = 0;
  if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
    cudaGetLastError();
    free_bytes = 0;
  }
  device->has_gpu = true;
  device->cuda_major = major_;
  device->cuda_minor = minor_;
  device->gpu_multiprocessors = multiprocessors_;
  device->gpu_name = name_;
  device->gpu_free_bytes = free_bytes;
}

absl::Status CudaDevice::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

absl::Status CudaDevice::Report(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.ok()) failure_ = absl::UnavailableError(absl::StrCat("the GPU failed: ", status.message()));
  return failure_;
}

absl::Status CudaDevice::Health() {
  absl::Status status = failure();
  if (!status.ok()) return status;
  // An error of any kernel is told by the next request of whatever kind.
  cudaError_t error = cudaMemsetAsync(health_word_.data(), 0, sizeof(int), health_stream_);
  if (error == cudaSuccess) error = cudaStreamQuery(health_stream_);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // else the next launch of this thread would take it for its own
    return absl::OkStatus();
  }
  return Report(ToStatus(error, "health check"));
}

absl::StatusOr<std::unique_ptr<Lane>> CudaDevice::NewLane() {
  absl::Status failed = failure();
  if (!failed.ok()) return failed;
  absl::StatusOr<std::unique_ptr<CudaLane>> lane = CudaLane::Make();
  if (!lane.ok()) return Report(lane.status());
  return std::unique_ptr<Lane>(*std::move(lane));
}

absl::StatusOr<std::unique_ptr<DeviceLayer>> CudaDevice::Assemble(const DeviceLayerParts& parts) {
  absl::Status failed = failure();
  if (!failed.ok()) return failed;
  return MakeCudaLayer(parts, this);
}

absl::StatusOr<std::unique_ptr<PinnedBuffer>> CudaDevice::AllocatePinned(size_t bytes) {
  absl::Status failed = failure();
  if (!failed.ok()) return failed;
  HostBuffer buffer;
  absl::Status status = buffer.Allocate(bytes, "pinned buffer");
  if (!status.ok()) return Report(status);
  return std::unique_ptr<PinnedBuffer>(std::make_unique<CudaPinnedBuffer>(std::move(buffer)));
}

absl::StatusOr<std::unique_ptr<PinnedBuffer>> CudaDevice::Pin(std::span<std::byte> memory) {
  if (absl::Status healthy = Health(); !healthy.ok()) return healthy;  // so that what follows is about the memory
  const cudaError_t error = cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaSuccess) return std::unique_ptr<PinnedBuffer>(std::make_unique<CudaRegisteredMemory>(memory));
  cudaGetLastError();  // about this memory, unless the device failed meanwhile
  if (absl::Status healthy = Health(); !healthy.ok()) return healthy;
  return absl::ResourceExhaustedError(absl::StrCat("pinning ", memory.size(), " bytes: ", cudaGetErrorName(error), ": ",
                                                   cudaGetErrorString(error)));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> CudaDevice::OpenShared(const SharedHandle& handle) {
  absl::Status healthy = Health();  // so that what follows is about the handle
  if (!healthy.ok()) return healthy;
  cudaIpcMemHandle_t cuda_handle;
  static_assert(sizeof(cuda_handle) == sizeof(SharedHandle));
  std::memcpy(&cuda_handle, handle.data(), sizeof(cuda_handle));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    cudaGetLastError();  // about this handle, unless the device failed meanwhile
    if (healthy = Health(); !healthy.ok()) return healthy;
    const std::string text = absl::StrCat("CUDA IPC handle: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
    return error == cudaErrorAlreadyMapped ? absl::AlreadyExistsError(text) : absl::InvalidArgumentError(text);
  }
  auto memory = std::make_unique<CudaSharedMemory>(data, AllocationBytes(data));
  if (memory->bytes() == 0) return absl::InvalidArgumentError("CUDA IPC handle: the driver does not tell how large its memory is");
  const int device = DeviceOf(data);
  if (device > 0)
    return absl::InvalidArgumentError(absl::StrCat("CUDA IPC handle: its memory lies on device ", device, ", want device 0"));
  return std::unique_ptr<SharedMemory>(std::move(memory));
}

}  // namespace moed::cuda
