// Where Prometheus collects: GET /metrics in clear text, by prometheus-cpp's own HTTP server and its threads.
#ifndef MOED_SERVER_METRICS_LISTENER_H_
#define MOED_SERVER_METRICS_LISTENER_H_

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace moed {

class MetricsListener {
 public:
  // Listens on `address`, HOST:PORT with 0 for any port, until the object goes; a host of several addresses gets the first that can
  // be bound. UNAVAILABLE with `option`, the address and the reason. What `metrics` collects is shown; it is held.
  static absl::StatusOr<std::unique_ptr<MetricsListener>> Listen(const std::string& option, const std::string& address,
                                                                 std::shared_ptr<prometheus::Collectable> metrics);

  // As bound.
  const std::string& address() const { return address_; }

 private:
  MetricsListener(std::shared_ptr<prometheus::Collectable> metrics, std::unique_ptr<prometheus::Exposer> exposer,
                  std::string address);

  const std::shared_ptr<prometheus::Collectable> metrics_;
  const std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string address_;
};

}  // namespace moed

#endif  // MOED_SERVER_METRICS_LISTENER_H_
