#include "server/admin_service.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model_name.h"
#include "server/request.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using std::chrono::steady_clock;

absl::Status CheckPath(const std::string& path) {
  if (!path.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("path: wanted the folder of a checkpoint on the server's machine, got ''");
}

double SecondsSince(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

}  // namespace

AdminService::AdminService(Engine* engine, std::function<void()> changed) : engine_(engine), changed_(std::move(changed)) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "admin");  // as `top -H` shows it
    ThreadMain();
  });
}

AdminService::~AdminService() { Stop(); }

void AdminService::Stop() {
  stopping_.store(true);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

template <typename Request, typename Plan>
grpc::ServerUnaryReactor* AdminService::Handle(const char* method, grpc::CallbackServerContext* context,
                                               const grpc::ByteBuffer* bytes, grpc::ByteBuffer* response, const Plan& plan) {
  Call* call = new Call(method, context, &open_calls_);
  absl::Status status = call->Enter(gate_, Plane::kAdmin);
  try {
    if (status.ok() && stopping_.load()) status = absl::UnavailableError("the server is draining");
    if (status.ok() && !open_for_changes_.load()) status = absl::UnavailableError("the server is loading its models");
    if (status.ok()) status = call->CheckDeadline();
    Request request;
    if (status.ok()) status = ParseRequest(const_cast<grpc::ByteBuffer*>(bytes), &request);
    if (status.ok()) status = CheckKnownFields(request);
    auto change = std::make_unique<Change>();
    change->call = call, change->response = response;
    if (status.ok()) status = plan(request, change.get());
    if (status.ok()) status = Begin(std::move(change));
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (!status.ok()) call->Done(status);
  return call;
}

absl::Status AdminService::Begin(std::unique_ptr<Change> change) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!under_way_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("one change at a time: under way is '", under_way_, "'"));
  }
  under_way_ = change->what;
  next_ = std::move(change);
  wake_.notify_all();
  return absl::OkStatus();
}

void AdminService::ThreadMain() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_.load() || next_ != nullptr; });
    std::unique_ptr<Change> change = std::move(next_);
    if (change == nullptr) return;
    lock.unlock();
    Make(change.get());
    change.reset();
    lock.lock();
  }
}

// After each layer: whether the change should go on.
absl::Status AdminService::GoOn(const Change& change, const LoadProgress& progress) const {
  spdlog::info("{}: layer {} loaded, {} of {}", change.what, progress.layer, progress.done, progress.total);
  if (stopping_.load()) return absl::UnavailableError("the server is draining");
  if (change.call->Gone()) return absl::CancelledError("the caller went away");
  return absl::OkStatus();
}

void AdminService::Make(Change* change) {
  const auto begin = steady_clock::now();
  spdlog::info("{}: begins", change->what);
  absl::Status status = stopping_.load() ? absl::UnavailableError("the server is draining")
                                         : change->make([&](const LoadProgress& progress) { return GoOn(*change, progress); });
  if (status.ok()) {
    spdlog::info("{}: done in {:.1f} s", change->what, SecondsSince(begin));
    changed_();
    v1::StatusResponse answer;
    FillStatus(engine_->Status(), engine_->Host(), Phase::kServing, &answer);
    *change->response = Serialised(answer);
  } else {
    spdlog::error("{}: failed after {:.1f} s: {}", change->what, SecondsSince(begin), status.ToString());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    under_way_.clear();  // before the answer: whoever has it may begin the next change at once
  }
  change->call->Done(status);
}

grpc::ServerUnaryReactor* AdminService::LoadModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Handle<v1::LoadModelRequest>("LoadModel", context, request, response, [this](const auto& parsed, Change* change) {
    if (absl::Status status = CheckModelName(parsed.model()); !status.ok()) return status;
    if (absl::Status status = CheckPath(parsed.path()); !status.ok()) return status;
    change->what = absl::StrCat("load ", parsed.model(), " from ", parsed.path());
    change->make = [this, name = parsed.model(), path = parsed.path()](const Engine::GoOn& go_on) {
      return engine_->Add(name, path, go_on);
    };
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SwapModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Handle<v1::SwapModelRequest>("SwapModel", context, request, response, [this](const auto& parsed, Change* change) {
    if (absl::Status status = CheckPath(parsed.path()); !status.ok()) return status;
    change->what = absl::StrCat("swap ", parsed.model(), " to ", parsed.path());
    change->make = [this, name = parsed.model(), path = parsed.path(), keep = parsed.keep_previous()](const Engine::GoOn& go_on) {
      return engine_->Swap(name, path, keep, go_on);
    };
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::UnloadModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  return Handle<v1::UnloadModelRequest>("UnloadModel", context, request, response, [this](const auto& parsed, Change* change) {
    if (absl::Status status = CheckModelName(parsed.model()); !status.ok()) return status;  // never a guess
    change->what = absl::StrCat("unload ", parsed.model());
    change->make = [this, name = parsed.model()](const Engine::GoOn&) { return engine_->Remove(name); };
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::RollbackModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return Handle<v1::RollbackModelRequest>("RollbackModel", context, request, response, [this](const auto& parsed, Change* change) {
    change->what = absl::StrCat("rollback ", parsed.model());
    change->make = [this, name = parsed.model()](const Engine::GoOn& go_on) { return engine_->Rollback(name, go_on); };
    return absl::OkStatus();
  });
}

}  // namespace moed
