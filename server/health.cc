#include "server/health.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One watch. Its fields are guarded by the service's mutex. Whoever got an action from Next must Act on it: until then the
// watch cannot end, so it lives.
class HealthService::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  enum class Action { kNothing, kWrite, kFinish };

  Watcher(HealthService* service, std::string name) : service_(service), name_(std::move(name)) {}

  // What to do now; at most one write is under way, and nothing follows a finish. Needs the lock.
  Action Next() {
    if (writing_ || finished_) return Action::kNothing;
    if (ending_ || service_->ended_) {
      finished_ = true;
      return Action::kFinish;
    }
    const Status wanted = service_->names_.count(name_) != 0 ? service_->status_ : HealthCheckResponse::SERVICE_UNKNOWN;
    if (wanted == sent_) return Action::kNothing;
    sent_ = wanted;
    writing_ = true;
    response_.set_status(wanted);
    return Action::kWrite;
  }

  // Without the lock.
  void Act(Action action) {
    if (action == Action::kWrite) StartWrite(&response_);
    if (action == Action::kFinish) Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
  }

 private:
  void OnWriteDone(bool ok) override { Continue(true, !ok); }
  void OnCancel() override { Continue(false, true); }
  void OnDone() override {
    {
      std::lock_guard<std::mutex> lock(service_->mutex_);
      service_->watchers_.erase(this);
    }
    delete this;
  }

  void Continue(bool written, bool ending) {
    Action action;
    {
      std::lock_guard<std::mutex> lock(service_->mutex_);
      if (written) writing_ = false;
      ending_ = ending_ || ending;
      action = Next();
    }
    Act(action);
  }

  HealthService* const service_;
  const std::string name_;
  HealthCheckResponse response_;  // belongs to gRPC while writing_
  Status sent_ = HealthCheckResponse::UNKNOWN;
  bool writing_ = false;
  bool ending_ = false;
  bool finished_ = false;
};

HealthService::HealthService(const std::vector<std::string>& names) : names_(names.begin(), names.end()) {}

absl::Status HealthService::ServeAfter(const std::function<absl::Status()>& announce) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status status = announce(); !status.ok()) return status;
    status_ = HealthCheckResponse::SERVING;
  }
  UpdateWatchers();
  return absl::OkStatus();
}

void HealthService::StopServing() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = HealthCheckResponse::NOT_SERVING;
  }
  UpdateWatchers();
}

void HealthService::SetNames(const std::vector<std::string>& names) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    names_ = {names.begin(), names.end()};
  }
  UpdateWatchers();
}

void HealthService::EndWatches() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  UpdateWatchers();
}

void HealthService::UpdateWatchers() {
  std::vector<std::pair<Watcher*, Watcher::Action>> actions;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Watcher* watcher : watchers_) {
      const Watcher::Action action = watcher->Next();
      if (action != Watcher::Action::kNothing) actions.emplace_back(watcher, action);
    }
  }
  for (const auto& [watcher, action] : actions) watcher->Act(action);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context, const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  bool known;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    known = names_.count(request->service()) != 0;
    response->set_status(status_);
  }
  if (!known) {
    reactor->Finish(grpc::Status(
        grpc::StatusCode::NOT_FOUND,
        absl::StrCat("service: wanted \"\", MODEL or MODEL/LAYER, got '", request->service().substr(0, 128), "'")));
    return reactor;
  }
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(grpc::CallbackServerContext* context,
                                                                    const HealthCheckRequest* request) {
  auto* watcher = new Watcher(this, request->service());
  Watcher::Action action;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watchers_.insert(watcher);
    action = watcher->Next();
  }
  watcher->Act(action);
  return watcher;
}

}  // namespace moed
