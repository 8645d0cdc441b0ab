// What a server tells of its health, by grpc.health.v1.
#ifndef MOED_TESTS_CUDA_HEALTH_WATCH_H_
#define MOED_TESTS_CUDA_HEALTH_WATCH_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "proto/grpc/health/v1/health.grpc.pb.h"

namespace moed::testing {

// "", MODEL, and MODEL/L of the layers.
std::vector<std::string> HealthNamesOf(const std::string& model, std::span<const int> layers);

// By Check; UNKNOWN when that fails.
grpc::health::v1::HealthCheckResponse::ServingStatus HealthOf(const std::string& address, const std::string& name);

// A Watch, read on a thread of its own until the server ends it, or until the object goes.
class HealthWatch {
 public:
  struct Change {
    grpc::health::v1::HealthCheckResponse::ServingStatus status;
    std::chrono::steady_clock::time_point when;
  };

  HealthWatch(const std::string& address, const std::string& name);
  ~HealthWatch();
  HealthWatch(const HealthWatch&) = delete;
  HealthWatch& operator=(const HealthWatch&) = delete;

  // All that came so far.
  std::vector<Change> changes() const;
  // Waits for the server to end the watch; how it did. Call once.
  grpc::Status Finish();

 private:
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
  mutable std::mutex mutex_;
  std::vector<Change> changes_;  // guarded by mutex_
  grpc::Status end_;             // written by the thread, read after its end
  std::thread reader_;           // last: uses all others
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_HEALTH_WATCH_H_
