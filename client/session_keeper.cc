#include "client/session_keeper.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed::client {
namespace {

using std::chrono::steady_clock;

// After an attempt in vain: a server that starts again offers its session socket soon after it answers calls.
constexpr std::chrono::seconds kPause(2);

}  // namespace

SessionKeeper::~SessionKeeper() {
  if (session_ != nullptr) session_->Abandon();
}

absl::StatusOr<std::shared_ptr<SharedSession>> SessionKeeper::Get(const Hello& hello) {
  if (options_.transport == Transport::kRpc) return std::shared_ptr<SharedSession>();
  std::lock_guard<std::mutex> lock(mutex_);
  if (session_ != nullptr) return session_;
  const bool wanted = options_.transport != Transport::kAuto;
  if (!wanted && steady_clock::now() < not_before_) return session_;
  moe::v1::HelloResponse answer;
  const absl::Status heard = hello(&answer);
  if (absl::IsUnavailable(heard) || absl::IsDeadlineExceeded(heard)) return heard;  // a call would fare no better
  absl::StatusOr<std::shared_ptr<SharedSession>> opened = heard.ok() ? Open(answer) : heard;
  if (opened.ok()) {
    session_ = *std::move(opened);
    return session_;
  }
  not_before_ = steady_clock::now() + kPause;
  return wanted ? opened.status() : absl::StatusOr<std::shared_ptr<SharedSession>>(session_);
}

absl::StatusOr<std::shared_ptr<SharedSession>> SessionKeeper::Open(const moe::v1::HelloResponse& answer) const {
  if (!answer.has_shared_memory()) return absl::UnimplementedError("shared memory: the server offers none");
  const moe::v1::SharedMemoryHello& shared = answer.shared_memory();
  ring::SessionKey server_id = {};
  if (shared.server_id().size() != server_id.size()) return absl::InternalError("shared memory: the server's id has another size");
  std::memcpy(server_id.data(), shared.server_id().data(), server_id.size());
  return SharedSession::Open(shared.socket(), server_id, shared.version(), token_, options_.session_bytes);
}

void SessionKeeper::Lost(const std::shared_ptr<SharedSession>& session) {
  if (session->Alive()) return;  // the server is draining, or refused that one call
  session->Abandon();
  std::lock_guard<std::mutex> lock(mutex_);
  if (session_ == session) session_.reset();
}

void SessionKeeper::Leave(const std::shared_ptr<SharedSession>& session) {
  session->Retire();
  std::lock_guard<std::mutex> lock(mutex_);
  if (session_ == session) session_.reset();
}

}  // namespace moed::client
