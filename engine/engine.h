// The engine: models, their layers, loading and forward. No RPC, no protobuf.
//
// Threads: Load, Forward and SelfCheck may be called from any thread. Calls of layers on the host's processors take turns on one
// worker pool; calls of layers on an accelerator wait for one of its lanes, so that as many as there are lanes run at once,
// beside a call on the host. All others may be called at any time and do not wait for calls. A model's layers do not change after
// Load. Locks are taken in the order compute turn, lane, device_mutex_. An accelerator that failed stays failed: its layers are
// kFailed from then on, those on the host go on. An engine owns one pool, whatever the number of its models; a process that makes
// several engines has as many pools.
#ifndef MOED_ENGINE_ENGINE_H_
#define MOED_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/activations.h"
#include "engine/call_memory.h"
#include "engine/explain.h"
#include "engine/memory_need.h"
#include "engine/model_config.h"
#include "engine/oracle.h"
#include "engine/weights.h"
#include "kernels/moe_kernel.h"

namespace moed {

struct EngineOptions {
  int threads = 0;              // 0: as many as usable processors and the CPU quota keep busy
  bool pin_threads = false;     // each worker on one of the usable processors, in order; those beyond the last stay free
  Policy policy;
  bool deterministic = false;
  ActivationChoice activations = ActivationChoice::kFile;
  // Experts [first_expert, end_expert) are held, end_expert 0 means all: ids outside contribute 0, so that the results of
  // servers that hold the ranges of a partition sum to the whole. The shared expert belongs to the range that starts at 0.
  int first_expert = 0;
  int end_expert = 0;
  std::vector<int> layers;      // the MoE layers to hold; empty: all. Others are as if the checkpoint did not have them
  int64_t max_tokens = 8192;    // rows computed at once; larger calls go in chunks
  uint64_t memory_limit = 0;    // bytes of the host's memory that weights and workspace may take; 0: no limit of moed's own
  int lanes = kDefaultLanes;    // calls of layers on an accelerator that run at once, at least 1
  DeviceInfo device;            // usually LinkedDevice(), with masked features
};

// Caller-chosen routing: final weights, nothing is added by the server.
struct RoutingByIds {
  int top_k = 0;
  std::span<const int32_t> ids;    // [M, k], -1 is "no expert"
  std::span<const float> weights;  // [M, k]
};
// Router logits after the router's bias, before any correction bias: the checkpoint's rule applies, scaling included.
struct RoutingByLogits {
  std::span<const float> logits;  // [M, E]
};
// Nothing sent: the checkpoint's own gate decides.
struct RoutingByGate {};

struct ForwardCall {
  int layer = 0;
  TensorView hidden;  // [M, H] f32, bf16 or f16; on the device only for layers that are wholly on an accelerator
  std::variant<RoutingByGate, RoutingByIds, RoutingByLogits> routing;
  bool routed_only = false;  // leave out the shared expert
  // Of hidden, which is on the host, while it is still being written; null: all of it is there. Layers that are wholly on an
  // accelerator start at once, others wait for all of it first. A call that fails may return without having waited.
  IncomingRows* incoming = nullptr;
};

// What ran.
struct ForwardInfo {
  std::string backend;
  std::string scheme;
  uint64_t generation = 0;
  uint64_t weights_id = 0;  // the first 16 digits of the weights' hash; 0: there are none
  uint64_t layer_weights_id = 0;  // the same of this layer's weights alone, whatever other layers are held
  int64_t compute_us = 0;
  int64_t batch_rows = 0;  // of all calls that were computed together
  // The routing that was used [M, k]; filled only when the caller asks by `want_routing`.
  bool want_routing = false;
  int top_k = 0;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// A call among several of one layer that are computed together.
struct ForwardPart {
  ForwardCall call;
  MutableTensorView out;
  ForwardInfo info;
  absl::Status status;  // how it ended; written by Engine::Forward
};

// Whether calls of one layer can be computed together: on the host, hidden states of one dtype, routed in the same way.
bool MayShareRun(const ForwardCall& a, const ForwardCall& b);

// Rows [first, first + rows) of `call`, all of which must be there already.
ForwardCall RowsOf(const ForwardCall& call, int64_t first, int64_t rows);

// A layer's state as a watcher may rely on it.
enum class LayerState : uint8_t {
  kPlanned,  // found and checked; calls get UNAVAILABLE
  kLoading,  // weights are being repacked
  kReady,    // a forward succeeds
  kFailed,   // will not become ready; Status says why
};
const char* LayerStateName(LayerState state);

struct LayerStatus {
  int layer = 0;
  LayerState state = LayerState::kPlanned;
  std::string scheme;           // what the file says
  std::string executed_scheme;  // what runs
  std::string backend;
  std::string note;             // of the oracle
  uint64_t bytes = 0;           // held by the repacked experts, shared included
  uint64_t file_bytes = 0;
  std::vector<int> numa_nodes;  // where the experts lie, as found after loading; empty: unknown
};

// What computes, and on what.
struct HostStatus {
  int threads = 0;
  std::string threads_limit;    // what keeps them from being more: "affinity", "cgroup quota 2.0", "operator's choice"
  bool pinned = false;
  int processors = 0;           // usable: in the affinity mask
  double cpu_quota = 0;         // of the cgroup, in processors; 0: none
  std::vector<int> numa_nodes;  // of the usable processors; empty: unknown
  std::string gpu;              // its name; empty: none that may be used
  uint64_t gpu_free_bytes = 0;
};

struct ModelStatus {
  std::string name;
  std::string path;
  LayerState state = LayerState::kPlanned;
  std::string error;            // when kFailed
  uint64_t generation = 0;
  std::string weights_hash;     // weights_hash.h; empty until the model is loaded, and where it has no weights
  int64_t hidden = 0;
  int num_experts = 0;
  int first_expert = 0, end_expert = 0;  // experts [first_expert, end_expert) are held
  int top_k = 0;
  // What of the checkpoint is not read (stray files, tensors of other parts of the model), and where an option does not apply.
  std::vector<std::string> notes;
  std::vector<LayerStatus> layers;
};

// One row of a self-check: a layer's backend against the reference on the loaded weights.
struct SelfCheckRow {
  int layer = 0;
  std::string backend;
  std::string scheme;
  int64_t tokens = 0;
  double max_rel = 0.0;
  double bound = 0.0;
  bool passed = false;
};

// How far a load is: `done` of `total` layers, the last one being `layer`; bytes of their experts' tensors in the files.
struct LoadProgress {
  int done = 0;
  int total = 0;
  int layer = 0;
  uint64_t file_bytes = 0;
  uint64_t total_file_bytes = 0;
};

class LaneSet;      // an accelerator's lanes
class Model;        // one checkpoint and its layers
class SharedCache;  // device memory of other processes
struct LoadedLayer;
struct LoadTools;
struct Scratch;     // buffers that calls reuse

class Engine {
 public:
  // `backends` in priority order; they must outlive the engine.
  Engine(EngineOptions options, std::vector<const Backend*> backends);
  ~Engine();

  // Reads config and headers, asks the oracle for every layer, and registers the model in state kPlanned; no weight is
  // read. Errors as ReadModelConfig, Checkpoint::Open, PlanLayer and Choose; ALREADY_EXISTS for a name that is taken; NOT_FOUND
  // for one of EngineOptions::layers that the checkpoint lacks;
  // RESOURCE_EXHAUSTED when the host's memory, the memory limit or the GPU's memory cannot hold it (needed and allowed bytes).
  absl::Status Plan(const std::string& name, const std::string& path);

  // Registers a model whose one layer, number 0, gives back its input [M, hidden]; ALREADY_EXISTS for a name that is taken. To be
  // loaded like any other.
  absl::Status PlanBench(const std::string& name, int64_t hidden);

  // Loads all layers of a planned model; FAILED_PRECONDITION for one that is not in state kPlanned. `progress` (may be empty)
  // is called after each layer from the calling thread. On an error the model is kFailed and the error is returned.
  absl::Status Load(const std::string& name, const std::function<void(const LoadProgress&)>& progress);

  // Changes of what is served, while calls come. Each loads beside what is there, with threads of its own, checks the loaded
  // layers as Load does, and only then flips: a call is computed wholly by the old or by the new weights, and every answer
  // tells which by its generation. It returns when no call uses the old weights any more and their memory is free. After an
  // error, and when `go_on` (may be empty), which is asked after each layer, returns one, the same weights are served as
  // before. One change at a time: FAILED_PRECONDITION while another is under way.
  using GoOn = std::function<absl::Status(const LoadProgress&)>;
  // Adds a model. Errors as Plan and Load.
  absl::Status Add(const std::string& name, const std::string& path, const GoOn& go_on);
  // Replaces the weights of a model by those of `path`; shapes may differ. `keep`: the old ones stay in memory for
  // Rollback; those that were kept before are freed first. RESOURCE_EXHAUSTED with needed and free bytes when both do not fit.
  absl::Status Swap(const std::string& name, const std::string& path, bool keep, const GoOn& go_on);
  // Takes back the last Swap: at once where the old weights were kept, else by loading their path again. FAILED_PRECONDITION
  // when there was none.
  absl::Status Rollback(const std::string& name, const GoOn& go_on);
  // Removes a model, its kept weights included.
  absl::Status Remove(const std::string& name);

  // out [M, H] in out.dtype. NOT_FOUND for model or layer; UNAVAILABLE before the layer is ready and when its accelerator failed,
  // with the reason; INVALID_ARGUMENT with the numbers for everything that is wrong with the call. An empty `model` means the
  // only one. After an error `out` may be partly written. Like the hidden states, `out` may be on the device for layers that are
  // wholly on an accelerator.
  absl::Status Forward(const std::string& model, const ForwardCall& call, MutableTensorView out, ForwardInfo* info);

  // The same for several calls, all of layer parts[0].call.layer, whose rows are computed as those of one call where MayShareRun
  // and RowsStandAlone allow it, else one after the other. Each part ends as it would alone: what is wrong with one is its own, a
  // failure of the device is everybody's.
  void Forward(const std::string& model, std::span<ForwardPart> parts);

  // Whether a row's result does not depend on the other rows of its call, so that calls of the layer may be computed together or in
  // pieces. False where activation scales span the request, and for layers that are not there.
  bool RowsStandAlone(const std::string& model, int layer) const;

  // Runs `tokens` random rows through layer `layer` (-1: every layer) and compares with the reference, on the loaded
  // weights of the active backend and on the weights of the file for the reference.
  absl::StatusOr<std::vector<SelfCheckRow>> SelfCheck(const std::string& model, int layer, int64_t tokens, uint64_t seed);

  std::vector<ModelStatus> Status() const;
  // With the free memory of the GPU as it is now, once a layer was loaded there.
  HostStatus Host() const;

  // Memory for `bytes` of hidden states or output of calls of that layer: pinned, when the layer is wholly on an accelerator and
  // ready, else from the heap. Usable with any other call, and after the engine. RESOURCE_EXHAUSTED with the bytes.
  absl::StatusOr<CallMemory> AllocateForCall(const std::string& model, int layer, size_t bytes) const;

  // Device memory of another process, for calls of that layer. INVALID_ARGUMENT when the layer is not wholly on an accelerator,
  // and as Accelerator::OpenShared; NOT_FOUND and UNAVAILABLE as Forward. The memory is kept open for later calls (see
  // shared_cache.h).
  absl::StatusOr<std::shared_ptr<const SharedMemory>> OpenShared(const std::string& model, int layer, const SharedHandle& handle);

  // Pins memory that the caller has mapped, while the returned object lives, for layers on the accelerator to read and write
  // without a copy. Null where no layer is on one, or the system refuses: calls work all the same.
  std::shared_ptr<void> PinForCalls(std::span<std::byte> memory);

  // Whether a planned layer is on a GPU.
  bool UsesGpu() const;
  // Calls that can run at once: the number of lanes when a planned layer is on a GPU, else 1.
  int CallsAtOnce() const { return UsesGpu() ? options_.lanes : 1; }
  // OK, or UNAVAILABLE with the first failure of the accelerator that layers are on, which is asked.
  absl::Status DeviceHealth();

  // For a thread that will call Load, Forward and SelfCheck and nothing else, since threads that it starts inherit this: with
  // pin_threads it runs on the first usable processor from now on. False when the operating system refuses.
  bool PinComputeThread() const;

  // Facts that a caller needs to size a request. NOT_FOUND lists the models.
  absl::StatusOr<ModelStatus> FindModel(const std::string& name) const;
  absl::StatusOr<ExplainReport> Explain(const std::string& name) const;

 private:
  absl::Status Register(std::shared_ptr<Model> model);
  // Whether all models and `added` fit into the memory of the host and that of the GPU. models_mutex_ must be held.
  absl::Status CheckMemory(const Model& added) const;
  absl::StatusOr<std::shared_ptr<Model>> Get(const std::string& name) const;
  struct Past;
  absl::StatusOr<std::string> KnownName(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<Model>> LoadBeside(const std::string& name, const std::string& path, const GoOn& go_on);
  absl::Status LoadLayers(Model& model, const LoadTools& tools, std::mutex* turn, const GoOn& go_on);
  absl::Status Replace(const std::string& name, std::shared_ptr<Model> with, bool keep);
  void Release(std::shared_ptr<Model> model);
  // The lanes of `accelerator`, made by the first call. UNIMPLEMENTED for a second accelerator.
  absl::StatusOr<LaneSet*> LanesOf(Accelerator& accelerator);
  // The first failure of the accelerator so far, without asking it.
  absl::Status KnownFailure() const;
  // Keeps the first failure: UNAVAILABLE with the accelerator's name and the reason, which is returned.
  absl::Status DeviceFailed(const absl::Status& reason);
  // `status` of work on a layer of an accelerator: UNAVAILABLE means that the device failed.
  absl::Status OfDevice(const absl::Status& status) { return absl::IsUnavailable(status) ? DeviceFailed(status) : status; }
  absl::Status ForwardInTurn(const Model& model, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                             ForwardInfo* info);
  absl::Status ForwardReady(const Model& model, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                            ForwardInfo* info);
  // False: nothing was computed, since one of the parts' logits cannot be routed; each must run alone.
  bool ForwardMerged(const Model& model, const LoadedLayer& layer, std::span<ForwardPart* const> parts);
  absl::StatusOr<CallMemory> AllocateFor(const LoadedLayer& layer, size_t bytes) const;
  absl::StatusOr<SelfCheckRow> CheckInTurn(const LoadedLayer& layer, const Backend& reference, int64_t tokens, uint64_t seed);

  const EngineOptions options_;
  const std::vector<const Backend*> backends_;
  const std::vector<int> pinned_to_;  // worker w on pinned_to_[w]; empty: anywhere
  const HostStatus host_;
  std::unique_ptr<WorkerPool> pool_;
  mutable std::mutex device_mutex_;          // guards the next four
  std::unique_ptr<LaneSet> lanes_;           // of the accelerator that layers are on; null: none so far. Never replaced
  std::shared_ptr<PinnedCache> call_memory_;  // made with lanes_
  std::unique_ptr<SharedCache> shared_;      // made with lanes_; never replaced
  absl::Status device_failure_;              // the first
  mutable std::mutex models_mutex_;          // guards models_
  std::vector<std::shared_ptr<Model>> models_;
  std::map<std::string, Past> past_;         // by model; guarded by models_mutex_
  std::mutex change_mutex_;                  // one change at a time
  std::mutex compute_mutex_;                 // one call computes on the host at a time; guards scratch_
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace moed

#endif  // MOED_ENGINE_ENGINE_H_
