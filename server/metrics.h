// The metrics of a server, as Prometheus collects them: what layers counted, and the state of the server at that moment.
//
// Threads: OfLayer and Finished on any; Collect on the listener's (metrics_listener.h), beside them. A layer's series are there
// from OfLayer on and as long as anybody holds its observer: a model that is replaced keeps the series of its layers while a call
// or the new model holds them, one that is removed loses them with its last call. Labels are names of the server's own: models,
// layers, backends, codes. See docs/operations.md for the list, and how many series there can be.
#ifndef MOED_SERVER_METRICS_H_
#define MOED_SERVER_METRICS_H_

#include <prometheus/collectable.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "server/call_observer.h"
#include "server/layer_metrics.h"
#include "server/process_stats.h"
#include "server/recorder.h"
#include "server/sessions.h"
#include "server/wire.h"
#include "server/work_queue.h"

namespace moed {

// A server at one moment.
struct ServerState {
  Phase phase = Phase::kLoading;
  bool serving = false;                      // health is SERVING
  bool device_failed = false;
  std::vector<ModelStatus> models;
  HostStatus host;
  uint64_t device_bytes_at_start = 0;        // of the GPU's memory, free before anything was loaded
  WorkQueue::Counters queue;
  Sessions::Counts sessions;
  size_t bytes_in_flight = 0;
  std::optional<Recorder::Counts> recording;  // nothing: no call is recorded
};

class Metrics final : public CallObserver, public prometheus::Collectable {
 public:
  // `state` is called by Collect and must be safe on any thread. `each_expert`: count the rows of each expert, too.
  Metrics(bool each_expert, std::function<ServerState()> state);

  std::shared_ptr<LayerObserver> OfLayer(const ObservedLayer& layer) override;
  void Finished(const FinishedForward& forward) override;

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  std::vector<std::shared_ptr<const LayerMetrics>> Layers() const;

  const bool each_expert_;
  const std::function<ServerState()> state_;
  const std::shared_ptr<TotalMetrics> totals_;
  CodeCounts unknown_;  // of forwards whose layer was not known
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::weak_ptr<LayerMetrics>> layers_;  // guarded by mutex_
};

// The families of `state` and of a process, for Collect.
void AddStateMetrics(const ServerState& state, std::vector<prometheus::MetricFamily>* out);
void AddProcessMetrics(const ProcessStats& process, std::vector<prometheus::MetricFamily>* out);

}  // namespace moed

#endif  // MOED_SERVER_METRICS_H_
