// A session of memory that this process shares with a server of the same host, and the ring in it.
//
// Threads: any number at once; each call has a slot of the ring for itself, and waits on that slot's word alone. A call that gave up
// waiting leaves its slot and its memory to the server until that has answered.
// The session is over when the server closes the connection: every wait ends with UNAVAILABLE then, and alive() is false.
#ifndef MOED_CLIENT_SHARED_SESSION_H_
#define MOED_CLIENT_SHARED_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/ring/layout.h"
#include "proto/ring/session.h"

namespace moed::client {

class SharedSession : public std::enable_shared_from_this<SharedSession> {
 public:
  // A part of the session's memory, given back with the object; keeps the session's memory mapped. Aligned to ring::kAlignment.
  class Part {
   public:
    Part(Part&& other) noexcept : session_(std::move(other.session_)), offset_(other.offset_), bytes_(other.bytes_) {}
    Part& operator=(Part&& other) noexcept {
      std::swap(session_, other.session_), std::swap(offset_, other.offset_), std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Part() {
      if (session_ != nullptr) session_->Free(offset_);
    }
    uint64_t offset() const { return offset_; }
    std::span<uint8_t> bytes() const { return {session_->memory_ + offset_, bytes_}; }

   private:
    friend class SharedSession;
    Part(std::shared_ptr<SharedSession> session, uint64_t offset, size_t bytes)
        : session_(std::move(session)), offset_(offset), bytes_(bytes) {}
    std::shared_ptr<SharedSession> session_;
    uint64_t offset_;
    size_t bytes_;
  };

  // Opens a session at `socket` with `bytes` of memory for tensors, as the bearer of `token` ("": none). UNAVAILABLE when nobody
  // answers there, or another server than `server_id`; UNAUTHENTICATED when the token cannot be shown to whoever has the socket; else
  // the server's refusal.
  static absl::StatusOr<std::shared_ptr<SharedSession>> Open(const std::string& socket, const ring::SessionKey& server_id,
                                                             uint32_t version, const std::string& token, size_t bytes);
  ~SharedSession();

  const ring::SessionKey& key() const { return key_; }
  const uint8_t* data() const { return memory_; }  // what offsets count from
  // Whether the server still holds its end. A system call.
  bool Alive() const;

  // Nothing when that much is not free now, or the session was retired.
  std::optional<Part> Allocate(size_t bytes);
  // Memory of this session that is allocated, once more: it stays so while any of its parts is there. Nothing for other memory.
  std::optional<Part> Hold(std::span<const uint8_t> memory);
  // Gives out no memory any more, since the server may still use what comes back: nobody knows until when.
  void Retire();
  bool retired() const;
  // The offset of memory of this session; nothing for other memory, or where it is not aligned.
  std::optional<uint64_t> OffsetOf(std::span<const uint8_t> memory) const;

  // Runs one submission, whose sequence and timeout are filled in here. `parts` is the memory that it names and that belongs to this
  // call; when no answer came it stays with the server, and `parts` is empty. Nothing when no slot is free. DEADLINE_EXCEEDED when
  // `timeout` (zero: none) passed; UNAVAILABLE when the session ended. The completion may say that the call failed.
  std::optional<absl::StatusOr<ring::Completion>> Run(ring::Submission submission, std::chrono::milliseconds timeout,
                                                      std::vector<Part>* parts);

  // Frees what calls left with the server, which is not there any more, or will not be asked again.
  void Abandon();

 private:
  struct SlotUse {
    bool busy = false;
    bool left = false;  // nobody waits for it any more
    uint32_t sequence = 0;
    std::vector<Part> parts;
  };

  SharedSession() = default;
  absl::Status Connect(const std::string& socket, const ring::SessionKey& server_id, uint32_t version, const std::string& token,
                       size_t bytes);
  absl::Status ShakeHands(const ring::OpenRequest& request, int region, const ring::SessionKey& server_id);
  void Free(uint64_t offset);
  std::optional<uint32_t> Post(ring::Submission* submission, std::vector<Part>* parts);
  absl::Status WaitFor(uint32_t slot, uint32_t sequence, std::chrono::milliseconds timeout);
  // Ends the use of a slot that was answered, and returns its memory.
  std::vector<Part> Leave(uint32_t slot);

  int connection_ = -1;
  uint8_t* memory_ = nullptr;  // of the region
  size_t bytes_ = 0;
  ring::SessionKey key_ = {};
  ring::Header* ring_ = nullptr;
  ring::Slot* slots_ = nullptr;
  std::chrono::microseconds spin_{0};
  struct Use {
    uint64_t bytes = 0;
    int parts = 1;
  };
  mutable std::mutex memory_mutex_;
  std::map<uint64_t, uint64_t> free_;  // bytes by offset; guarded by memory_mutex_
  std::map<uint64_t, Use> used_;       // by offset; guarded by memory_mutex_
  bool retired_ = false;               // guarded by memory_mutex_
  std::mutex slots_mutex_;
  std::vector<SlotUse> uses_;  // guarded by slots_mutex_
};

}  // namespace moed::client

#endif  // MOED_CLIENT_SHARED_SESSION_H_
