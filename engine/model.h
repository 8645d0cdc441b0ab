// A model in the engine: its checkpoint, its layers and their states.
//
// Built by PlanFrom on one thread; then Load fills the layers one by one while other threads look at states. A layer's
// weights are published with its state: whoever sees kReady under the mutex may use them without it from then on.
#ifndef MOED_ENGINE_MODEL_H_
#define MOED_ENGINE_MODEL_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/weights_hash.h"

namespace moed {

class LaneSet;

// What a layer needs to run: immutable once the layer is ready.
struct LoadedLayer {
  LayerPlan plan;                          // of the experts that are held
  int first_expert = 0;                    // the model's number of the first of them
  std::string file_scheme;                 // in words; differs from what runs when the operator chose other activations
  Choice choice;
  Choice shared_choice;                    // backend is null without a shared expert
  std::unique_ptr<PreparedMoe> routed;
  std::unique_ptr<PreparedMoe> shared;     // null without a shared expert
  GateWeights gate;
  std::unique_ptr<DeviceLayer> device;     // the whole layer, when all of it is on an accelerator; points into what is above
  LaneSet* lanes = nullptr;                // of the accelerator that has a part of it; null: all on the host
  std::vector<int> numa_nodes;             // of the experts; empty: unknown
  uint64_t weights_id = 0;                 // as WeightsId of a model with this layer alone; 0: it has no tensors
};

// INVALID_ARGUMENT: a tensor in device memory for a layer that is not wholly on an accelerator; names its backends.
absl::Status NotOnDevice(const LoadedLayer& layer);

// The routed experts or the shared expert of a layer, which are chosen, prepared and checked alike.
struct LayerPart {
  const char* name;  // "" or ", shared expert", for messages
  MoeDesc* desc;
  const ExpertReader* experts;
  Choice* choice;
  std::unique_ptr<PreparedMoe>* prepared;
};

// What loading a layer uses.
struct LoadTools {
  WorkerPool& pool;  // nobody else may compute on it meanwhile
  Scratch& scratch;  // for calls on the host
  // The lanes of an accelerator, made when they are first asked for. Errors as LaneSet::Make.
  std::function<absl::StatusOr<LaneSet*>(Accelerator&)> lanes;
};

class Model {
 public:
  // Reads config and headers, plans all layers and asks the oracle for each. Errors as Engine::Plan.
  static absl::StatusOr<std::shared_ptr<Model>> PlanFrom(const std::string& name, const std::string& path,
                                                         const EngineOptions& options,
                                                         std::span<const Backend* const> backends);

  // A model of one layer, number 0, with one expert and `hidden` features, that gives back its input and has no weights: for
  // measuring what surrounds a layer.
  static std::shared_ptr<Model> Bench(const std::string& name, int64_t hidden, const EngineOptions& options);

  const std::string& name() const { return name_; }
  const std::string& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  // What was decided at planning and, for quarantined backends, at loading.
  ExplainReport report() const;
  int layer_count() const { return static_cast<int>(layers_.size()); }
  // Of the experts' tensors of layer number `index` in load order, as stored.
  uint64_t file_bytes(int index) const { return layers_[index]->plan.file_bytes; }
  uint64_t generation() const { return generation_.load(); }
  // Of the hash of its weights, once it is loaded (weights_hash.h); 0: it has none.
  uint64_t weights_id() const { return weights_id_.load(std::memory_order_relaxed); }
  // Before the model is served, or served again.
  void SetGeneration(uint64_t generation) { generation_.store(generation); }

  // What the planned layers hold, and the largest workspace of one.
  MemoryNeed need() const;

  // FAILED_PRECONDITION unless the model is kPlanned; else it is kLoading, so that only one caller loads it.
  absl::Status BeginLoad();
  // Loads layer `index` (not its number): prepares routed and shared experts, compares both with the reference on the loaded
  // weights, and reads the gate. A backend that fails the comparison is quarantined for this layer and the next
  // fitting one is taken, unless the policy requires it. A layer that is wholly on one accelerator is assembled there and warmed
  // up on every lane. The caller must hold no lane.
  absl::Status LoadLayer(int index, const LoadTools& tools);
  // After the last layer, or with the error that ended loading.
  void FinishLoad(const absl::Status& status);

  // The layer with that number, ready to run. NOT_FOUND lists the layers; UNAVAILABLE while it is not ready.
  absl::StatusOr<const LoadedLayer*> Ready(int layer) const;

  // Whether a layer was planned on a GPU. Fixed by PlanFrom.
  bool OnGpu() const { return on_gpu_; }

  // `device` is the health of the accelerator that layers are on: when it failed, they are kFailed and so is the model.
  ModelStatus Status(const absl::Status& device) const;

 private:
  Model(EngineOptions options, std::vector<const Backend*> backends)
      : options_(std::move(options)), backends_(std::move(backends)) {}
  void TakePlans(std::vector<LayerPlan> plans);
  absl::Status ApplyExpertRange();
  absl::Status ChooseBackends();
  absl::Status ChooseFor(int layer, std::span<const Backend* const> backends, MoeDesc* desc, Choice* out) const;
  absl::Status PrepareChecked(int index, LayerPart part, const LoadTools& tools);
  absl::StatusOr<SelfCheckRow> CheckLoaded(int number, const LayerPart& part, const Backend& reference,
                                           const LoadTools& tools) const;
  absl::Status PlaceOnAccelerator(LoadedLayer& layer, const LoadTools& tools) const;
  absl::Status Assemble(LoadedLayer& layer) const;
  void FindTensors();
  void Quarantine(int index, const std::string& backend, const std::string& why);
  absl::Status Accept(int index, const LayerPart& part);

  const EngineOptions options_;
  const std::vector<const Backend*> backends_;  // in priority order
  std::string name_;
  std::string path_;
  ModelConfig config_;
  std::unique_ptr<Checkpoint> checkpoint_;  // null: a bench model
  std::vector<std::unique_ptr<LoadedLayer>> layers_;
  std::vector<std::string> notes_;
  std::atomic<uint64_t> generation_{1};
  std::atomic<uint64_t> weights_id_{0};
  bool on_gpu_ = false;
  std::vector<std::vector<NamedTensor>> tensors_;  // of each layer, while it is loaded
  std::vector<std::string> hashes_;                // of those that are

  mutable std::mutex mutex_;  // guards what follows
  ExplainReport report_;
  std::vector<LayerState> states_;
  LayerState state_ = LayerState::kPlanned;
  std::string error_;
  std::string weights_hash_;
};

}  // namespace moed

#endif  // MOED_ENGINE_MODEL_H_
