// The admin plane of moe.v1: models loaded, swapped, unloaded and rolled back while others are served.
//
// Threads: handlers run on gRPC's callback threads and only check; one thread of the service carries out one change after the other.
// A change ends early when its caller goes away, or a drain begins: the same weights are served as before then. What was changed is
// reported to `changed` before the caller is answered.
#ifndef MOED_SERVER_ADMIN_SERVICE_H_
#define MOED_SERVER_ADMIN_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "server/call.h"

namespace moed {

using AdminServiceBase = moe::v1::Admin::WithRawCallbackMethod_LoadModel<
    moe::v1::Admin::WithRawCallbackMethod_SwapModel<moe::v1::Admin::WithRawCallbackMethod_UnloadModel<
        moe::v1::Admin::WithRawCallbackMethod_RollbackModel<moe::v1::Admin::Service>>>>;

class AdminService final : public AdminServiceBase {
 public:
  // `engine` must outlive the service. `changed` is called after each change, before its answer.
  AdminService(Engine* engine, std::function<void()> changed);
  ~AdminService() override;

  // Who may call; must outlive the service. Before the first call, or never: then everybody may.
  void SetGate(ClientGate* gate) { gate_ = gate; }
  // Lets changes begin; before, they get UNAVAILABLE.
  void Open() { open_for_changes_.store(true); }
  // Refuses changes from now on, and ends the one that is under way as soon as it can. Waits for it.
  void Stop();
  bool WaitForAnswers(std::chrono::milliseconds limit) { return open_calls_.WaitForNone(limit); }

  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SwapModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RollbackModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;

 private:
  // A change that is under way: what it is, in words, how it is made, and who is told.
  struct Change {
    std::string what;
    std::function<absl::Status(const Engine::GoOn&)> make;
    Call* call = nullptr;
    grpc::ByteBuffer* response = nullptr;
  };

  // Checks the call and its bytes, and lets `plan(request)` fill the change or refuse it.
  template <typename Request, typename Plan>
  grpc::ServerUnaryReactor* Handle(const char* method, grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* response, const Plan& plan);
  absl::Status Begin(std::unique_ptr<Change> change);
  void ThreadMain();
  void Make(Change* change);
  absl::Status GoOn(const Change& change, const LoadProgress& progress) const;

  Engine* const engine_;
  const std::function<void()> changed_;
  ClientGate* gate_ = nullptr;
  OpenCalls open_calls_;
  std::atomic<bool> open_for_changes_{false}, stopping_{false};
  std::mutex mutex_;  // guards the next two
  std::unique_ptr<Change> next_;
  std::string under_way_;  // what; empty: nothing
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace moed

#endif  // MOED_SERVER_ADMIN_SERVICE_H_
