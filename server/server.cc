#include "server/server.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/address.h"

namespace moed {
namespace {

constexpr std::chrono::seconds kAnswerLimit(10);        // for slow readers to take their answers in a drain
// gRPC cancels a call that reaches it while it shuts down, before anybody could answer it. So the listeners stay open, and calls
// get UNAVAILABLE, until clients had the time to hear it: no new call for a while, or so many that waiting is no use.
constexpr std::chrono::milliseconds kQuiet(50);
constexpr std::chrono::milliseconds kQuietLimit(500);
constexpr std::chrono::milliseconds kStreamLimit(100);  // for streams, such as reflection, that do not end by themselves
constexpr std::chrono::milliseconds kCancelTime(100);   // for cancelled calls to leave the process
constexpr std::chrono::milliseconds kHealthInterval(200);  // between two looks at the device
constexpr std::chrono::microseconds kRingSpin(50), kRingLinger(300), kLinger(2000);
constexpr int kSpareProcessors = 8;  // from which threads that look out are in nobody's way
constexpr int kCallsOfConnection = 512;  // at least, under way at a time
constexpr int kMinPingIntervalMs = 5000;                // clients may keep idle connections alive by pings this often

// Chooses reflection and channelz explicitly: once their libraries are linked or initialised, every listener would get them.
class PluginOption : public grpc::ServerBuilderOption {
 public:
  PluginOption(bool reflection, bool channelz) : reflection_(reflection), channelz_(channelz) {}

  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    auto own = std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>();
    const std::string reflection = own->name();
    const auto unwanted = [&](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
      return plugin->name() == reflection || (plugin->name() == "channelz_service" && !channelz_);
    };
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(), unwanted), plugins->end());
    if (reflection_) plugins->push_back(std::move(own));
  }

 private:
  const bool reflection_, channelz_;
};

// `calls`: that one connection may have under way; its client holds back more, and one that does not loses the connection. What
// gRPC has taken waits in it, where no deadline and no limit of the queue is looked at, and each costs its memory: 60,000 calls a
// second of a few rows had the server do nothing but take them.
void Configure(bool reflection, bool channelz, int calls, grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<PluginOption>(reflection, channelz));
  builder->SetMaxReceiveMessageSize(static_cast<int>(kMaxMessageBytes));
  builder->SetMaxSendMessageSize(static_cast<int>(kMaxMessageBytes));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, calls);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two servers on one port must be an error
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
}

// How the addresses of one option are bound.
struct Binding {
  std::string option;
  std::vector<std::string> addresses;
  TlsFiles* tls;  // for HOST:PORT; null: clear text
  int unix_mode;
};

// Binds and starts; writes the addresses as bound.
absl::StatusOr<std::unique_ptr<grpc::Server>> BindAll(const Binding& binding, grpc::ServerBuilder* builder,
                                                      std::vector<std::string>* bound) {
  const auto& [option, addresses, tls, unix_mode] = binding;
  std::vector<int> ports(addresses.size(), 0);
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (absl::Status status = CheckNotTaken(option, addresses[i]); !status.ok()) return status;
    const bool clear = tls == nullptr || IsUnixAddress(addresses[i]);
    builder->AddListeningPort(addresses[i], clear ? grpc::InsecureServerCredentials() : tls->Credentials(), &ports[i]);
  }
  std::unique_ptr<grpc::Server> server;
  {
    const SocketMode mode(unix_mode);  // the engine's threads make no files
    server = builder->BuildAndStart();
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (ports[i] <= 0) return BindFailure(option, addresses[i]);  // binding stops at the first that fails
    bound->push_back(BoundAddress(addresses[i], ports[i]));
  }
  if (server == nullptr) return absl::UnavailableError(absl::StrCat(option, ": gRPC could not start on ", addresses.front()));
  return server;
}

std::vector<std::string> HealthNames(const Engine& engine) {
  std::vector<std::string> names = {""};
  for (const ModelStatus& model : engine.Status()) {
    names.push_back(model.name);
    for (const LayerStatus& layer : model.layers) names.push_back(absl::StrCat(model.name, "/", layer.layer));
  }
  return names;
}

// The path of the session socket that `auto` means.
std::string AutoSocket(const std::vector<std::string>& listen) {
  constexpr char kUnix[] = "unix:";
  for (const std::string& address : listen) {
    if (address.rfind(kUnix, 0) == 0) return absl::StrCat(address.substr(sizeof(kUnix) - 1), ".session");
  }
  return absl::StrCat("/tmp/moed-", getpid(), ".session");
}

// How long threads look out for a client's next call after the last. Where a GPU computes and processors are many, for
// `longest`, as long as the rest of a model's layer takes; where processors compute, not at all.
std::chrono::microseconds Linger(const Engine& engine, std::chrono::microseconds longest) {
  const HostStatus host = engine.Host();
  const bool spare = engine.UsesGpu() && host.processors >= kSpareProcessors && host.cpu_quota == 0;
  return spare ? longest : std::chrono::microseconds(0);
}

// Looking at a ring costs a processor; a thread that a quota counts should sleep.
std::chrono::microseconds RingSpin(const Engine& engine) {
  const HostStatus host = engine.Host();
  const std::chrono::microseconds usual = host.processors > 1 && host.cpu_quota == 0 ? kRingSpin : std::chrono::microseconds(0);
  return std::max(usual, Linger(engine, kRingLinger));
}

constexpr int64_t kBatchRows = 1024;  // so many amortise the weights that a run reads

WorkQueue::Limits LimitsOf(const ServeOptions& options) {
  WorkQueue::Limits limits;
  limits.calls = options.queue;
  limits.rows = options.queue_rows;
  limits.wait = std::chrono::microseconds(options.batch_wait_us);
  limits.batch_rows = options.max_batch_tokens > 0 ? options.max_batch_tokens : std::min(kBatchRows, options.max_tokens);
  return limits;
}

// So many that one client can fill the queue, and those beyond are refused at once and told when to come again.
int CallsOfConnection(const ServeOptions& options) {
  return static_cast<int>(std::max<int64_t>(kCallsOfConnection, 2 * int64_t{options.queue}));
}

// Rows of a large call between two turns of others. A GPU is soon done with as many as it computes at once, and slower with fewer.
int64_t StepOf(const ServeOptions& options, const Engine& engine, int64_t batch_rows) {
  return options.max_batch_tokens == 0 && engine.UsesGpu() ? options.max_tokens : batch_rows;
}

// Threads that copy: none where they would take the processors of those that receive and compute.
int HelpersOf(const HostStatus& host) {
  const double processors = host.cpu_quota > 0 ? std::min<double>(host.processors, host.cpu_quota) : host.processors;
  return std::clamp(static_cast<int>(processors / 4), 0, CopyHelpers::kMost);
}

}  // namespace

Server::Server(const ServeOptions& options, Engine* engine)
    : limits_(LimitsOf(options)), queue_(limits_, [] { return std::chrono::steady_clock::now(); }),
      runner_(engine, &queue_, StepOf(options, *engine, limits_.batch_rows)),
      service_(engine, &queue_, &runner_, &helpers_), admin_(engine, [this] { ModelsChanged(); }), engine_(engine), main_health_(HealthNames(*engine)),
      probe_health_(HealthNames(*engine)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Listen(const ServeOptions& options, Engine* engine) {
  grpc::EnableDefaultHealthCheckService(false);  // it starts as SERVING
  std::unique_ptr<Server> server(new Server(options, engine));
  if (absl::Status status = server->OpenFiles(options); !status.ok()) return status;
  if (absl::Status status = server->OpenRecorder(options); !status.ok()) return status;
  server->CountCalls(options);
  if (absl::Status status = server->Bind(options); !status.ok()) return status;
  if (absl::Status status = server->ListenForMetrics(options); !status.ok()) return status;
  const int at_once = engine->CallsAtOnce();
  server->queue_.Start(at_once, [engine, at_once] {
    if (at_once == 1) engine->PinComputeThread();  // several would take one processor in turns
  }, Linger(*engine, kLinger));
  server->WatchRuns(options.run_limit);
  if (engine->UsesGpu()) {
    server->helpers_.Start(HelpersOf(engine->Host()), Linger(*engine, kLinger));
    server->StartDeviceWatch();
  }
  return server;
}

absl::Status Server::OpenFiles(const ServeOptions& options) {
  if (!options.tls_cert.empty()) {
    absl::StatusOr<std::unique_ptr<TlsFiles>> tls = TlsFiles::Open({options.tls_cert, options.tls_key, options.tls_client_ca});
    if (!tls.ok()) return tls.status();
    tls_ = *std::move(tls);
  }
  absl::StatusOr<std::unique_ptr<ClientGate>> gate =
      ClientGate::Open({options.token_file, options.admin_token_file, !options.tls_client_ca.empty(), options.client_rows,
                        options.client_bytes},
                       [] { return std::chrono::steady_clock::now(); });
  if (!gate.ok()) return gate.status();
  gate_ = *std::move(gate);
  service_.SetGate(gate_.get());
  admin_.SetGate(gate_.get());
  return absl::OkStatus();
}

absl::Status Server::OpenRecorder(const ServeOptions& options) {
  if (options.record.empty()) return absl::OkStatus();
  Recorder::Options recording;
  recording.folder = options.record;
  recording.rate = options.record_rate;
  recording.max_bytes = options.record_bytes;
  recording.max_rows = options.record_rows;
  recording.deterministic = options.deterministic;
  recording.activations = options.activations;
  absl::StatusOr<std::shared_ptr<Recorder>> recorder =
      Recorder::Open(std::move(recording), [] { return std::chrono::system_clock::now(); });
  if (!recorder.ok()) return recorder.status();
  recorder_ = *std::move(recorder);
  service_.SetRecorder(recorder_.get());
  spdlog::info("{} of calls are recorded in {}, hidden states of users among it", options.record_rate, options.record);
  return absl::OkStatus();
}

absl::Status Server::Bind(const ServeOptions& options) {
  if (options.channelz) grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder main_builder;
  Configure(!options.no_reflection, options.channelz, CallsOfConnection(options), &main_builder);
  main_builder.RegisterService(&service_);
  main_builder.RegisterService(&main_health_);
  if (!options.admin_token_file.empty() && options.admin_listen.empty()) main_builder.RegisterService(&admin_);
  absl::StatusOr<std::unique_ptr<grpc::Server>> main_listener =
      BindAll({"--listen", options.listen, tls_.get(), options.unix_mode}, &main_builder, &addresses_);
  if (!main_listener.ok()) return main_listener.status();
  main_listener_ = *std::move(main_listener);
  if (absl::Status status = ListenForSessions(options); !status.ok()) return status;
  return BindBeside(options);
}

// The listeners for changes and for probes.
absl::Status Server::BindBeside(const ServeOptions& options) {
  std::vector<std::string> bound;
  if (!options.admin_listen.empty()) {
    grpc::ServerBuilder admin_builder;
    Configure(!options.no_reflection, false, kCallsOfConnection, &admin_builder);
    admin_builder.RegisterService(&admin_);
    absl::StatusOr<std::unique_ptr<grpc::Server>> admin_listener =
        BindAll({"--admin-listen", {options.admin_listen}, tls_.get(), options.unix_mode}, &admin_builder, &bound);
    if (!admin_listener.ok()) return admin_listener.status();
    admin_listener_ = *std::move(admin_listener);
    admin_address_ = bound.back();
  }
  if (options.health_listen.empty()) return absl::OkStatus();
  grpc::ServerBuilder health_builder;
  Configure(false, false, kCallsOfConnection, &health_builder);
  health_builder.RegisterService(&probe_health_);
  health_builder.RegisterCallbackGenericService(&nothing_);
  absl::StatusOr<std::unique_ptr<grpc::Server>> health_listener =
      BindAll({"--health-listen", {options.health_listen}, nullptr, options.unix_mode}, &health_builder, &bound);
  if (!health_listener.ok()) return health_listener.status();
  health_listener_ = *std::move(health_listener);
  health_address_ = bound.back();
  return absl::OkStatus();
}

// After a change, and before its caller hears of it.
void Server::ModelsChanged() {
  service_.RefreshModels();
  const std::vector<std::string> names = HealthNames(*engine_);
  main_health_.SetNames(names);
  probe_health_.SetNames(names);
  std::lock_guard<std::mutex> lock(phase_mutex_);
  if (engine_->UsesGpu() && !draining_ && !device_watch_.joinable()) StartDeviceWatch();
}

std::vector<grpc::Server*> Server::Listeners() const {
  std::vector<grpc::Server*> listeners;
  for (grpc::Server* listener : {main_listener_.get(), admin_listener_.get(), health_listener_.get()}) {
    if (listener != nullptr) listeners.push_back(listener);
  }
  return listeners;
}

// A path of the operator's must be had; without one, a server that cannot have its socket says so and goes on.
absl::Status Server::ListenForSessions(const ServeOptions& options) {
  if (options.session_socket == "none") return absl::OkStatus();
  const bool chosen = options.session_socket != "auto";
  SessionOptions sessions;
  sessions.path = chosen ? options.session_socket : AutoSocket(options.listen);
  sessions.max_sessions = options.sessions;
  sessions.max_bytes = options.session_memory;
  sessions.mode = static_cast<mode_t>(options.unix_mode);
  sessions.admit = [this](const std::string& token) {
    absl::Status status = gate_->AdmitToken(Plane::kData, token);
    return status.ok() ? service_.AdmitSession() : status;
  };
  sessions.pin = [engine = engine_](std::span<std::byte> memory) { return engine->PinForCalls(memory); };
  sessions.serve_ring = [this, spin = RingSpin(*engine_)](std::shared_ptr<Region> region, uint64_t offset, uint32_t slots,
                                                                 const std::string& token,
                                                                 std::function<void(const absl::Status&)> abandon) {
    RingServer::Options ring;
    ring.spin = spin;
    ring.handle = [this, token](std::shared_ptr<RingCall> call) { service_.StartRingForward(std::move(call), token); };
    ring.abandon = [abandon = std::move(abandon)](const absl::Status& why) {
      spdlog::warn("a session ends, its client broke the contract: {}", std::string(why.message()));
      abandon(why);
    };
    return std::make_unique<RingServer>(std::move(region), offset, slots, std::move(ring));
  };
  absl::StatusOr<std::unique_ptr<Sessions>> listening = Sessions::Listen(std::move(sessions));
  if (!listening.ok() && chosen) {
    return absl::Status(listening.status().code(), absl::StrCat("--session-socket: ", listening.status().message()));
  }
  if (!listening.ok()) {
    spdlog::warn("clients of this host cannot share memory: {}", std::string(listening.status().message()));
    return absl::OkStatus();
  }
  sessions_ = *std::move(listening);
  service_.SetSessions(sessions_.get());
  return absl::OkStatus();
}

// Before the first call; sessions and listeners are not there yet.
void Server::CountCalls(const ServeOptions& options) {
  if (options.metrics_listen.empty()) return;
  const uint64_t device_bytes = engine_->Host().gpu_free_bytes;
  metrics_ = std::make_shared<Metrics>(options.expert_metrics, [this, device_bytes] { return State(device_bytes); });
  service_.SetObserver(metrics_.get());
}

absl::Status Server::ListenForMetrics(const ServeOptions& options) {
  if (metrics_ == nullptr) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<MetricsListener>> listener =
      MetricsListener::Listen("--metrics-listen", options.metrics_listen, metrics_);
  if (!listener.ok()) return listener.status();
  metrics_listener_ = *std::move(listener);
  return absl::OkStatus();
}

ServerState Server::State(uint64_t device_bytes_at_start) {
  ServerState state;
  state.phase = service_.phase();
  {
    std::lock_guard<std::mutex> lock(phase_mutex_);
    state.device_failed = !device_failure_.ok();
    state.serving = state.phase == Phase::kServing && !draining_ && !state.device_failed && !run_hangs_;
  }
  state.models = engine_->Status();
  state.host = engine_->Host();
  state.device_bytes_at_start = device_bytes_at_start;
  state.queue = queue_.counters();
  if (sessions_ != nullptr) state.sessions = sessions_->counts();
  state.bytes_in_flight = service_.bytes_in_flight();
  if (recorder_ != nullptr) state.recording = recorder_->counts();
  return state;
}

absl::Status Server::Open(const std::function<absl::Status()>& announce) {
  std::lock_guard<std::mutex> lock(phase_mutex_);
  if (draining_) return absl::OkStatus();
  if (!device_failure_.ok()) return device_failure_;
  admin_.Open();
  service_.SetPhase(Phase::kServing);  // before health, so that SERVING is never a promise too early
  return main_health_.ServeAfter([&] { return probe_health_.ServeAfter(announce); });
}

void Server::StartDeviceWatch() {
  device_watch_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "device-watch");  // as `top -H` shows it
    std::unique_lock<std::mutex> lock(phase_mutex_);
    while (!stop_watch_.wait_for(lock, kHealthInterval, [this] { return draining_; })) {
      lock.unlock();  // the device may take its time
      absl::Status health = engine_->DeviceHealth();
      lock.lock();
      if (health.ok() || draining_) continue;
      spdlog::error("{}: health is NOT_SERVING from now on", std::string(health.message()));
      device_failure_ = std::move(health);
      main_health_.StopServing();
      probe_health_.StopServing();
      return;
    }
  });
}

void Server::WatchRuns(int limit_s) {
  if (limit_s == 0) return;
  run_watch_ = std::make_unique<RunWatch>(std::chrono::seconds(limit_s), [this] { return queue_.LongestRun(); },
                                          [this](const std::string& what) { RunsHang(what); });
  run_watch_->Start();
}

// Health follows, for every name: others wait behind such a run.
void Server::RunsHang(const std::string& what) {
  std::lock_guard<std::mutex> lock(phase_mutex_);
  run_hangs_ = !what.empty();
  if (draining_ || !device_failure_.ok()) return;
  if (run_hangs_) {
    spdlog::error("{}, --run-limit is less: health is NOT_SERVING until it ends", what);
    main_health_.StopServing();
    probe_health_.StopServing();
  } else {
    spdlog::warn("the run beyond --run-limit has ended: health is SERVING again");
    for (HealthService* health : {&main_health_, &probe_health_}) health->ServeAfter([] { return absl::OkStatus(); }).IgnoreError();
  }
}

bool Server::Drain(std::chrono::milliseconds grace) {
  {
    std::lock_guard<std::mutex> lock(phase_mutex_);
    if (draining_) return true;
    draining_ = true;
    stop_watch_.notify_all();
    main_health_.StopServing();
    probe_health_.StopServing();
    service_.SetPhase(Phase::kDraining);
  }
  if (grace == std::chrono::milliseconds::max()) return FinishCalls(), true;
  auto finished = std::make_shared<std::promise<void>>();
  std::thread finisher([this, finished] {
    FinishCalls();
    finished->set_value();
  });
  if (finished->get_future().wait_for(grace) == std::future_status::ready) return finisher.join(), true;
  finisher.detach();
  CancelCalls();
  return false;
}

// Ends in time only if what computes does.
void Server::FinishCalls() {
  admin_.Stop();
  if (device_watch_.joinable()) device_watch_.join();
  run_watch_.reset();
  queue_.Shutdown();
  helpers_.Stop();
  service_.WaitForAnswers(kAnswerLimit);
  if (recorder_ != nullptr) recorder_->Stop();
  admin_.WaitForAnswers(kAnswerLimit);
  service_.WaitForQuiet(kQuiet, kQuietLimit);
  if (sessions_ != nullptr) sessions_->Stop();
  main_health_.EndWatches();
  probe_health_.EndWatches();
  for (grpc::Server* listener : Listeners()) listener->Shutdown(std::chrono::system_clock::now() + kStreamLimit);
}

// Breaks the connections, so that clients know at once. gRPC returns from a shutdown only when every call was answered, which those
// that compute are not, hence a thread for it.
void Server::CancelCalls() {
  for (grpc::Server* listener : Listeners()) {
    std::thread([listener] { listener->Shutdown(std::chrono::system_clock::now()); }).detach();
  }
  std::this_thread::sleep_for(kCancelTime);
}

Server::~Server() { Drain(); }

}  // namespace moed
