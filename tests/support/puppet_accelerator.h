// A puppet of an accelerator: its device is the host's memory, its layers compute with cpu_generic, and tests pull its strings.
//
// Every pointer of Place::kDevice is a plain pointer. PuppetBackend prepares layers on it; a layer wholly on it runs through
// DeviceLayer with the host's own routing, so that answers equal those of cpu_generic to the bit. What the interface asks of
// callers (a lane of this accelerator, one call at a time on it, no more rows than a layer takes) is checked: a breach is
// INTERNAL. Threads: all methods may be called from any thread.
#ifndef MOED_TESTS_SUPPORT_PUPPET_ACCELERATOR_H_
#define MOED_TESTS_SUPPORT_PUPPET_ACCELERATOR_H_

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/moe_kernel.h"

namespace moed::testing {

class PuppetAccelerator : public Accelerator {
 public:
  // What happened so far.
  struct Counts {
    std::atomic<int> lanes{0};
    std::atomic<int> assembles{0};
    std::atomic<int> warm_ups{0};
    std::atomic<int> device_calls{0};    // DeviceLayer::Forward
    std::atomic<int> prepared_calls{0};  // PreparedMoe::Run
    std::atomic<int> incoming_parts{0};  // copies of rows that came while a call ran
    std::atomic<int> pinned{0};          // buffers ever
    std::atomic<int> pinned_alive{0};
    std::atomic<int> registered_alive{0};  // memory of others that is pinned
    std::atomic<int> opened{0};          // shared memory ever
    std::atomic<int> open_alive{0};
  };
  const Counts& counts() const { return counts_; }

  // From now on Health and every call are UNAVAILABLE with `reason`.
  void Fail(const std::string& reason);
  // From now on lanes, weights and pinned memory are RESOURCE_EXHAUSTED; or no longer.
  void RefuseMemory(bool refuse) { refuse_memory_ = refuse; }
  // From now on calls of DeviceLayer stop after they began, until Release.
  void Block();
  void Release();
  // Waits until `calls` of them are stopped; false when ten seconds passed first.
  bool WaitForBlocked(int calls);

  // Memory of "another process", and its made-up handle. `data` must outlive what is opened by it.
  SharedHandle Share(std::byte* data, size_t bytes);
  // The same memory after its owner freed and allocated it again: another handle, ALREADY_EXISTS while `old` is open.
  SharedHandle ShareAgain(const SharedHandle& old);

  std::string Name() const override { return "puppet"; }
  void Describe(DeviceInfo* device) const override;
  absl::Status Health() override { return Failure(); }
  absl::StatusOr<std::unique_ptr<Lane>> NewLane() override;
  absl::StatusOr<std::unique_ptr<DeviceLayer>> Assemble(const DeviceLayerParts& parts) override;
  absl::StatusOr<std::unique_ptr<PinnedBuffer>> AllocatePinned(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<PinnedBuffer>> Pin(std::span<std::byte> memory) override;
  absl::StatusOr<std::unique_ptr<SharedMemory>> OpenShared(const SharedHandle& handle) override;

 private:
  friend class PuppetBackend;
  friend class PuppetLayer;
  friend class PuppetMoe;
  absl::Status Failure() const;
  absl::Status CheckMemory(const char* what) const;
  void StopIfBlocked();

  Counts counts_;
  std::atomic<bool> refuse_memory_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  absl::Status failure_;
  bool blocked_ = false;
  int stopped_ = 0;
  struct Shared {
    std::byte* data = nullptr;
    size_t bytes = 0;
    std::shared_ptr<std::atomic<int>> open = std::make_shared<std::atomic<int>>(0);
    std::shared_ptr<const std::atomic<int>> in_way;  // the count of what must not be open; null: nothing
  };
  std::map<SharedHandle, Shared> shared_;
};

// Prepares layers for the puppet with cpu_generic. Needs a device with has_gpu. Both must outlive what is prepared.
class PuppetBackend : public Backend {
 public:
  explicit PuppetBackend(PuppetAccelerator* accelerator, const std::string& name = "cuda_puppet");

  std::string Name() const override { return name_; }
  std::string Description() const override { return "cpu_generic as if it were a GPU"; }
  bool OnGpu() const override { return true; }
  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override;
  size_t PreparedBytes(const MoeDesc& desc) const override { return inner_->PreparedBytes(desc); }
  size_t WorkspaceBytes(const MoeDesc& desc) const override { return inner_->WorkspaceBytes(desc); }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override;

 private:
  PuppetAccelerator* const accelerator_;
  const std::string name_;
  const Backend* inner_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_PUPPET_ACCELERATOR_H_
