// What the engine has of an accelerator: its lanes, its health, and memory that it can reach.
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"
#include "engine/lanes.h"
#include "engine/model.h"
#include "engine/shared_cache.h"

namespace moed {

absl::Status NotOnDevice(const LoadedLayer& layer) {
  const std::string shared = layer.shared == nullptr ? "" : absl::StrCat(" and ", layer.shared_choice.backend->Name());
  return absl::InvalidArgumentError(absl::StrCat("device memory: wanted a layer that is wholly on an accelerator, got layer ",
                                                 layer.plan.layer, " on ", layer.choice.backend->Name(), shared));
}

absl::StatusOr<LaneSet*> Engine::LanesOf(Accelerator& accelerator) {
  std::lock_guard<std::mutex> lock(device_mutex_);
  if (lanes_ != nullptr && &lanes_->accelerator() == &accelerator) return lanes_.get();
  if (lanes_ != nullptr) {
    return absl::UnimplementedError(absl::StrCat("an engine runs layers on one accelerator: wanted ", lanes_->accelerator().Name(),
                                                 ", got another, ", accelerator.Name()));
  }
  absl::StatusOr<std::unique_ptr<LaneSet>> lanes = LaneSet::Make(accelerator, options_.lanes);
  if (!lanes.ok()) return lanes.status();
  call_memory_ = std::make_shared<PinnedCache>(accelerator);
  shared_ = std::make_unique<SharedCache>(accelerator);
  lanes_ = *std::move(lanes);
  return lanes_.get();
}

absl::Status Engine::KnownFailure() const {
  std::lock_guard<std::mutex> lock(device_mutex_);
  return device_failure_;
}

absl::Status Engine::DeviceFailed(const absl::Status& reason) {
  std::lock_guard<std::mutex> lock(device_mutex_);
  if (device_failure_.ok()) {
    device_failure_ = absl::UnavailableError(
        absl::StrCat(lanes_ == nullptr ? "the accelerator" : lanes_->accelerator().Name(), " failed: ", reason.message()));
  }
  return device_failure_;
}

absl::Status Engine::DeviceHealth() {
  Accelerator* accelerator = nullptr;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    if (!device_failure_.ok() || lanes_ == nullptr) return device_failure_;
    accelerator = &lanes_->accelerator();
  }
  const absl::Status health = accelerator->Health();  // without the lock, which calls need
  return health.ok() ? health : DeviceFailed(health);
}

HostStatus Engine::Host() const {
  HostStatus host = host_;
  const Accelerator* accelerator = nullptr;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    if (lanes_ == nullptr || !device_failure_.ok()) return host;
    accelerator = &lanes_->accelerator();
  }
  DeviceInfo now = options_.device;
  accelerator->Describe(&now);  // without the lock, which calls need
  host.gpu_free_bytes = now.gpu_free_bytes;
  return host;
}

absl::StatusOr<CallMemory> Engine::AllocateForCall(const std::string& model_name, int number, size_t bytes) const {
  const absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  if (!model.ok()) return CallMemory::FromHeap(bytes);
  const absl::StatusOr<const LoadedLayer*> layer = (*model)->Ready(number);
  return layer.ok() ? AllocateFor(**layer, bytes) : CallMemory::FromHeap(bytes);
}

absl::StatusOr<CallMemory> Engine::AllocateFor(const LoadedLayer& layer, size_t bytes) const {
  if (layer.device == nullptr || !KnownFailure().ok()) return CallMemory::FromHeap(bytes);
  std::shared_ptr<PinnedCache> memory;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    memory = call_memory_;
  }
  return memory->Allocate(bytes);
}

std::shared_ptr<void> Engine::PinForCalls(std::span<std::byte> memory) {
  Accelerator* accelerator = nullptr;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    if (lanes_ == nullptr || !device_failure_.ok()) return nullptr;
    accelerator = &lanes_->accelerator();
  }
  absl::StatusOr<std::unique_ptr<PinnedBuffer>> pinned = accelerator->Pin(memory);
  if (!pinned.ok()) {
    static_cast<void>(OfDevice(pinned.status()));  // which keeps a failure of the device
    return nullptr;
  }
  return std::shared_ptr<PinnedBuffer>(*std::move(pinned));
}

absl::StatusOr<std::shared_ptr<const SharedMemory>> Engine::OpenShared(const std::string& model_name, int number,
                                                                       const SharedHandle& handle) {
  absl::StatusOr<std::shared_ptr<Model>> model = Get(model_name);
  if (!model.ok()) return model.status();
  absl::StatusOr<const LoadedLayer*> layer = (*model)->Ready(number);
  if (!layer.ok()) return layer.status();
  if ((*layer)->device == nullptr) return NotOnDevice(**layer);
  SharedCache* cache = nullptr;
  {
    std::lock_guard<std::mutex> lock(device_mutex_);
    if (!device_failure_.ok()) return device_failure_;
    cache = shared_.get();
  }
  absl::StatusOr<std::shared_ptr<const SharedMemory>> memory = cache->Open(handle);
  if (!memory.ok()) return OfDevice(memory.status());
  return memory;
}

}  // namespace moed
