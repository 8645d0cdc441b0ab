#include "client/shared_session.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/ring/doorbell.h"

namespace moed::client {
namespace {

using std::chrono::steady_clock;

constexpr uint32_t kSlots = 64;
constexpr size_t kPage = 4096;
constexpr std::chrono::microseconds kSpin(50);
constexpr std::chrono::milliseconds kLook(100);  // how often a waiting call looks whether the server is there
constexpr int kAnswerMs = 10'000;                // for the server to open a session, which may mean to pin it

std::string ErrnoText(int error) { return std::generic_category().message(error); }

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

absl::Status NoSession(const std::string& socket, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("session socket ", socket, ": ", why));
}

// Anybody can make a socket at a path that a server elsewhere told, so a token goes only to a process of this user or of root.
absl::Status CheckOwner(const std::string& path, int connection) {
  ucred owner{};
  socklen_t size = sizeof(owner);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &owner, &size) != 0) return NoSession(path, ErrnoText(errno));
  if (owner.uid == geteuid() || owner.uid == 0) return absl::OkStatus();
  return absl::UnauthenticatedError(absl::StrCat("session socket ", path, ": wanted a server of user ", geteuid(),
                                                 " or root to show the token to, got one of user ", owner.uid));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedSession>> SharedSession::Open(const std::string& socket, const ring::SessionKey& server_id,
                                                                   uint32_t version, const std::string& token, size_t bytes) {
  std::shared_ptr<SharedSession> session(new SharedSession());
  if (absl::Status status = session->Connect(socket, server_id, version, token, bytes); !status.ok()) return status;
  return session;
}

absl::Status SharedSession::Connect(const std::string& path, const ring::SessionKey& server_id, uint32_t version,
                                    const std::string& token, size_t bytes) {
  if (version != ring::kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("shared memory: this client speaks version ", ring::kVersion, ", the server ", version));
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return NoSession(path, "its path is none");
  std::memcpy(address.sun_path, path.data(), path.size());
  connection_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (connection_ < 0 || connect(connection_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return NoSession(path, ErrnoText(errno));
  }
  if (absl::Status status = token.empty() ? absl::OkStatus() : CheckOwner(path, connection_); !status.ok()) return status;
  const size_t ring_bytes = RoundUp(ring::RingBytes(kSlots), kPage);
  bytes_ = ring_bytes + RoundUp(bytes, kPage);
  const int region = ring::MakeRegion(bytes_);
  if (region < 0) return absl::ResourceExhaustedError(absl::StrCat("shared memory of ", bytes_, " bytes: ", ErrnoText(errno)));
  void* const memory = ring::MapRegion(region, bytes_);
  absl::Status status;
  if (memory == MAP_FAILED) {
    status = absl::ResourceExhaustedError(absl::StrCat("mapping ", bytes_, " bytes: ", ErrnoText(errno)));
  } else {
    memory_ = static_cast<uint8_t*>(memory);
    ring_ = ring::HeaderAt(memory_);  // zeros, as all of it
    ring_->magic = ring::kMagic, ring_->version = ring::kVersion, ring_->slots = kSlots;
    slots_ = ring::SlotsAt(memory_);
    uses_.resize(kSlots);
    free_[ring_bytes] = bytes_ - ring_bytes;
    spin_ = std::thread::hardware_concurrency() > 1 ? kSpin : std::chrono::microseconds(0);
    ring::OpenRequest request;
    request.region_bytes = bytes_;
    request.ring_slots = kSlots;
    std::memcpy(request.token, token.data(), std::min(token.size(), sizeof(request.token) - 1));
    status = ShakeHands(request, region, server_id);
  }
  close(region);
  return status;
}

absl::Status SharedSession::ShakeHands(const ring::OpenRequest& request, int region, const ring::SessionKey& server_id) {
  int error = ring::SendPacket(connection_, &request, sizeof(request), region);
  ring::OpenAnswer answer;
  pollfd polled = {connection_, POLLIN, 0};
  if (error == 0 && poll(&polled, 1, kAnswerMs) <= 0) error = ETIMEDOUT;
  int none = -1;
  if (error == 0) error = ring::ReceivePacket(connection_, &answer, sizeof(answer), &none);
  if (none >= 0) close(none);
  if (error != 0) return absl::UnavailableError(absl::StrCat("session: ", ErrnoText(error)));
  if (answer.magic != ring::kMagic || answer.version != ring::kVersion) {
    return absl::FailedPreconditionError("session: the answer is none of this protocol");
  }
  if (answer.server_id != server_id) return absl::UnavailableError("session: another server answers at the socket");
  answer.message[sizeof(answer.message) - 1] = 0;
  if (answer.code != 0) return absl::Status(static_cast<absl::StatusCode>(answer.code), answer.message);
  key_ = answer.key;
  return absl::OkStatus();
}

SharedSession::~SharedSession() {
  if (connection_ >= 0) close(connection_);
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

bool SharedSession::Alive() const {
  // The server says nothing on an open session: whatever there is to read is its end.
  pollfd polled = {connection_, POLLIN, 0};
  return poll(&polled, 1, 0) == 0;
}

std::optional<SharedSession::Part> SharedSession::Allocate(size_t bytes) {
  const size_t whole = RoundUp(std::max<size_t>(bytes, 1), ring::kAlignment);
  std::lock_guard<std::mutex> lock(memory_mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(), [whole](const auto& part) { return part.second >= whole; });
  if (found == free_.end() || retired_) return std::nullopt;
  const auto [offset, size] = *found;
  free_.erase(found);
  if (size > whole) free_[offset + whole] = size - whole;
  used_[offset] = {whole};
  return Part(shared_from_this(), offset, bytes);
}

std::optional<SharedSession::Part> SharedSession::Hold(std::span<const uint8_t> memory) {
  const std::optional<uint64_t> offset = OffsetOf(memory);
  if (!offset) return std::nullopt;
  std::lock_guard<std::mutex> lock(memory_mutex_);
  const auto next = used_.upper_bound(*offset);
  if (next == used_.begin()) return std::nullopt;
  const auto use = std::prev(next);
  if (*offset + memory.size() > use->first + use->second.bytes) return std::nullopt;
  ++use->second.parts;
  return Part(shared_from_this(), use->first, use->second.bytes);
}

void SharedSession::Retire() {
  std::lock_guard<std::mutex> lock(memory_mutex_);
  retired_ = true;
}

bool SharedSession::retired() const {
  std::lock_guard<std::mutex> lock(memory_mutex_);
  return retired_;
}

void SharedSession::Free(uint64_t offset) {
  std::lock_guard<std::mutex> lock(memory_mutex_);
  const auto used = used_.find(offset);
  if (--used->second.parts > 0) return;
  auto part = free_.emplace(offset, used->second.bytes).first;
  used_.erase(used);
  if (const auto next = std::next(part); next != free_.end() && offset + part->second == next->first) {
    part->second += next->second;
    free_.erase(next);
  }
  if (part == free_.begin()) return;
  if (const auto before = std::prev(part); before->first + before->second == offset) {
    before->second += part->second;
    free_.erase(part);
  }
}

std::optional<uint64_t> SharedSession::OffsetOf(std::span<const uint8_t> memory) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_), at = reinterpret_cast<uintptr_t>(memory.data());
  if (at < begin || at - begin > bytes_ || memory.size() > bytes_ - (at - begin) || (at - begin) % ring::kAlignment != 0) {
    return std::nullopt;
  }
  return at - begin;
}

// Takes a free slot for the submission and posts it.
std::optional<uint32_t> SharedSession::Post(ring::Submission* submission, std::vector<Part>* parts) {
  std::vector<Part> left;  // of slots that were answered after their callers had gone; freed without the lock
  std::lock_guard<std::mutex> lock(slots_mutex_);
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    SlotUse& use = uses_[slot];
    const bool over = use.left && slots_[slot].done.load(std::memory_order_acquire) == use.sequence;
    if (use.busy && !over) continue;
    if (over) left.swap(use.parts);
    use.busy = true, use.left = false;
    use.sequence += use.sequence == UINT32_MAX ? 2 : 1;
    use.parts.swap(*parts);
    submission->sequence = use.sequence;
    std::memcpy(&slots_[slot].submission, submission, sizeof(*submission));
    const uint32_t posted = ring_->posted.load(std::memory_order_relaxed);
    ring_->queue[posted % kSlots].store(slot, std::memory_order_relaxed);
    ring_->posted.store(posted + 1, std::memory_order_release);
    return slot;
  }
  return std::nullopt;
}

absl::Status SharedSession::WaitFor(uint32_t slot, uint32_t sequence, std::chrono::milliseconds timeout) {
  ring::Slot& waited = slots_[slot];
  const auto begin = steady_clock::now();
  std::chrono::microseconds spin = spin_;
  for (;;) {
    const uint32_t seen = waited.done.load(std::memory_order_acquire);
    if (seen == sequence) return absl::OkStatus();
    std::chrono::microseconds limit = kLook;
    if (timeout.count() > 0) {
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(begin + timeout - steady_clock::now());
      if (left.count() <= 0) return absl::DeadlineExceededError(absl::StrCat("no answer within ", timeout.count(), " ms"));
      limit = std::min(limit, left);
    }
    if (ring::Wait(waited.done, seen, waited.waits, spin, limit)) continue;
    spin = std::chrono::microseconds(0);
    if (!Alive()) return absl::UnavailableError("the server ended the session");
  }
}

std::vector<SharedSession::Part> SharedSession::Leave(uint32_t slot) {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  uses_[slot].busy = false;
  return std::exchange(uses_[slot].parts, {});
}

void SharedSession::Abandon() {
  std::vector<Part> parts;  // freed without the lock
  std::lock_guard<std::mutex> lock(slots_mutex_);
  for (SlotUse& use : uses_) {
    if (!use.left) continue;
    for (Part& part : use.parts) parts.push_back(std::move(part));
    use.parts.clear();
  }
}

std::optional<absl::StatusOr<ring::Completion>> SharedSession::Run(ring::Submission submission, std::chrono::milliseconds timeout,
                                                                   std::vector<Part>* parts) {
  submission.timeout_us = static_cast<uint64_t>(std::chrono::microseconds(timeout).count());
  const std::optional<uint32_t> slot = Post(&submission, parts);
  if (!slot) return std::nullopt;
  ring::Ring(ring_->posted, ring_->server_waits);
  absl::Status status = WaitFor(*slot, submission.sequence, timeout);
  if (!status.ok()) {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    uses_[*slot].left = true;
    return absl::StatusOr<ring::Completion>(std::move(status));
  }
  ring::Completion completion;
  std::memcpy(&completion, &slots_[*slot].completion, sizeof(completion));
  *parts = Leave(*slot);
  return absl::StatusOr<ring::Completion>(completion);
}

}  // namespace moed::client
