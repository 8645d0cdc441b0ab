// A model without a checkpoint, whose one layer gives back its input: what is left of a call is what a server costs.
#include <cstring>
#include <vector>

#include "engine/model.h"
#include "kernels/convert.h"

namespace moed {
namespace {

class EchoMoe : public PreparedMoe {
 public:
  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext&) const override {
    if (batch.x.dtype == out.dtype) {
      if (out.bytes() > 0) std::memcpy(out.data, batch.x.data, out.bytes());
      return absl::OkStatus();
    }
    std::vector<float> row(static_cast<size_t>(out.cols));
    for (int64_t r = 0; r < out.rows; ++r) {
      RowToFloat(batch.x, r, row.data());
      RowFromFloat(row.data(), r, out);
    }
    return absl::OkStatus();
  }
  size_t WorkspaceBytes(int64_t, int) const override { return 0; }
  absl::Status RunBatched(const BatchedExperts&, MutableTensorView, ExecContext&) const override {
    return absl::FailedPreconditionError("echo: was prepared without the format of batched experts");
  }
  size_t BatchedWorkspaceBytes(int64_t) const override { return 0; }
  size_t ResidentBytes() const override { return 0; }
  const QuantScheme& ExecutedScheme() const override { return scheme_; }

 private:
  const QuantScheme scheme_{};
};

class EchoBackend : public Backend {
 public:
  std::string Name() const override { return "echo"; }
  std::string Description() const override { return "gives back its input; for --bench-layer only"; }
  bool Automatic() const override { return false; }
  Verdict Check(const MoeDesc&, const DeviceInfo&) const override { return {}; }
  size_t PreparedBytes(const MoeDesc&) const override { return 0; }
  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc&, const ExpertReader&, WorkerPool&) const override {
    return std::unique_ptr<PreparedMoe>(std::make_unique<EchoMoe>());
  }
};

const EchoBackend& Echo() {
  static const EchoBackend* const backend = new EchoBackend;  // never freed: models may outlive every static object
  return *backend;
}

}  // namespace

std::shared_ptr<Model> Model::Bench(const std::string& name, int64_t hidden, const EngineOptions& options) {
  std::shared_ptr<Model> model(new Model(options, {}));
  model->name_ = name;
  model->path_ = "--bench-layer";
  model->config_.num_layers = 1;
  model->config_.moe_layers = {0};
  model->config_.hidden = hidden;
  model->config_.num_experts = model->config_.top_k = 1;
  auto layer = std::make_unique<LoadedLayer>();
  layer->plan.routed.num_experts = layer->plan.routed.top_k = 1;
  layer->plan.routed.hidden = hidden;
  layer->plan.routed.max_tokens = options.max_tokens;
  layer->file_scheme = "none";
  layer->choice.backend = &Echo();
  layer->routed = std::make_unique<EchoMoe>();
  layer->gate.weight.assign(static_cast<size_t>(hidden), 0.0f);
  model->layers_.push_back(std::move(layer));
  model->states_ = {LayerState::kPlanned};
  LayerExplanation explanation;
  explanation.scheme = "none";
  explanation.choice = Echo().Name();
  explanation.backends = {{Echo().Name(), {}}};
  model->report_.device = options.device.name;
  model->report_.lanes = options.lanes;
  model->report_.layers.push_back(std::move(explanation));
  return model;
}

}  // namespace moed
