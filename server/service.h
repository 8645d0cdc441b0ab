// The moe.v1 service: thin handlers between wire and engine.
//
// Threads: handlers run on gRPC's callback threads and never compute or block there: Forward and SelfCheck check their
// request, go through the queue to the one compute thread and are answered from it; Status and Explain are answered at
// once, whatever waits. Health and reflection are gRPC's own.
// Lifecycle: a service starts closed (UNAVAILABLE: loading), is opened once everything is ready, and is closed for good by
// a drain (UNAVAILABLE: draining) while accepted calls finish. Status and Explain always answer.
#ifndef MOED_SERVER_SERVICE_H_
#define MOED_SERVER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "server/call.h"
#include "server/wire.h"
#include "server/work_queue.h"

namespace moed {

// Forward arrives as bytes: with a generated handler a malformed message would be answered UNIMPLEMENTED by gRPC itself.
using MoeServiceBase = moe::v1::Moe::WithRawCallbackMethod_Forward<moe::v1::Moe::WithCallbackMethod_Status<
    moe::v1::Moe::WithCallbackMethod_Explain<moe::v1::Moe::WithCallbackMethod_SelfCheck<moe::v1::Moe::Service>>>>;

class MoeService final : public MoeServiceBase {
 public:
  enum class Phase { kLoading, kServing, kDraining };

  // Both must outlive the service; every model must be planned.
  MoeService(Engine* engine, WorkQueue* queue);

  void SetPhase(Phase phase) { phase_.store(phase); }

  // Waits until every call was answered; false when `limit` passed first.
  bool WaitForAnswers(std::chrono::milliseconds limit) { return open_.WaitForNone(limit); }

  // Waits until no call came for `quiet`; false when `limit` passed first.
  bool WaitForQuiet(std::chrono::milliseconds quiet, std::chrono::milliseconds limit) { return open_.WaitForQuiet(quiet, limit); }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const moe::v1::StatusRequest* request,
                                   moe::v1::StatusResponse* response) override;
  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context, const moe::v1::ExplainRequest* request,
                                    moe::v1::ExplainResponse* response) override;
  grpc::ServerUnaryReactor* SelfCheck(grpc::CallbackServerContext* context, const moe::v1::SelfCheckRequest* request,
                                      moe::v1::SelfCheckResponse* response) override;

 private:
  struct ForwardJob;
  struct SelfCheckJob;

  // What every handler goes through: makes the call, refuses it when its deadline passed or (kComputes) the service is
  // not open, and lets `body(call)` answer or queue it. An error of `body` becomes the answer.
  enum class Kind { kReports, kComputes };
  template <typename Body>
  grpc::ServerUnaryReactor* Handle(const char* method, Kind kind, grpc::CallbackServerContext* context, const Body& body);
  absl::Status Admit(Kind kind) const;

  absl::Status StartForward(Call* call, grpc::ByteBuffer* request, grpc::ByteBuffer* response);
  absl::Status RunForward(ForwardJob* job, WorkQueue::Duration waited);
  absl::Status StartSelfCheck(Call* call, const moe::v1::SelfCheckRequest& request, moe::v1::SelfCheckResponse* response);
  absl::Status AnswerStatus(const moe::v1::StatusRequest& request, moe::v1::StatusResponse* response) const;
  absl::Status AnswerExplain(const moe::v1::ExplainRequest& request, moe::v1::ExplainResponse* response) const;

  Engine* const engine_;
  WorkQueue* const queue_;
  const ModelTable models_;
  std::atomic<Phase> phase_{Phase::kLoading};
  OpenCalls open_;
};

template <typename Body>
grpc::ServerUnaryReactor* MoeService::Handle(const char* method, Kind kind, grpc::CallbackServerContext* context,
                                             const Body& body) {
  Call* call = new Call(method, context, &open_);
  absl::Status status = Admit(kind);
  if (status.ok()) status = call->CheckDeadline();
  if (status.ok()) status = body(call);
  if (!status.ok()) call->Done(status);
  return call;
}

}  // namespace moed

#endif  // MOED_SERVER_SERVICE_H_
