#include "tests/cuda/health_watch.h"

namespace moed::testing {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

std::vector<std::string> HealthNamesOf(const std::string& model, std::span<const int> layers) {
  std::vector<std::string> names = {"", model};
  for (const int layer : layers) names.push_back(model + "/" + std::to_string(layer));
  return names;
}

HealthCheckResponse::ServingStatus HealthOf(const std::string& address, const std::string& name) {
  const auto stub = Health::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  HealthCheckRequest request;
  request.set_service(name);
  HealthCheckResponse response;
  return stub->Check(&context, request, &response).ok() ? response.status() : HealthCheckResponse::UNKNOWN;
}

HealthWatch::HealthWatch(const std::string& address, const std::string& name)
    : stub_(Health::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {
  HealthCheckRequest request;
  request.set_service(name);
  reader_ = std::thread([this, request] {
    const auto stream = stub_->Watch(&context_, request);
    HealthCheckResponse response;
    while (stream->Read(&response)) {
      std::lock_guard<std::mutex> lock(mutex_);
      changes_.push_back({response.status(), std::chrono::steady_clock::now()});
    }
    end_ = stream->Finish();
  });
}

HealthWatch::~HealthWatch() {
  if (!reader_.joinable()) return;
  context_.TryCancel();
  reader_.join();
}

std::vector<HealthWatch::Change> HealthWatch::changes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return changes_;
}

grpc::Status HealthWatch::Finish() {
  reader_.join();
  return end_;
}

}  // namespace moed::testing
