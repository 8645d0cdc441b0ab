// The state of a server and of its process as metrics.
#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "server/metrics.h"
#include "server/version.h"

namespace moed {
namespace {

using prometheus::MetricType;

void AddGauge(const char* name, const char* help, double value, std::vector<prometheus::MetricFamily>* out) {
  MetricFamily family(name, MetricType::Gauge, help);
  family.Add({}, value);
  out->push_back(family.Take());
}

void AddCounter(const char* name, const char* help, double value, std::vector<prometheus::MetricFamily>* out) {
  MetricFamily family(name, MetricType::Counter, help);
  family.Add({}, value);
  out->push_back(family.Take());
}

void AddPhase(const ServerState& state, std::vector<prometheus::MetricFamily>* out) {
  MetricFamily phase("moed_phase", MetricType::Gauge, "1 for the phase of the server's life that it is in");
  phase.Add({{"phase", "loading"}}, state.phase == Phase::kLoading);
  phase.Add({{"phase", "serving"}}, state.phase == Phase::kServing);
  phase.Add({{"phase", "draining"}}, state.phase == Phase::kDraining);
  out->push_back(phase.Take());
  AddGauge("moed_serving", "1 when health is SERVING", state.serving, out);
  MetricFamily build("moed_build_info", MetricType::Gauge, "Always 1; the build that runs");
  build.Add({{"version", kVersion}, {"cuda", CudaBuild()}}, 1);
  out->push_back(build.Take());
}

void AddModels(const std::vector<ModelStatus>& models, std::vector<prometheus::MetricFamily>* out) {
  constexpr LayerState kStates[] = {LayerState::kPlanned, LayerState::kLoading, LayerState::kReady, LayerState::kFailed};
  MetricFamily generation("moed_model_generation", MetricType::Gauge, "Generation of the weights that answer");
  MetricFamily backend("moed_layer_backend_info", MetricType::Gauge,
                       "Always 1; the backend of a layer, and the scheme it executes");
  MetricFamily state("moed_layer_state", MetricType::Gauge, "1 for the state that a layer is in");
  MetricFamily bytes("moed_layer_weights_bytes", MetricType::Gauge, "Memory of a layer's experts");
  for (const ModelStatus& model : models) {
    generation.Add({{"model", model.name}}, static_cast<double>(model.generation));
    for (const LayerStatus& layer : model.layers) {
      const MetricFamily::Labels labels = {{"model", model.name}, {"layer", absl::StrCat(layer.layer)}};
      MetricFamily::Labels chosen = labels;
      chosen.emplace_back("backend", layer.backend);
      chosen.emplace_back("scheme", layer.executed_scheme.empty() ? layer.scheme : layer.executed_scheme);
      backend.Add(chosen, 1);
      bytes.Add(labels, static_cast<double>(layer.bytes));
      for (const LayerState each : kStates) {
        MetricFamily::Labels one = labels;
        one.emplace_back("state", LayerStateName(each));
        state.Add(one, layer.state == each);
      }
    }
  }
  for (MetricFamily* family : {&generation, &backend, &state, &bytes}) out->push_back(family->Take());
}

void AddDevice(const ServerState& state, std::vector<prometheus::MetricFamily>* out) {
  AddGauge("moed_compute_threads", "Threads that compute layers on the host", state.host.threads, out);
  if (state.host.gpu.empty()) return;
  const MetricFamily::Labels labels = {{"device", state.host.gpu}};
  MetricFamily free("moed_device_memory_free_bytes", MetricType::Gauge, "Memory of the GPU that is free");
  free.Add(labels, static_cast<double>(state.host.gpu_free_bytes));
  const uint64_t start = state.device_bytes_at_start, now = state.host.gpu_free_bytes;
  MetricFamily used("moed_device_memory_used_bytes", MetricType::Gauge,
                    "Memory of the GPU that was taken since the server started");
  used.Add(labels, static_cast<double>(start > now ? start - now : 0));
  MetricFamily healthy("moed_device_healthy", MetricType::Gauge, "0 once the GPU failed");
  healthy.Add(labels, !state.device_failed);
  for (MetricFamily* family : {&free, &used, &healthy}) out->push_back(family->Take());
}

void AddQueue(const ServerState& state, std::vector<prometheus::MetricFamily>* out) {
  AddGauge("moed_queue_calls", "Calls that wait for the device", state.queue.waiting, out);
  AddGauge("moed_queue_rows", "Rows of the calls that wait for the device", static_cast<double>(state.queue.waiting_rows), out);
  AddGauge("moed_in_flight_bytes", "Bytes of requests that are not answered yet", static_cast<double>(state.bytes_in_flight), out);
}

void AddSessions(const Sessions::Counts& sessions, std::vector<prometheus::MetricFamily>* out) {
  AddGauge("moed_sessions_open", "Clients that share memory", sessions.open, out);
  AddGauge("moed_session_bytes", "Memory that clients share", static_cast<double>(sessions.bytes), out);
  MetricFamily ever("moed_sessions_total", MetricType::Counter,
                    "Sessions that were opened, refused, and ended since their client broke the contract");
  ever.Add({{"event", "opened"}}, static_cast<double>(sessions.opened));
  ever.Add({{"event", "refused"}}, static_cast<double>(sessions.refused));
  ever.Add({{"event", "abandoned"}}, static_cast<double>(sessions.abandoned));
  out->push_back(ever.Take());
}

void AddRecording(const Recorder::Counts& recording, std::vector<prometheus::MetricFamily>* out) {
  AddGauge("moed_recording_active", "0 when the folder of recordings is full", recording.active, out);
  AddCounter("moed_recorded_calls_total", "Calls that were recorded", static_cast<double>(recording.recorded), out);
  AddCounter("moed_recorded_bytes_total", "Bytes of the files of recorded calls", static_cast<double>(recording.bytes), out);
  AddGauge("moed_recording_folder_bytes", "Bytes of all files in the folder of recordings",
           static_cast<double>(recording.folder_bytes), out);
  MetricFamily lost("moed_recording_lost_total", MetricType::Counter, "Sampled calls that were not recorded");
  for (int i = 0; i < kRecordLosses; ++i) {
    lost.Add({{"reason", RecordLossName(static_cast<RecordLoss>(i))}}, static_cast<double>(recording.lost[static_cast<size_t>(i)]));
  }
  out->push_back(lost.Take());
}

}  // namespace

void AddStateMetrics(const ServerState& state, std::vector<prometheus::MetricFamily>* out) {
  AddPhase(state, out);
  AddModels(state.models, out);
  AddDevice(state, out);
  AddQueue(state, out);
  AddSessions(state.sessions, out);
  if (state.recording) AddRecording(*state.recording, out);
}

// The names are those that the Prometheus clients of all languages have for them.
void AddProcessMetrics(const ProcessStats& process, std::vector<prometheus::MetricFamily>* out) {
  AddCounter("process_cpu_seconds_total", "Processor time, user and system", process.cpu_seconds, out);
  AddGauge("process_resident_memory_bytes", "Resident memory", static_cast<double>(process.resident_bytes), out);
  AddGauge("process_virtual_memory_bytes", "Virtual memory", static_cast<double>(process.virtual_bytes), out);
  AddGauge("process_open_fds", "Open file descriptors", static_cast<double>(process.open_files), out);
  AddGauge("process_max_fds", "File descriptors that may be open", static_cast<double>(process.max_files), out);
  AddGauge("process_threads", "Threads", static_cast<double>(process.threads), out);
  AddGauge("process_start_time_seconds", "When the process started, since the epoch", process.start_seconds, out);
}

}  // namespace moed
