// The session socket of the server: clients of the same host hand over memory there, and a ring if they want one.
//
// Threads: one of its own takes connections, opens sessions and ends them; Find and counts may be called from any thread. A session
// ends when its connection does, for whatever reason: its ring stops, its key is forgotten, and its region goes with the last call
// that uses it. What a client does on its connection can end its own session only.
#ifndef MOED_SERVER_SESSIONS_H_
#define MOED_SERVER_SESSIONS_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/ring/session.h"
#include "server/region.h"

namespace moed {

// The server's side of one client's ring; ends with the object.
class SessionRing {
 public:
  virtual ~SessionRing() = default;
};

struct SessionOptions {
  std::string path;                      // of the socket; made anew, and removed at the end
  mode_t mode = 0600;                    // of the socket
  int max_sessions = 64;
  uint64_t max_bytes = uint64_t{4} << 30;  // of all regions together
  // Whether the bearer of a token may open a session now: OK, UNAUTHENTICATED, or UNAVAILABLE. Empty: everybody whom the socket's
  // mode lets connect.
  std::function<absl::Status(const std::string& token)> admit;
  // Pins a region for the device that reads it; may return null. Empty: nothing is pinned.
  std::function<Region::Pin(std::span<std::byte> memory)> pin;
  // Serves the ring at `offset` of `region`, which lies within it, for the bearer of `token`. `abandon`, which may be called from any
  // thread, ends the session: its client broke the contract.
  std::function<std::unique_ptr<SessionRing>(std::shared_ptr<Region> region, uint64_t offset, uint32_t slots,
                                             const std::string& token, std::function<void(const absl::Status& why)> abandon)>
      serve_ring;
};

class Sessions {
 public:
  // Binds the socket. UNAVAILABLE names the path and the reason; ALREADY_EXISTS where another server answers or another file is.
  static absl::StatusOr<std::unique_ptr<Sessions>> Listen(SessionOptions options);
  ~Sessions();

  const std::string& path() const { return options_.path; }
  uint64_t max_bytes() const { return options_.max_bytes; }
  // Random: tells this server from another that has or had a socket of the same path.
  const ring::SessionKey& server_id() const { return server_id_; }
  // The region of an open session. NOT_FOUND when there is none with that key.
  absl::StatusOr<std::shared_ptr<Region>> Find(const ring::SessionKey& key) const;
  // Takes no more sessions; those that are open go on.
  void StopAccepting();
  // Ends all sessions.
  void Stop();

  struct Counts {
    int open = 0;
    uint64_t bytes = 0;    // of their regions
    uint64_t opened = 0, refused = 0, abandoned = 0;  // ever
  };
  Counts counts() const;

 private:
  struct Session;

  explicit Sessions(SessionOptions options);
  absl::Status Bind();
  void ThreadMain();
  std::vector<int> Watched() const;
  void Accept();
  void Serve(int connection);
  void OpenSession(int connection);
  absl::StatusOr<ring::SessionKey> Open(const ring::OpenRequest& request, int fd, Session* session);
  absl::Status CheckRequest(const ring::OpenRequest& request, int fd) const;
  absl::Status StartRing(const ring::OpenRequest& request, int connection, Session* session);
  void End(int connection);
  void DropSilent();
  void Wake();

  const SessionOptions options_;
  ring::SessionKey server_id_ = {};
  int listener_ = -1;
  int wake_ = -1;  // an eventfd
  std::thread thread_;
  mutable std::mutex mutex_;                              // guards what follows
  std::map<int, std::unique_ptr<Session>> connections_;   // by descriptor; sessions that are not open yet have no region
  std::vector<std::pair<int, absl::Status>> abandoned_;   // connections to be ended
  bool accepting_ = true;
  bool stopping_ = false;
  Counts counts_;
};

}  // namespace moed

#endif  // MOED_SERVER_SESSIONS_H_
