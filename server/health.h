// grpc.health.v1: readiness that is NOT_SERVING from the first moment on. (gRPC's own service starts as SERVING.)
//
// Threads: all methods may be called from any thread. One status holds for every name, since a server opens and closes as a
// whole. Watches see the current status at once, then every change that they are not too slow for, and end with EndWatches.
// Decisions about a watch are made with the lock held and carried out without it: gRPC may call back into the watch.
#ifndef MOED_SERVER_HEALTH_H_
#define MOED_SERVER_HEALTH_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"

namespace moed {

class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  // Knows `names`; every other name is NOT_FOUND (Check) or SERVICE_UNKNOWN (Watch).
  explicit HealthService(const std::vector<std::string>& names);

  // Calls `announce` and, when it succeeded, becomes SERVING. Checks wait meanwhile: whoever saw the announcement is told
  // SERVING, and nobody is before it. `announce` must be quick.
  absl::Status ServeAfter(const std::function<absl::Status()>& announce);
  void StopServing();
  // Knows `names` from now on: watches of names that are gone see SERVICE_UNKNOWN, of those that are new the status.
  void SetNames(const std::vector<std::string>& names);
  // Ends all watches, also later ones, with UNAVAILABLE: they would hold up the listener's shutdown.
  void EndWatches();

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context, const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  class Watcher;
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  // Runs what each watcher should do next. Must be called without the lock.
  void UpdateWatchers();

  std::mutex mutex_;
  std::set<std::string> names_;                                         // guarded by mutex_
  Status status_ = grpc::health::v1::HealthCheckResponse::NOT_SERVING;  // guarded by mutex_
  bool ended_ = false;                                                  // guarded by mutex_
  std::set<Watcher*> watchers_;                                         // guarded by mutex_
};

}  // namespace moed

#endif  // MOED_SERVER_HEALTH_H_
