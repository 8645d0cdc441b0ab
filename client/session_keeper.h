// The session of a client: opened when it is first wanted, and again when it was lost.
//
// Threads: any. Whoever wants the session while it is being opened waits for that.
#ifndef MOED_CLIENT_SESSION_KEEPER_H_
#define MOED_CLIENT_SESSION_KEEPER_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "client/shared_session.h"
#include "moe/v1/moe.pb.h"

namespace moed::client {

class SessionKeeper {
 public:
  // Asks the server what it offers.
  using Hello = std::function<absl::Status(moe::v1::HelloResponse*)>;

  // `token` is the caller's, "" for none.
  SessionKeeper(const ClientOptions& options, std::string token) : options_(options), token_(std::move(token)) {}
  ~SessionKeeper();

  // The session; null when calls travel by messages. UNAVAILABLE and DEADLINE_EXCEEDED of the Hello, since the call would fail as
  // well; with kSharedMemory and kRing also why there is no session.
  absl::StatusOr<std::shared_ptr<SharedSession>> Get(const Hello& hello);

  // Drops `session` if it is over.
  void Lost(const std::shared_ptr<SharedSession>& session);
  // Drops `session`, whose memory the server may still use for a call that was given up. Calls that are under way in it go on.
  void Leave(const std::shared_ptr<SharedSession>& session);

 private:
  absl::StatusOr<std::shared_ptr<SharedSession>> Open(const moe::v1::HelloResponse& answer) const;

  const ClientOptions options_;
  const std::string token_;
  std::mutex mutex_;
  std::shared_ptr<SharedSession> session_;              // guarded by mutex_
  std::chrono::steady_clock::time_point not_before_{};  // for another attempt; guarded by mutex_
};

}  // namespace moed::client

#endif  // MOED_CLIENT_SESSION_KEEPER_H_
