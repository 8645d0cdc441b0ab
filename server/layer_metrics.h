// What is counted of forwards and runs: for each layer, for each model, and for all together.
//
// Threads: Finished and Ran on any, several at once, with relaxed atomics and no lock; Add on any beside them. An object is shared
// by those who count and those who collect. No text of a client gets here: series are named by model and layer as the server knows
// them, and by codes and reasons, of which there are few.
#ifndef MOED_SERVER_LAYER_METRICS_H_
#define MOED_SERVER_LAYER_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/call_observer.h"
#include "server/metric_values.h"

namespace moed {

// How many forwards ended with which code.
class CodeCounts {
 public:
  void Count(const FinishedForward& forward);
  // The counts that are not 0, labelled with transport and code beside `labels`; with `always_ok` also that of messages with code
  // OK.
  void Add(const MetricFamily::Labels& labels, bool always_ok, MetricFamily* family) const;

 private:
  static constexpr int kCodes = 17;  // of absl::StatusCode
  std::array<std::array<std::atomic<uint64_t>, kCodes>, kTransports> counts_{};
};

// Of the whole server.
class TotalMetrics {
 public:
  void Count(const FinishedForward& forward);
  // Appends its families.
  void Add(std::vector<prometheus::MetricFamily>* out) const;

 private:
  // Apart, since compute threads and those of transports count at the same time.
  struct alignas(64) Bytes {
    std::atomic<uint64_t> received{0}, sent{0};
  };
  std::array<Bytes, kTransports> bytes_;
  std::array<std::atomic<uint64_t>, kDrops> drops_{};
};

// Of one model.
class ModelMetrics {
 public:
  ModelMetrics();
  void Count(const FinishedForward& forward);

  MetricHistogram receive, queue, compute, send, total;
  MetricHistogram rows;
};

class LayerMetrics final : public LayerObserver {
 public:
  LayerMetrics(ObservedLayer layer, bool each_expert, std::shared_ptr<ModelMetrics> model, std::shared_ptr<TotalMetrics> totals);

  void Finished(const FinishedForward& forward) override;
  void Ran(const FinishedRun& run) override;

  const ObservedLayer& layer() const { return layer_; }
  const std::shared_ptr<ModelMetrics>& model() const { return model_; }

 private:
  friend void AddLayerMetrics(const std::vector<std::shared_ptr<const LayerMetrics>>&, std::vector<prometheus::MetricFamily>*);
  friend void AddForwardCodes(const std::vector<std::shared_ptr<const LayerMetrics>>&, MetricFamily*);
  MetricFamily::Labels Labels() const;
  void CountExperts(const FinishedRun& run);

  const ObservedLayer layer_;
  const std::shared_ptr<ModelMetrics> model_;
  const std::shared_ptr<TotalMetrics> totals_;
  CodeCounts codes_;
  MetricHistogram seconds_, run_seconds_, run_rows_;
  MetricHistogram imbalance_;                      // in hundredths
  std::atomic<uint64_t> merged_{0};                // forwards that shared a run
  std::atomic<uint64_t> experts_{0};               // distinct ones of each run, added up
  std::vector<std::atomic<uint64_t>> expert_rows_;  // of each held expert; empty unless each is wanted
};

// Adds the forwards of all layers to the family that counts them.
void AddForwardCodes(const std::vector<std::shared_ptr<const LayerMetrics>>& layers, MetricFamily* family);
// Appends the other families of all layers and their models.
void AddLayerMetrics(const std::vector<std::shared_ptr<const LayerMetrics>>& layers, std::vector<prometheus::MetricFamily>* out);

}  // namespace moed

#endif  // MOED_SERVER_LAYER_METRICS_H_
