#include "server/layer_metrics.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using prometheus::MetricType;

constexpr int64_t kMicroseconds[] = {10,     25,     50,      100,     250,     500,       1'000,     2'500,     5'000,     10'000,
                                     25'000, 50'000, 100'000, 250'000, 500'000, 1'000'000, 2'500'000, 5'000'000, 10'000'000};
constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr int64_t kHundredths[] = {100, 125, 150, 200, 300, 400, 600, 800, 1200, 1600, 3200, 6400};
constexpr double kPerSecond = 1e6, kPerRow = 1, kPerRatio = 100;

constexpr const char* kDropNames[kDrops] = {"", "expired", "cancelled", "queue", "bytes", "client", "memory"};

void Raise(std::atomic<uint64_t>* count, int64_t by = 1) {
  count->fetch_add(static_cast<uint64_t>(std::max<int64_t>(by, 0)), std::memory_order_relaxed);
}

double Value(const std::atomic<uint64_t>& count) { return static_cast<double>(count.load(std::memory_order_relaxed)); }

}  // namespace

void CodeCounts::Count(const FinishedForward& forward) {
  const int code = std::clamp(static_cast<int>(forward.code), 0, kCodes - 1);
  Raise(&counts_[static_cast<size_t>(forward.transport)][static_cast<size_t>(code)]);
}

void CodeCounts::Add(const MetricFamily::Labels& labels, bool always_ok, MetricFamily* family) const {
  for (size_t transport = 0; transport < kTransports; ++transport) {
    for (size_t code = 0; code < kCodes; ++code) {
      const double count = Value(counts_[transport][code]);
      if (count == 0 && !(always_ok && transport == 0 && code == 0)) continue;
      MetricFamily::Labels all = labels;
      all.emplace_back("transport", TransportName(static_cast<Transport>(transport)));
      all.emplace_back("code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
      family->Add(all, count);
    }
  }
}

void TotalMetrics::Count(const FinishedForward& forward) {
  Bytes& bytes = bytes_[static_cast<size_t>(forward.transport)];
  Raise(&bytes.received, forward.received_bytes);
  Raise(&bytes.sent, forward.sent_bytes);
  if (forward.drop != Drop::kNone) Raise(&drops_[static_cast<size_t>(forward.drop)]);
}

void TotalMetrics::Add(std::vector<prometheus::MetricFamily>* out) const {
  MetricFamily received("moed_received_bytes_total", MetricType::Counter,
                        "Bytes of forwards that were received or shared by clients");
  MetricFamily sent("moed_sent_bytes_total", MetricType::Counter, "Bytes of answers that were sent or written to shared memory");
  for (size_t i = 0; i < kTransports; ++i) {
    const char* const transport = TransportName(static_cast<Transport>(i));
    received.Add({{"transport", transport}}, Value(bytes_[i].received));
    sent.Add({{"transport", transport}}, Value(bytes_[i].sent));
  }
  MetricFamily drops("moed_forward_drops_total", MetricType::Counter,
                     "Forwards that were not computed although nothing was wrong with them");
  for (size_t i = 1; i < kDrops; ++i) drops.Add({{"reason", kDropNames[i]}}, Value(drops_[i]));
  out->push_back(received.Take());
  out->push_back(sent.Take());
  out->push_back(drops.Take());
}

ModelMetrics::ModelMetrics()
    : receive(kMicroseconds, kPerSecond), queue(kMicroseconds, kPerSecond), compute(kMicroseconds, kPerSecond),
      send(kMicroseconds, kPerSecond), total(kMicroseconds, kPerSecond), rows(kRows, kPerRow) {}

void ModelMetrics::Count(const FinishedForward& forward) {
  receive.Observe(forward.receive_us);
  queue.Observe(forward.queue_us);
  compute.Observe(forward.compute_us);
  send.Observe(forward.send_us);
  total.Observe(forward.total_us);
  rows.Observe(forward.rows);
}

LayerMetrics::LayerMetrics(ObservedLayer layer, bool each_expert, std::shared_ptr<ModelMetrics> model,
                           std::shared_ptr<TotalMetrics> totals)
    : layer_(std::move(layer)), model_(std::move(model)), totals_(std::move(totals)), seconds_(kMicroseconds, kPerSecond),
      run_seconds_(kMicroseconds, kPerSecond), run_rows_(kRows, kPerRow), imbalance_(kHundredths, kPerRatio),
      expert_rows_(each_expert ? static_cast<size_t>(std::max(layer_.end_expert - layer_.first_expert, 0)) : 0) {}

MetricFamily::Labels LayerMetrics::Labels() const { return {{"model", layer_.model}, {"layer", absl::StrCat(layer_.layer)}}; }

void LayerMetrics::Finished(const FinishedForward& forward) {
  codes_.Count(forward);
  totals_->Count(forward);
  if (forward.code != absl::StatusCode::kOk) return;
  seconds_.Observe(forward.total_us);
  model_->Count(forward);
}

void LayerMetrics::Ran(const FinishedRun& run) {
  run_seconds_.Observe(run.compute_us);
  run_rows_.Observe(run.rows);
  if (run.calls > 1) Raise(&merged_, run.calls);
  try {
    CountExperts(run);
  } catch (const std::bad_alloc&) {  // a run goes uncounted
  }
}

void LayerMetrics::CountExperts(const FinishedRun& run) {
  if (run.ids.empty() || layer_.end_expert <= layer_.first_expert) return;
  std::vector<int32_t> rows(static_cast<size_t>(layer_.end_expert - layer_.first_expert));
  int64_t slots = 0;
  for (const std::span<const int32_t> ids : run.ids) {
    for (const int32_t id : ids) {
      if (id < layer_.first_expert || id >= layer_.end_expert) continue;
      ++rows[static_cast<size_t>(id - layer_.first_expert)];
      ++slots;
    }
  }
  if (slots == 0) return;
  int64_t most = 0, distinct = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == 0) continue;
    ++distinct;
    most = std::max<int64_t>(most, rows[i]);
    if (i < expert_rows_.size()) Raise(&expert_rows_[i], rows[i]);
  }
  Raise(&experts_, distinct);
  imbalance_.Observe(most * static_cast<int64_t>(rows.size()) * 100 / slots);
}

namespace {

// One histogram of each model.
void AddModelMetrics(const std::vector<std::shared_ptr<const LayerMetrics>>& layers, std::vector<prometheus::MetricFamily>* out) {
  std::map<std::string, const ModelMetrics*> models;
  for (const auto& layer : layers) models[layer->layer().model] = layer->model().get();
  MetricFamily stages("moed_forward_stage_seconds", MetricType::Histogram,
                      "Time of answered forwards by stage; total is all of them");
  MetricFamily rows("moed_forward_rows", MetricType::Histogram, "Rows of answered forwards");
  for (const auto& [name, model] : models) {
    const std::pair<const char*, const MetricHistogram*> all[] = {{"receive", &model->receive}, {"queue", &model->queue},
                                                                  {"compute", &model->compute}, {"send", &model->send},
                                                                  {"total", &model->total}};
    for (const auto& [stage, histogram] : all) stages.Add({{"model", name}, {"stage", stage}}, *histogram);
    rows.Add({{"model", name}}, model->rows);
  }
  out->push_back(stages.Take());
  out->push_back(rows.Take());
}

}  // namespace

void AddForwardCodes(const std::vector<std::shared_ptr<const LayerMetrics>>& layers, MetricFamily* family) {
  for (const auto& layer : layers) layer->codes_.Add(layer->Labels(), true, family);
}

void AddLayerMetrics(const std::vector<std::shared_ptr<const LayerMetrics>>& layers, std::vector<prometheus::MetricFamily>* out) {
  AddModelMetrics(layers, out);
  MetricFamily seconds("moed_forward_seconds", MetricType::Histogram,
                       "Time of answered forwards, from the whole request to its answer");
  MetricFamily run_seconds("moed_run_seconds", MetricType::Histogram, "Time that runs computed");
  MetricFamily run_rows("moed_run_rows", MetricType::Histogram, "Rows of runs, those of all forwards that share one");
  MetricFamily imbalance("moed_run_imbalance_ratio", MetricType::Histogram,
                         "Most rows of an expert in a run, by the mean over held experts");
  MetricFamily distinct("moed_run_experts_total", MetricType::Counter,
                        "Experts that had rows, added up over runs whose routing is known");
  MetricFamily merged("moed_merged_forwards_total", MetricType::Counter, "Forwards, or pieces of them, that shared a run");
  MetricFamily experts("moed_expert_rows_total", MetricType::Counter, "Rows of each expert (--expert-metrics)");
  for (const auto& layer : layers) {
    const MetricFamily::Labels labels = layer->Labels();
    seconds.Add(labels, layer->seconds_);
    run_seconds.Add(labels, layer->run_seconds_);
    run_rows.Add(labels, layer->run_rows_);
    imbalance.Add(labels, layer->imbalance_);
    distinct.Add(labels, Value(layer->experts_));
    merged.Add(labels, Value(layer->merged_));
    for (size_t i = 0; i < layer->expert_rows_.size(); ++i) {
      MetricFamily::Labels all = labels;
      all.emplace_back("expert", absl::StrCat(static_cast<size_t>(layer->layer().first_expert) + i));
      experts.Add(all, Value(layer->expert_rows_[i]));
    }
  }
  for (MetricFamily* family : {&seconds, &run_seconds, &run_rows, &imbalance, &distinct, &merged}) out->push_back(family->Take());
  if (prometheus::MetricFamily each = experts.Take(); !each.metric.empty()) out->push_back(std::move(each));
}

}  // namespace moed
