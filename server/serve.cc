// Threads of the process: main waits for an event and then ends the server; one thread loads the models and opens the
// server; one thread takes the signals, which are blocked everywhere else; gRPC and the engine have their own.
#include "server/serve.h"

#include <malloc.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/allocator.h"
#include "server/load_log.h"
#include "server/log.h"
#include "server/recorder.h"
#include "server/security.h"
#include "server/server.h"
#include "server/setup.h"
#include "server/version.h"

namespace moed {
namespace {

constexpr std::chrono::seconds kTick(2);
constexpr std::chrono::milliseconds kSameSignal(300);

// What main waits for.
class Events {
 public:
  void RequestStop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  void LoadEnded(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    loaded_ = true;
    load_status_ = status;
    changed_.notify_all();
  }
  // Returns when the process should end: OK after a signal, else why the load failed. Calls `tick` every kTick till then.
  absl::Status WaitForEnd(const std::function<void()>& tick) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kTick, [this] { return stop_ || (loaded_ && !load_status_.ok()); })) {
      lock.unlock();
      tick();
      lock.lock();
    }
    return stop_ ? absl::OkStatus() : load_status_;
  }
  bool loaded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return loaded_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool loaded_ = false;
  absl::Status load_status_;
};

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// The first signal asks for a drain, the second ends the process. The same signal within kSameSignal counts once: some
// senders, such as GNU timeout, signal a process and its group.
void StartSignalThread(const std::shared_ptr<Events>& events) {
  std::thread([events] {
    const sigset_t signals = StopSignals();
    int first = 0;
    sigwait(&signals, &first);
    const auto arrived = std::chrono::steady_clock::now();
    events->RequestStop();
    spdlog::info("signal {}: draining; a second one ends the process at once", first);
    for (;;) {
      int next = 0;
      sigwait(&signals, &next);
      if (next != first || std::chrono::steady_clock::now() - arrived > kSameSignal) _exit(1);
    }
  }).detach();
}

void LogNotes(const Engine& engine, const std::string& name) {
  const absl::StatusOr<ModelStatus> model = engine.FindModel(name);
  if (!model.ok()) return;
  for (const std::string& note : model->notes) spdlog::info("model '{}': {}", name, note);
}

// Loads one model after the other; the engine checks each layer as it is loaded.
absl::Status LoadModels(const ServeOptions& options, Engine* engine) {
  for (const ModelOption& model : options.models) {
    Log(spdlog::level::info, absl::StrCat("model '", model.name, "': loading ", model.path), {{"model", model.name}});
    LogNotes(*engine, model.name);
    LoadLog log(model.name, options.log_format == "json" ? nullptr : TerminalForBar());
    absl::Status status = engine->Load(model.name, [&log](const LoadProgress& progress) { log.LayerLoaded(progress); });
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("model '", model.name, "': ", status.message()));
    log.Finished();
  }
  if (options.bench_hidden > 0) {
    if (absl::Status status = engine->Load(kBenchModel, {}); !status.ok()) return status;
  }
  malloc_trim(0);  // loading leaves free blocks behind that serving does not need
  return absl::OkStatus();
}

// "0, 1", or "unknown".
std::string NodesText(const std::vector<int>& nodes) {
  std::string text;
  for (const int node : nodes) absl::StrAppend(&text, text.empty() ? "" : ", ", node);
  return text.empty() ? "unknown" : text;
}

void LogHost(const HostStatus& host) {
  spdlog::info("{} compute threads{}, limited by {}; {} usable processors on NUMA nodes: {}", host.threads,
               host.pinned ? ", pinned" : "", host.threads_limit, host.processors, NodesText(host.numa_nodes));
  if (!host.gpu.empty()) spdlog::info("GPU {}, {} bytes free", host.gpu, host.gpu_free_bytes);
  for (const std::string& warning : ThreadWarnings(host)) spdlog::warn("{}", warning);
}

void LogBackends(const Engine& engine) {
  for (const ModelStatus& model : engine.Status()) {
    for (const LayerStatus& layer : model.layers) {
      const std::string nodes = layer.numa_nodes.empty() ? "" : absl::StrCat(", NUMA nodes: ", NodesText(layer.numa_nodes));
      Log(spdlog::level::info,
          absl::StrCat("model '", model.name, "' layer ", layer.layer, ": ", layer.executed_scheme, " on ", layer.backend, nodes,
                       layer.note.empty() ? "" : "; ", layer.note),
          {{"model", model.name}, {"layer", int64_t{layer.layer}}, {"backend", layer.backend}, {"scheme", layer.executed_scheme}});
    }
  }
}

absl::Status BadReadyFile(const std::string& path, const std::string& got) {
  return absl::UnavailableError(absl::StrCat("--ready-file: wanted a file that can be written, got ", path, ": ", got));
}

// The file that tells where a server is ready to answer. Thread-safe. Whatever the order of the threads, it does not exist
// once Remove returned.
class ReadyFile {
 public:
  explicit ReadyFile(const std::string& path) : path_(path) {}

  // Removes the file of an earlier run, which would lie about this one; and what cannot be written is better known now.
  // To be called when the addresses are ours, since before that it may be the file of a living server.
  absl::Status Prepare() const {
    if (path_.empty()) return absl::OkStatus();
    std::error_code error;
    if (std::filesystem::is_directory(path_, error)) return BadReadyFile(path_, "a directory");
    std::filesystem::path folder = std::filesystem::path(path_).parent_path();
    if (folder.empty()) folder = ".";
    if (access(folder.c_str(), W_OK) != 0) return BadReadyFile(path_, "its folder does not exist or is not writable");
    std::filesystem::remove(path_, error);
    return error ? BadReadyFile(path_, error.message()) : absl::OkStatus();
  }

  // Appears at once and complete: written beside and renamed. Does nothing after Remove.
  absl::Status Write(const Server& server) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (path_.empty() || removed_) return absl::OkStatus();
    nlohmann::json document = {{"addresses", server.addresses()}, {"pid", getpid()}};
    if (!server.session_socket().empty()) document["session_socket"] = server.session_socket();
    if (!server.admin_address().empty()) document["admin_address"] = server.admin_address();
    if (!server.health_address().empty()) document["health_address"] = server.health_address();
    if (!server.metrics_address().empty()) document["metrics_address"] = server.metrics_address();
    const std::string draft = absl::StrCat(path_, ".", getpid(), ".tmp");
    std::ofstream file(draft, std::ios::trunc);
    file << document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    file.close();
    std::error_code error;
    if (!file) return std::filesystem::remove(draft, error), BadReadyFile(path_, "an error while writing");
    std::filesystem::rename(draft, path_, error);
    written_ = !error;
    return error ? BadReadyFile(path_, error.message()) : absl::OkStatus();
  }

  void Remove() {
    std::lock_guard<std::mutex> lock(mutex_);
    removed_ = true;
    std::error_code ignored;
    if (written_) std::filesystem::remove(path_, ignored);
  }

 private:
  const std::string path_;
  std::mutex mutex_;
  bool written_ = false;  // guarded by mutex_
  bool removed_ = false;  // guarded by mutex_
};

// The load thread's work: OK also when a drain came first.
absl::Status LoadAndOpen(const ServeOptions& options, Engine* engine, Server* server, ReadyFile* ready) {
  absl::Status loaded;
  std::thread worker([&] {  // ends with the load, since it may be pinned
    if (!engine->PinComputeThread()) spdlog::warn("--pin-threads: the operating system does not let threads be pinned");
    loaded = LoadModels(options, engine);
  });
  worker.join();
  if (!loaded.ok()) return loaded;
  LogBackends(*engine);
  return server->Open([&] {
    absl::Status status = ready->Write(*server);
    if (status.ok()) spdlog::info("ready");
    return status;
  });
}

void LogCounters(const Server& server) {
  const WorkQueue::Counters counters = server.counters();
  spdlog::info("drained: {} calls accepted, {} finished, {} of them with others, {} refused, {} past their deadline, {} cancelled",
               counters.accepted, counters.finished, counters.merged, counters.refused, counters.expired, counters.cancelled);
}

}  // namespace

int RunServe(const ServeOptions& options) {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const std::shared_ptr<LogSink> log = SetUpLog(options.log_format == "json" ? LogFormat::kJson : LogFormat::kText, options.log_level);

  absl::Status checked = CheckSecurity(options);
  if (checked.ok() && !options.record.empty()) checked = CheckRecordFolder(options.record);
  if (!checked.ok()) return ReportFailure(checked);
  absl::StatusOr<std::unique_ptr<Engine>> engine = SetUpEngine(options);
  if (!engine.ok()) return ReportFailure(engine.status());
  LogHost((*engine)->Host());
  for (const std::string& warning : SecurityWarnings(options)) spdlog::warn("{}", warning);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Listen(options, engine->get());
  if (!server.ok()) return ReportFailure(server.status());
  ReadyFile ready(options.ready_file);
  if (absl::Status status = ready.Prepare(); !status.ok()) return ReportFailure(status);
  for (const std::string& address : (*server)->addresses()) spdlog::info("moed {} listens on {}", kVersion, address);
  if (!(*server)->session_socket().empty()) spdlog::info("sessions of shared memory at {}", (*server)->session_socket());
  if (!(*server)->admin_address().empty()) spdlog::info("changes of models at {}", (*server)->admin_address());
  if (!(*server)->health_address().empty()) spdlog::info("health listens on {}", (*server)->health_address());
  if (!(*server)->metrics_address().empty()) spdlog::info("metrics at http://{}/metrics", (*server)->metrics_address());

  auto events = std::make_shared<Events>();
  StartSignalThread(events);
  std::thread loader([&, events] { events->LoadEnded(LoadAndOpen(options, engine->get(), server->get(), &ready)); });

  IdleTrimmer trimmer;
  const absl::Status end = events->WaitForEnd([&] {
    trimmer.Tick((*server)->counters().accepted);
    log->Summarise();
  });
  if (!end.ok()) {
    spdlog::error("loading failed: {}", end.ToString());
    ReportFailure(end);
  }
  ready.Remove();
  const bool drained = (*server)->Drain(std::chrono::seconds(options.grace));
  if (!drained) spdlog::warn("--grace: {} s were not enough, the calls that are left are cancelled", options.grace);
  log->Summarise(true);
  LogCounters(**server);
  const int code = end.ok() ? 0 : 2;
  if (!drained || !events->loaded()) {  // neither calls nor a load can be interrupted; they may be logging right now
    spdlog::default_logger()->flush();
    _exit(code);
  }
  loader.join();
  return code;
}

}  // namespace moed
