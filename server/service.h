// The moe.v1 service: thin handlers between wire and engine.
//
// Threads: handlers run on gRPC's callback threads and never compute or block there: Forward and SelfCheck check their
// request, go through the queue to a compute thread and are answered from it; Status and Explain are answered at
// once, whatever waits.
// Lifecycle: a service starts closed (UNAVAILABLE: loading), is opened once everything is ready, and is closed for good by
// a drain (UNAVAILABLE: draining) while accepted calls finish. Status and Explain always answer.
#ifndef MOED_SERVER_SERVICE_H_
#define MOED_SERVER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "server/call.h"
#include "server/call_observer.h"
#include "server/copy_helpers.h"
#include "server/forward_runner.h"
#include "server/forward_stream.h"
#include "server/message_forward.h"
#include "server/received_forward.h"
#include "server/recorder.h"
#include "server/request.h"
#include "server/retry_info.h"
#include "server/ring_server.h"
#include "server/sessions.h"
#include "server/wire.h"
#include "server/work_queue.h"

namespace moed {

// Every request arrives as bytes: see request.h.
using MoeServiceBase = moe::v1::Moe::WithRawCallbackMethod_Hello<
    moe::v1::Moe::WithRawCallbackMethod_Forward<moe::v1::Moe::WithRawCallbackMethod_ForwardStream<
        moe::v1::Moe::WithRawCallbackMethod_Status<moe::v1::Moe::WithRawCallbackMethod_Explain<
            moe::v1::Moe::WithRawCallbackMethod_SelfCheck<moe::v1::Moe::Service>>>>>>;

// Bytes of requests that may be in flight: some of the largest, thousands of usual ones.
inline constexpr size_t kMaxBytesInFlight = size_t{1} << 30;

// When a request itself says that it is over: its timeout_us from `started` on; TimePoint::max() without one.
std::chrono::steady_clock::time_point RequestDeadline(const moe::v1::ForwardRequest& request,
                                                      std::chrono::steady_clock::time_point started);

class MoeService final : public MoeServiceBase {
 public:
  // All must outlive the service; every model must be planned. `runner` works on `engine` and `queue`.
  MoeService(Engine* engine, WorkQueue* queue, ForwardRunner* runner, CopyHelpers* helpers);

  // Who may call; must outlive the service. Before the first call, or never: then everybody may.
  void SetGate(ClientGate* gate) { gate_ = gate; }

  void SetPhase(Phase phase) { phase_.store(phase); }
  Phase phase() const { return phase_.load(); }

  // Who is told how forwards ended; must outlive the service. Before the first call.
  void SetObserver(CallObserver* observer) { observer_ = observer, RefreshModels(); }
  // What records some of the calls; must outlive the service. Before the first call, or never.
  void SetRecorder(Recorder* recorder) { recorder_ = recorder; }
  // Of requests that are received and not yet answered.
  size_t bytes_in_flight() const { return budget_.used(); }

  // To be called when the engine's models have changed: requests are checked against them as they are now.
  void RefreshModels();

  // Waits until every call was answered; false when `limit` passed first.
  bool WaitForAnswers(std::chrono::milliseconds limit) { return open_.WaitForNone(limit); }

  // Waits until no call came for `quiet`; false when `limit` passed first.
  bool WaitForQuiet(std::chrono::milliseconds quiet, std::chrono::milliseconds limit) { return open_.WaitForQuiet(quiet, limit); }

  // Where clients of this host share memory; must outlive the service. Null: nowhere. Before the first call.
  void SetSessions(const Sessions* sessions) { sessions_ = sessions; }

  // Whether a client may open a session now: UNAVAILABLE before layers are ready and in a drain.
  absl::Status AdmitSession() const { return Admit(Kind::kComputes); }

  // Answers `call` of the bearer of `token` ("": none), at once when it is refused.
  void StartRingForward(std::shared_ptr<RingCall> call, const std::string& token);

  grpc::ServerUnaryReactor* Hello(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ForwardStream(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SelfCheck(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;

 private:
  class UnaryForward;
  class StreamForward;
  struct Item;
  struct RingForward;
  struct SelfCheckJob;

  // What every handler goes through: makes the call, refuses it when its caller may not call the data plane, its deadline passed,
  // the bytes in flight are too many (in all, or of its client) or (kComputes) the service is not open, parses the request, and
  // lets `body(call, request)` answer or queue it. An error of `body` becomes the answer, and so does a lack of memory.
  enum class Kind { kReports, kComputes };
  template <typename Request, typename Body>
  grpc::ServerUnaryReactor* Handle(const char* method, Kind kind, grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* bytes, const Body& body);
  absl::Status Admit(Kind kind) const;
  std::shared_ptr<const ModelTable> Models() const;

  absl::Status StartForward(Call* call, std::unique_ptr<ReceivedForward> request, grpc::ByteBuffer* response);
  absl::Status SubmitMessage(const std::shared_ptr<MessageForward>& caller, WorkQueue::Duration here = {});
  void BeginStreamForward(StreamReactor* stream, grpc::ByteBuffer* bytes);
  absl::Status SubmitStreamForward(StreamReactor* stream, grpc::ByteBuffer* bytes, const std::shared_ptr<Item>& item);
  void Sample(const ModelTable& models, const std::string& request_id, const ForwardRecord& record, CheckedForward* checked);
  absl::Status PlaceHidden(const std::shared_ptr<MessageForward>& caller, CheckedForward* checked);
  absl::Status MakeHidden(MessageForward* caller, CheckedForward* checked);
  absl::Status MakeHiddenOf(const void* came, CheckedForward* checked, std::optional<CallMemory>* hidden) const;
  void CopyHidden(const std::shared_ptr<MessageForward>& caller);
  absl::Status UseSession(MessageForward* caller, ForwardWork* work);
  absl::StatusOr<std::byte*> OpenSessionPlace(const std::string& field, const SessionPlace& place, size_t bytes,
                                              std::shared_ptr<Region>* held) const;
  absl::Status TakeRingForward(RingForward* caller, const std::string& token);
  absl::Status SubmitRingForward(const std::shared_ptr<RingForward>& caller, const std::string& token);
  int64_t RoutedSlots(const CheckedForward& checked) const;
  absl::Status AnswerHello(const moe::v1::HelloRequest& request, moe::v1::HelloResponse* response) const;
  absl::Status StartSelfCheck(Call* call, const moe::v1::SelfCheckRequest& request, grpc::ByteBuffer* response);
  absl::Status AnswerStatus(const moe::v1::StatusRequest& request, moe::v1::StatusResponse* response) const;
  absl::Status AnswerExplain(const moe::v1::ExplainRequest& request, moe::v1::ExplainResponse* response) const;

  Engine* const engine_;
  WorkQueue* const queue_;
  ForwardRunner* const runner_;
  CopyHelpers* const helpers_;
  mutable std::mutex models_mutex_;
  std::shared_ptr<const ModelTable> models_;  // guarded by models_mutex_; what it points to never changes
  const Sessions* sessions_ = nullptr;
  const bool uses_gpu_;  // then processors are free, and a thread may look out for a job or help to copy
  // Calls may be run by the threads that took them: not where computing has a processor of its own, nor for a GPU, where a
  // thread looks out for them and two calls of one client overlap.
  const bool runs_here_;
  ClientGate* gate_ = nullptr;
  CallObserver* observer_ = nullptr;
  Recorder* recorder_ = nullptr;
  std::atomic<Phase> phase_{Phase::kLoading};
  OpenCalls open_;
  ByteBudget budget_{kMaxBytesInFlight};
};

template <typename Request, typename Body>
grpc::ServerUnaryReactor* MoeService::Handle(const char* method, Kind kind, grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* bytes, const Body& body) {
  Call* call = new Call(method, context, &open_);
  if constexpr (std::is_same_v<Request, ReceivedForward>) call->record().Begin(observer_, Transport::kRpc, bytes->Length());
  absl::Status status = call->Enter(gate_, Plane::kData);
  try {
    if (status.ok()) status = Admit(kind);
    if (status.ok()) status = call->CheckDeadline();
    if (status.ok()) status = call->TakeBytes(bytes->Length());
    if (status.ok()) {
      status = call->Reserve(&budget_, bytes->Length());
      if (!status.ok()) status = WithRetryInfo(std::move(status), queue_->RetryDelay());
    }
    auto request = std::make_unique<Request>();
    if (status.ok() && kind == Kind::kComputes && uses_gpu_) {
      queue_->Expect();
      helpers_->Expect(CopyHelpers::For(bytes->Length()));
    }
    // gRPC made the buffer for this call alone and const only in the signature; taking it lets the transport's slices go as
    // soon as they are parsed, which halves the memory of a waiting call.
    if (status.ok()) status = ParseRequest(const_cast<grpc::ByteBuffer*>(bytes), request.get());
    if (status.ok()) status = body(call, std::move(request));
  } catch (const std::bad_alloc&) {  // nothing of a body throws after it answered or queued the call
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (!status.ok()) call->Done(status);
  return call;
}

}  // namespace moed

#endif  // MOED_SERVER_SERVICE_H_
