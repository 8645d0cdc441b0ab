// Status, Explain and SelfCheck; Forward is in service_forward.cc.
#include "server/service.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace moed {

namespace v1 = moe::v1;

namespace {

void FillQueue(const WorkQueue::Counters& counters, v1::QueueStatus* out) {
  out->set_waiting(counters.waiting);
  out->set_waiting_rows(counters.waiting_rows);
  out->set_accepted(counters.accepted);
  out->set_refused(counters.refused);
  out->set_expired(counters.expired);
  out->set_cancelled(counters.cancelled);
  out->set_finished(counters.finished);
  out->set_runs(counters.runs);
  out->set_rows(counters.rows);
  out->set_merged(counters.merged);
}

}  // namespace

std::chrono::steady_clock::time_point RequestDeadline(const v1::ForwardRequest& request,
                                                      std::chrono::steady_clock::time_point started) {
  constexpr uint64_t kDay = 86'400'000'000;  // out of reach of any call, and of any overflow
  if (request.timeout_us() == 0 || request.timeout_us() > kDay) return std::chrono::steady_clock::time_point::max();
  return started + std::chrono::microseconds(request.timeout_us());
}

MoeService::MoeService(Engine* engine, WorkQueue* queue, ForwardRunner* runner, CopyHelpers* helpers)
    : engine_(engine), queue_(queue), runner_(runner), helpers_(helpers), uses_gpu_(engine->UsesGpu()),
      runs_here_(!uses_gpu_ && !engine->Host().pinned) {
  RefreshModels();
}

void MoeService::RefreshModels() {
  auto table = std::make_shared<ModelTable>(engine_->Status());
  if (observer_ != nullptr) table->Observe(observer_);
  std::lock_guard<std::mutex> lock(models_mutex_);
  models_ = std::move(table);
}

std::shared_ptr<const ModelTable> MoeService::Models() const {
  std::lock_guard<std::mutex> lock(models_mutex_);
  return models_;
}

absl::Status MoeService::Admit(Kind kind) const {
  if (kind == Kind::kReports) return absl::OkStatus();
  switch (phase_.load()) {
    case Phase::kLoading: return absl::UnavailableError("the server is loading its models");
    case Phase::kServing: return absl::OkStatus();
    case Phase::kDraining: return absl::UnavailableError("the server is draining");
  }
  return absl::InternalError("a phase that is not handled");
}

grpc::ServerUnaryReactor* MoeService::Hello(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) {
  return Handle<v1::HelloRequest>("Hello", Kind::kReports, context, request, [&](Call* call, const auto& parsed) {
    v1::HelloResponse answer;
    absl::Status status = AnswerHello(*parsed, &answer);
    if (!status.ok()) return status;
    *response = Serialised(answer);
    call->Done(status);
    return status;
  });
}

absl::Status MoeService::AnswerHello(const v1::HelloRequest& request, v1::HelloResponse* response) const {
  if (absl::Status status = FillHello(request, engine_->Status(), response); !status.ok()) return status;
  if (sessions_ == nullptr) return absl::OkStatus();
  v1::SharedMemoryHello* const shared = response->mutable_shared_memory();
  shared->set_socket(sessions_->path());
  shared->set_version(ring::kVersion);
  shared->set_server_id(sessions_->server_id().data(), sessions_->server_id().size());
  shared->set_max_bytes(sessions_->max_bytes());
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* MoeService::Status(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) {
  return Handle<v1::StatusRequest>("Status", Kind::kReports, context, request, [&](Call* call, const auto& parsed) {
    v1::StatusResponse answer;
    absl::Status status = AnswerStatus(*parsed, &answer);
    if (!status.ok()) return status;
    *response = Serialised(answer);
    call->Done(status);
    return status;
  });
}

absl::Status MoeService::AnswerStatus(const v1::StatusRequest& request, v1::StatusResponse* response) const {
  if (absl::Status known = CheckKnownFields(request); !known.ok()) return known;
  const Phase phase = phase_.load();
  FillQueue(queue_->counters(), response->mutable_queue());
  if (request.model().empty()) return FillStatus(engine_->Status(), engine_->Host(), phase, response), absl::OkStatus();
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<const ModelFacts*> model = models->Find(request.model());
  if (!model.ok()) return model.status();
  absl::StatusOr<ModelStatus> status = engine_->FindModel((*model)->name);
  if (!status.ok()) return status.status();
  FillStatus({*std::move(status)}, engine_->Host(), phase, response);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* MoeService::Explain(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) {
  return Handle<v1::ExplainRequest>("Explain", Kind::kReports, context, request, [&](Call* call, const auto& parsed) {
    v1::ExplainResponse answer;
    absl::Status status = AnswerExplain(*parsed, &answer);
    if (!status.ok()) return status;
    *response = Serialised(answer);
    call->Done(status);
    return status;
  });
}

absl::Status MoeService::AnswerExplain(const v1::ExplainRequest& request, v1::ExplainResponse* response) const {
  if (absl::Status known = CheckKnownFields(request); !known.ok()) return known;
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<const ModelFacts*> model = models->Find(request.model());
  if (!model.ok()) return model.status();
  if (request.has_layer()) {
    if (absl::Status status = CheckLayer(**model, request.layer()); !status.ok()) return status;
  }
  absl::StatusOr<ExplainReport> report = engine_->Explain((*model)->name);
  if (!report.ok()) return report.status();
  FillExplain(*report, request.has_layer() ? request.layer() : -1, response);
  return absl::OkStatus();
}

// A self-check takes one turn of the queue per layer, so that forwards of others run in between.
struct MoeService::SelfCheckJob {
  Call* call;
  std::string model;
  std::vector<int> layers;
  int64_t tokens;
  uint64_t seed;
  grpc::ByteBuffer* response;
  v1::SelfCheckResponse answer;
  size_t next = 0;
};

grpc::ServerUnaryReactor* MoeService::SelfCheck(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) {
  return Handle<v1::SelfCheckRequest>("SelfCheck", Kind::kComputes, context, request, [&](Call* call, const auto& parsed) {
    return StartSelfCheck(call, *parsed, response);
  });
}

absl::Status MoeService::StartSelfCheck(Call* call, const v1::SelfCheckRequest& request, grpc::ByteBuffer* response) {
  if (absl::Status known = CheckKnownFields(request); !known.ok()) return known;
  const std::shared_ptr<const ModelTable> models = Models();
  absl::StatusOr<const ModelFacts*> model = models->Find(request.model());
  if (!model.ok()) return model.status();
  absl::StatusOr<int64_t> tokens = SelfCheckTokens(request);
  if (!tokens.ok()) return tokens.status();
  std::vector<int> layers = (*model)->layers;
  if (request.has_layer()) {
    if (absl::Status status = CheckLayer(**model, request.layer()); !status.ok()) return status;
    layers = {request.layer()};
  }
  if (absl::Status status = call->TakeRows(*tokens); !status.ok()) return status;
  auto job = std::make_shared<SelfCheckJob>(
      SelfCheckJob{call, (*model)->name, std::move(layers), *tokens, request.seed(), response, {}});
  const int64_t steps = static_cast<int64_t>(job->layers.size());
  return call->Queue(queue_, "self-check", steps, [this, job] {
    absl::StatusOr<std::vector<SelfCheckRow>> rows =
        engine_->SelfCheck(job->model, job->layers[job->next], job->tokens, job->seed);
    if (!rows.ok()) return job->call->Done(rows.status()), true;
    AddSelfCheckRows(*rows, &job->answer);
    if (++job->next < job->layers.size()) return false;
    *job->response = Serialised(job->answer);
    job->call->Done(absl::OkStatus());
    return true;
  });
}

}  // namespace moed
