#include "server/metric_values.h"

#include <algorithm>
#include <limits>

namespace moed {

MetricHistogram::MetricHistogram(std::span<const int64_t> bounds, double per_unit)
    : bounds_(bounds), per_unit_(per_unit), counts_(bounds.size() + 1) {}

void MetricHistogram::Observe(int64_t value) {
  const size_t bucket = static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin());
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

prometheus::ClientMetric::Histogram MetricHistogram::Collect() const {
  prometheus::ClientMetric::Histogram out;
  out.sample_sum = static_cast<double>(sum_.load(std::memory_order_relaxed)) / per_unit_;
  uint64_t count = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    count += counts_[i].load(std::memory_order_relaxed);
    const double bound = i < bounds_.size() ? static_cast<double>(bounds_[i]) / per_unit_ : std::numeric_limits<double>::infinity();
    out.bucket.push_back({count, bound});
  }
  out.sample_count = count;
  return out;
}

MetricFamily::MetricFamily(const char* name, prometheus::MetricType type, const char* help) : family_{name, help, type, {}} {}

prometheus::ClientMetric& MetricFamily::NewSeries(const Labels& labels) {
  prometheus::ClientMetric& series = family_.metric.emplace_back();
  series.label.reserve(labels.size());
  for (const auto& [name, value] : labels) series.label.push_back({name, value});
  return series;
}

void MetricFamily::Add(const Labels& labels, double value) {
  prometheus::ClientMetric& series = NewSeries(labels);
  (family_.type == prometheus::MetricType::Counter ? series.counter.value : series.gauge.value) = value;
}

void MetricFamily::Add(const Labels& labels, const MetricHistogram& histogram) {
  NewSeries(labels).histogram = histogram.Collect();
}

}  // namespace moed
