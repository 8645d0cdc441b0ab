// The listening server: gRPC listeners, health, the queue, and the way from loading over serving to drained.
//
// Threads: Open and Drain may be called from any thread, Drain once. While the server listens and is not open, health is
// NOT_SERVING for every name and calls that compute get UNAVAILABLE. Where a layer is on a GPU, a thread asks the device for its
// health several times a second: when it failed, health is NOT_SERVING for every name and stays so, calls of its layers get
// UNAVAILABLE (see Engine::Forward), and a drain goes as ever.
#ifndef MOED_SERVER_SERVER_H_
#define MOED_SERVER_SERVER_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "server/admin_service.h"
#include "server/client_gate.h"
#include "server/copy_helpers.h"
#include "server/forward_runner.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/metrics_listener.h"
#include "server/options.h"
#include "server/recorder.h"
#include "server/run_watch.h"
#include "server/service.h"
#include "server/sessions.h"
#include "server/tls.h"
#include "server/work_queue.h"

namespace moed {

class Server {
 public:
  // Binds every address of `options`; health names are "", MODEL and MODEL/L of the engine's models. Errors name the
  // address and the reason. `engine` must outlive the server and have all models planned.
  static absl::StatusOr<std::unique_ptr<Server>> Listen(const ServeOptions& options, Engine* engine);
  // Drains if that has not happened.
  ~Server();

  // Lets calls in, calls `announce`, and reports SERVING, which no client sees before the announcement. Once Drain began it
  // does nothing and returns OK. An error of `announce` is returned and health stays NOT_SERVING; so is UNAVAILABLE when the device
  // failed already.
  absl::Status Open(const std::function<absl::Status()>& announce);

  // Health is NOT_SERVING and new calls get UNAVAILABLE at once; then accepted calls finish and are answered, and the
  // listeners close. True when all is done. False when that takes longer than `grace`: the calls that are left have been
  // cancelled, but what computes cannot be interrupted, so the process must end without destroying this object or the engine.
  bool Drain(std::chrono::milliseconds grace = std::chrono::milliseconds::max());

  // As bound, in the order of the options.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Empty without --health-listen.
  const std::string& health_address() const { return health_address_; }
  // Empty without --admin-listen.
  const std::string& admin_address() const { return admin_address_; }
  // Empty without --metrics-listen.
  std::string metrics_address() const { return metrics_listener_ == nullptr ? "" : metrics_listener_->address(); }
  // Where clients of this host share memory; empty: nowhere.
  std::string session_socket() const { return sessions_ == nullptr ? "" : sessions_->path(); }
  WorkQueue::Counters counters() const { return queue_.counters(); }

 private:
  Server(const ServeOptions& options, Engine* engine);
  absl::Status OpenFiles(const ServeOptions& options);
  absl::Status OpenRecorder(const ServeOptions& options);
  absl::Status Bind(const ServeOptions& options);
  absl::Status BindBeside(const ServeOptions& options);
  absl::Status ListenForSessions(const ServeOptions& options);
  void ModelsChanged();
  std::vector<grpc::Server*> Listeners() const;
  void CountCalls(const ServeOptions& options);
  absl::Status ListenForMetrics(const ServeOptions& options);
  ServerState State(uint64_t device_bytes_at_start);
  void StartDeviceWatch();
  void WatchRuns(int limit_s);
  void RunsHang(const std::string& what);
  void FinishCalls();
  void CancelCalls();

  std::shared_ptr<Recorder> recorder_;  // null: nothing is recorded; outlives whoever has calls
  const WorkQueue::Limits limits_;
  WorkQueue queue_;
  ForwardRunner runner_;
  CopyHelpers helpers_;
  std::unique_ptr<ClientGate> gate_;
  std::shared_ptr<Metrics> metrics_;  // null: nobody counts
  std::unique_ptr<TlsFiles> tls_;  // null without TLS; outlives the listeners
  MoeService service_;
  AdminService admin_;
  Engine* const engine_;
  HealthService main_health_;
  HealthService probe_health_;  // on the health listener
  std::vector<std::string> addresses_;
  std::string health_address_, admin_address_;
  std::mutex phase_mutex_;  // guards the next three and orders changes of health
  bool draining_ = false;
  bool run_hangs_ = false;
  absl::Status device_failure_;
  std::condition_variable stop_watch_;  // with phase_mutex_
  std::thread device_watch_;            // not joinable where no layer is on a GPU
  std::unique_ptr<RunWatch> run_watch_;  // null without --run-limit
  grpc::CallbackGenericService nothing_;  // what the health listener offers beside health
  std::unique_ptr<grpc::Server> main_listener_;
  std::unique_ptr<grpc::Server> health_listener_, admin_listener_;  // null: none
  std::unique_ptr<Sessions> sessions_;  // null: none are offered
  std::unique_ptr<MetricsListener> metrics_listener_;  // looks at all others, so it goes first
};

}  // namespace moed

#endif  // MOED_SERVER_SERVER_H_
