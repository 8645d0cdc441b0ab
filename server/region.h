// Memory that a client of the same host shares with the server, and the sessions that own it.
//
// Threads: any. A region is unmapped with its last pointer, so a call that holds one may use it when the client is long gone.
// What lies in it may change at any moment: only hidden states and outputs are used in place.
#ifndef MOED_SERVER_REGION_H_
#define MOED_SERVER_REGION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed {

class Region {
 public:
  // What keeps memory pinned for a device while it lives.
  using Pin = std::shared_ptr<void>;

  // Maps `bytes` of the memfd `fd`, which stays the caller's. INVALID_ARGUMENT when its size is another or may change, or not all of
  // it is allocated; RESOURCE_EXHAUSTED when the system refuses.
  static absl::StatusOr<std::shared_ptr<Region>> Map(int fd, uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  void KeepPinned(Pin pin) { pin_ = std::move(pin); }

  // `bytes` at `offset`, a multiple of ring::kAlignment. INVALID_ARGUMENT naming `field` when they are not within the region.
  absl::StatusOr<std::byte*> At(const std::string& field, uint64_t offset, uint64_t bytes) const;

 private:
  explicit Region(std::span<std::byte> memory) : memory_(memory) {}

  const std::span<std::byte> memory_;
  Pin pin_;
};

}  // namespace moed

#endif  // MOED_SERVER_REGION_H_
