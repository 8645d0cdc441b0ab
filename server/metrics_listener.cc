#include "server/metrics_listener.h"

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "server/address.h"

namespace moed {
namespace {

constexpr size_t kThreads = 3;  // collections at once: a few, so that one that hangs keeps nobody else away

// Null when it cannot be bound, which the library tells by an exception without the reason.
std::unique_ptr<prometheus::Exposer> Bind(const std::string& address) {
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(address, kThreads);
    return exposer->GetListeningPorts().empty() ? nullptr : std::move(exposer);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

MetricsListener::MetricsListener(std::shared_ptr<prometheus::Collectable> metrics, std::unique_ptr<prometheus::Exposer> exposer,
                                 std::string address)
    : metrics_(std::move(metrics)), exposer_(std::move(exposer)), address_(std::move(address)) {
  exposer_->RegisterCollectable(metrics_);
}

absl::StatusOr<std::unique_ptr<MetricsListener>> MetricsListener::Listen(const std::string& option, const std::string& address,
                                                                         std::shared_ptr<prometheus::Collectable> metrics) {
  for (const std::string& numeric : NumericAddresses(address)) {
    std::unique_ptr<prometheus::Exposer> exposer = Bind(numeric);
    if (exposer == nullptr) continue;
    std::string bound = BoundAddress(address, exposer->GetListeningPorts().front());
    return std::unique_ptr<MetricsListener>(new MetricsListener(std::move(metrics), std::move(exposer), std::move(bound)));
  }
  return BindFailure(option, address);
}

}  // namespace moed
