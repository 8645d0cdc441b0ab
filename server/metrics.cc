#include "server/metrics.h"

namespace moed {

Metrics::Metrics(bool each_expert, std::function<ServerState()> state)
    : each_expert_(each_expert), state_(std::move(state)), totals_(std::make_shared<TotalMetrics>()) {}

std::shared_ptr<LayerObserver> Metrics::OfLayer(const ObservedLayer& layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(layers_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<LayerMetrics>& known = layers_[{layer.model, layer.layer}];
  if (std::shared_ptr<LayerMetrics> alive = known.lock()) {
    const bool same = alive->layer().first_expert == layer.first_expert && alive->layer().end_expert == layer.end_expert;
    if (same) return alive;  // with other experts there is nothing to go on with
  }
  std::shared_ptr<ModelMetrics> model;
  for (const auto& [key, other] : layers_) {
    const std::shared_ptr<LayerMetrics> alive = key.first == layer.model ? other.lock() : nullptr;
    if (alive != nullptr) model = alive->model();
  }
  if (model == nullptr) model = std::make_shared<ModelMetrics>();
  auto made = std::make_shared<LayerMetrics>(layer, each_expert_, std::move(model), totals_);
  known = made;
  return made;
}

void Metrics::Finished(const FinishedForward& forward) {
  unknown_.Count(forward);
  totals_->Count(forward);
}

std::vector<std::shared_ptr<const LayerMetrics>> Metrics::Layers() const {
  std::vector<std::shared_ptr<const LayerMetrics>> layers;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, layer] : layers_) {
    if (std::shared_ptr<const LayerMetrics> alive = layer.lock()) layers.push_back(std::move(alive));
  }
  return layers;
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  std::vector<prometheus::MetricFamily> out;
  const std::vector<std::shared_ptr<const LayerMetrics>> layers = Layers();
  MetricFamily forwards("moed_forwards_total", prometheus::MetricType::Counter,
                        "Forwards that ended; without model and layer where these were not known");
  unknown_.Add({}, false, &forwards);
  AddForwardCodes(layers, &forwards);
  out.push_back(forwards.Take());
  AddLayerMetrics(layers, &out);
  totals_->Add(&out);
  AddStateMetrics(state_(), &out);
  AddProcessMetrics(ReadProcessStats(), &out);
  return out;
}

}  // namespace moed
