// What a metric counts with: a histogram of whole numbers without a lock, and families in the form that prometheus-cpp exposes.
//
// The library's own histogram takes a lock for each observation, which calls of all layers would share; these are relaxed atomics,
// so a collection beside observations may see one of them in half of its numbers.
#ifndef MOED_SERVER_METRIC_VALUES_H_
#define MOED_SERVER_METRIC_VALUES_H_

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace moed {

class MetricHistogram {
 public:
  // Bounds in ascending order, which must outlive the object; a last one without bound is added. `per_unit` of what is
  // observed make one of the metric's unit: 1e6 for microseconds of a metric in seconds.
  MetricHistogram(std::span<const int64_t> bounds, double per_unit);

  void Observe(int64_t value);
  prometheus::ClientMetric::Histogram Collect() const;

 private:
  const std::span<const int64_t> bounds_;
  const double per_unit_;
  std::vector<std::atomic<uint64_t>> counts_;  // one for each bound, and one beyond
  std::atomic<int64_t> sum_{0};
};

// A metric with all of its series.
class MetricFamily {
 public:
  using Labels = std::vector<std::pair<const char*, std::string>>;

  MetricFamily(const char* name, prometheus::MetricType type, const char* help);

  // A counter or a gauge.
  void Add(const Labels& labels, double value);
  void Add(const Labels& labels, const MetricHistogram& histogram);
  // Takes the content.
  prometheus::MetricFamily Take() { return std::move(family_); }

 private:
  prometheus::ClientMetric& NewSeries(const Labels& labels);

  prometheus::MetricFamily family_;
};

}  // namespace moed

#endif  // MOED_SERVER_METRIC_VALUES_H_
