// What each client may have in flight: rows to compute, and bytes of requests.
//
// Threads: any. A client is a name; which calls share one is the caller's matter (see client_gate.h). What a call takes is given
// back when its share goes away, and a client without calls costs nothing.
#ifndef MOED_SERVER_CLIENT_LIMITS_H_
#define MOED_SERVER_CLIENT_LIMITS_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"

namespace moed {

class ClientLimits;

// What one call has taken. Empty when moved from or made so; then it takes nothing and every request for more is granted.
class ClientShare {
 public:
  ClientShare() = default;
  ClientShare(ClientLimits* limits, std::string client) : limits_(limits), client_(std::move(client)) {}
  ClientShare(ClientShare&& other) noexcept;
  ClientShare& operator=(ClientShare&& other) noexcept;
  ~ClientShare() { GiveBack(); }

  // Takes more, or nothing: RESOURCE_EXHAUSTED with the limit, what is in flight and what was asked for.
  absl::Status TakeBytes(int64_t bytes);
  absl::Status TakeRows(int64_t rows);

 private:
  void GiveBack();

  ClientLimits* limits_ = nullptr;
  std::string client_;
  int64_t rows_ = 0, bytes_ = 0;
};

class ClientLimits {
 public:
  // 0: no limit.
  ClientLimits(int64_t rows, int64_t bytes) : max_rows_(rows), max_bytes_(bytes) {}
  ClientLimits(const ClientLimits&) = delete;
  ClientLimits& operator=(const ClientLimits&) = delete;

  bool any() const { return max_rows_ > 0 || max_bytes_ > 0; }
  // Of clients that have something in flight.
  size_t clients() const;

 private:
  friend class ClientShare;
  struct InFlight {
    int64_t rows = 0, bytes = 0;
  };

  absl::Status Take(const std::string& client, int64_t InFlight::*what, int64_t amount);
  void Give(const std::string& client, int64_t rows, int64_t bytes);

  const int64_t max_rows_, max_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, InFlight> in_flight_;  // guarded by mutex_
};

}  // namespace moed

#endif  // MOED_SERVER_CLIENT_LIMITS_H_
