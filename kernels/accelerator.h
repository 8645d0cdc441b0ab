// A device beside the host's processors, and whole layers on it: what the engine needs of it apart from single PreparedMoe.
//
// An Accelerator is made once per process and device and outlives everything made from it; all of its methods may be called from
// any thread. A Lane is one ordered stream of work with its own workspace, staging buffers and captured launches: one call at a
// time uses it, several lanes run at once, so that the copies of one overlap the arithmetic of another.
// A device that failed stays failed: from then on every call, whatever its lane, returns UNAVAILABLE with the first reason.
#ifndef MOED_KERNELS_ACCELERATOR_H_
#define MOED_KERNELS_ACCELERATOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device_info.h"
#include "kernels/incoming_rows.h"
#include "kernels/router.h"
#include "kernels/tensor.h"

namespace moed {

class PreparedMoe;
class WorkerPool;

class Lane {
 public:
  virtual ~Lane() = default;
};

// Memory of the host that the device reads and writes directly. Freed with the object, on any thread.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  virtual std::span<std::byte> bytes() = 0;
};

// Memory of the device that another process of this host owns. Closed with the object; the owner keeps it allocated until then.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  virtual void* data() const = 0;   // of the device
  virtual size_t bytes() const = 0;  // of the whole allocation, found from the driver and not claimed by the other process
};

// What one process hands another so that both see the same device memory.
using SharedHandle = std::array<std::byte, 64>;

// A layer's pieces. Pointers must outlive the DeviceLayer; vectors are copied to the device.
struct DeviceLayerParts {
  const PreparedMoe* routed = nullptr;  // prepared by a backend of the same accelerator
  const PreparedMoe* shared = nullptr;  // null without a shared expert; one expert
  int num_experts = 0;                  // E of the model: routing speaks of these
  int first_expert = 0;                 // routed holds experts [first_expert, first_expert + its E); the others contribute 0
  int top_k = 0;
  int64_t hidden = 0;
  RouterRule rule;
  std::span<const float> gate;             // [E, H]; empty: RoutingKind::kGate is refused
  std::span<const float> gate_bias;        // [E] or empty
  std::span<const float> correction_bias;  // [E] or empty
  std::span<const float> shared_gate;      // [H] or empty: the shared expert's output is added as it is
};

enum class RoutingKind : uint8_t { kIds, kLogits, kGate };

// One call of a DeviceLayer, at most as many rows as the routed and shared PreparedMoe take at once. x and out may lie on the host
// or on the device (TensorView::place); on the host, a pinned buffer saves a copy. ids, weights and logits lie on the host and were
// checked by the caller. All of it is read before Forward returns.
struct DeviceCall {
  TensorView x;  // [M, H]
  RoutingKind routing = RoutingKind::kIds;
  int top_k = 0;                   // kIds only; else the model's
  std::span<const int32_t> ids;    // [M, k] of the model's experts, -1 is "no expert"
  std::span<const float> weights;  // [M, k]
  std::span<const float> logits;   // [M, E]
  bool routed_only = false;
  // Of x, which is on the host, while it is still being written; null: all of it is there. A call that fails may return without
  // having waited.
  IncomingRows* incoming = nullptr;
  // Filled with the routing that was used, [M, k] each, when not null.
  std::vector<int32_t>* used_ids = nullptr;
  std::vector<float>* used_weights = nullptr;
};

class DeviceLayer {
 public:
  virtual ~DeviceLayer() = default;

  // Routing, routed experts, shared expert and their sum, rounded once to out.dtype; returns when `out` is complete. `pool` (may be
  // null) helps to copy between host buffers. INVALID_ARGUMENT when logits cannot be routed (names the row): plain host memory is
  // then left as it was, an output on the device or in pinned memory holds no result. UNAVAILABLE when the device failed.
  virtual absl::Status Forward(const DeviceCall& call, MutableTensorView out, Lane& lane, WorkerPool* pool) const = 0;

  // Captures the launches of the usual numbers of rows on `lane`, so that no request pays for it.
  virtual absl::Status WarmUp(Lane& lane) const = 0;
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  virtual std::string Name() const = 0;  // "NVIDIA H200"
  // Fills the has_gpu, cuda_* and gpu_* fields with what is true now.
  virtual void Describe(DeviceInfo* device) const = 0;

  // OK, or UNAVAILABLE with the first failure of the device. Asks the device; some microseconds.
  virtual absl::Status Health() = 0;

  virtual absl::StatusOr<std::unique_ptr<Lane>> NewLane() = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceLayer>> Assemble(const DeviceLayerParts& parts) = 0;
  // RESOURCE_EXHAUSTED with the bytes when the system refuses.
  virtual absl::StatusOr<std::unique_ptr<PinnedBuffer>> AllocatePinned(size_t bytes) = 0;
  // Pins memory that others own and keep mapped until the returned object is gone. It begins and ends with a page, and may be shared
  // with other processes. RESOURCE_EXHAUSTED with the bytes and the reason when the system or the driver refuses.
  virtual absl::StatusOr<std::unique_ptr<PinnedBuffer>> Pin(std::span<std::byte> memory) = 0;
  // INVALID_ARGUMENT when the handle is none, or its memory lies on another device or host. ALREADY_EXISTS when memory that is open
  // stands in its way: its owner freed that, and got this at the same address; it can be opened once the other is closed.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> OpenShared(const SharedHandle& handle) = 0;
};

}  // namespace moed

#endif  // MOED_KERNELS_ACCELERATOR_H_
