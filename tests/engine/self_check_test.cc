// The self-check at load: a backend that computes wrong numbers never becomes the active one, and everybody is told.
#include <catch2/catch.hpp>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "kernels/numa.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

const Backend* Find(const std::string& name) {
  for (const Backend* backend : LinkedBackends()) {
    if (backend->Name() == name) return backend;
  }
  return nullptr;
}

// A backend that is right but for one fault.
class PlantedFault : public Backend {
 public:
  enum class Fault { kHalvesOutput, kHalvesBf16, kOneExpertZero, kNone };
  explicit PlantedFault(Fault fault) : fault_(fault) {}

  std::string Name() const override { return "cpu_planted"; }
  std::string Description() const override { return "wrong on purpose"; }
  Verdict Check(const MoeDesc&, const DeviceInfo&) const override { return {}; }
  size_t PreparedBytes(const MoeDesc& desc) const override { return inner_->PreparedBytes(desc); }
  size_t WorkspaceBytes(const MoeDesc& desc) const override { return inner_->WorkspaceBytes(desc); }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    auto moe = inner_->Prepare(desc, reader, pool);
    if (!moe.ok()) return moe.status();
    return std::make_unique<Moe>(*std::move(moe), fault_);
  }

 private:
  class Moe : public PreparedMoe {
   public:
    Moe(std::unique_ptr<PreparedMoe> inner, Fault fault) : inner_(std::move(inner)), fault_(fault) {}
    absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override {
      MoeBatch changed = batch;
      std::vector<int32_t> ids(batch.ids.begin(), batch.ids.end());
      std::vector<float> weights(batch.weights.begin(), batch.weights.end());
      for (size_t at = 0; at < ids.size(); ++at) {
        if (fault_ == Fault::kHalvesOutput) weights[at] *= 0.5f;
        if (fault_ == Fault::kHalvesBf16 && batch.x.dtype == DType::kBf16) weights[at] *= 0.5f;
        if (fault_ == Fault::kOneExpertZero && ids[at] == 1) ids[at] = -1;
      }
      changed.ids = ids;
      changed.weights = weights;
      return inner_->Run(changed, out, context);
    }
    absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const override {
      return inner_->RunBatched(batch, out, context);
    }
    size_t WorkspaceBytes(int64_t tokens, int top_k) const override { return inner_->WorkspaceBytes(tokens, top_k); }
    size_t BatchedWorkspaceBytes(int64_t rows) const override { return inner_->BatchedWorkspaceBytes(rows); }
    size_t ResidentBytes() const override { return inner_->ResidentBytes(); }
    std::vector<std::span<const std::byte>> ResidentRanges() const override { return {std::as_bytes(std::span(touched_))}; }
    const QuantScheme& ExecutedScheme() const override { return inner_->ExecutedScheme(); }
    std::string Note() const override { return "planted note"; }

   private:
    std::unique_ptr<PreparedMoe> inner_;
    Fault fault_;
    std::vector<char> touched_ = std::vector<char>(100000, 1);  // stands for weights
  };

  const Backend* inner_ = Find("cpu_generic");
  Fault fault_;
};

ModelSpec SmallModel() {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = 64, .intermediate = 64, .num_experts = 2};
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  return spec;
}

EngineOptions Options(const std::string& policy) {
  EngineOptions options;
  options.threads = 2;
  options.device = ThisDevice();
  options.policy = *Policy::Parse(policy);
  return options;
}

struct OnDisk {
  OnDisk() {
    CheckpointBuilder builder;
    AddModel(SmallModel(), &builder);
    REQUIRE(builder.Write(dir.path()).ok());
  }
  TempDir dir;
};

}  // namespace

TEST_CASE("A planted wrong backend is quarantined, the next fitting one runs, and status and explain say so") {
  for (PlantedFault::Fault fault :
       {PlantedFault::Fault::kHalvesOutput, PlantedFault::Fault::kHalvesBf16, PlantedFault::Fault::kOneExpertZero}) {
    const PlantedFault planted(fault);
    OnDisk disk;
    std::vector<const Backend*> backends = LinkedBackends();
    backends.insert(backends.begin(), &planted);
    for (const std::string policy : {"auto", "prefer:cpu_planted"}) {
      Engine engine(Options(policy), backends);
      REQUIRE(engine.Plan("m", disk.dir.path()).ok());
      CHECK(engine.Status()[0].layers[0].backend == "cpu_planted");
      REQUIRE(engine.Load("m", {}).ok());
      const ModelStatus status = engine.Status()[0];
      const ExplainReport report = *engine.Explain("m");
      for (size_t layer = 0; layer < 2; ++layer) {
        CHECK(status.layers[layer].state == LayerState::kReady);
        CHECK(status.layers[layer].backend != "cpu_planted");
        CHECK(status.layers[layer].backend != "reference");
        CHECK(status.layers[layer].note.find("cpu_planted is quarantined") != std::string::npos);
        CHECK(report.layers[layer].choice == status.layers[layer].backend);
        CHECK(report.layers[layer].backends[0].name == "cpu_planted");
        REQUIRE_FALSE(report.layers[layer].backends[0].verdict.ok());
        CHECK(report.layers[layer].backends[0].verdict.reasons.back().code == "quarantined");
      }
      const absl::StatusOr<std::vector<SelfCheckRow>> rows = engine.SelfCheck("m", -1, 8, 1);
      REQUIRE(rows.ok());
      for (const SelfCheckRow& row : *rows) CHECK(row.passed);
    }
  }
}

TEST_CASE("A required backend that fails the self-check fails the load with the error and the bound") {
  const PlantedFault planted(PlantedFault::Fault::kHalvesOutput);
  OnDisk disk;
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &planted);
  Engine engine(Options("require:cpu_planted"), backends);
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  const absl::Status status = engine.Load("m", {});
  CHECK(status.code() == absl::StatusCode::kInternal);
  const std::string text(status.message());
  CHECK(text.find("cpu_planted is required and failed") != std::string::npos);
  CHECK(text.find("relative error 0.5") != std::string::npos);
  CHECK(engine.Status()[0].state == LayerState::kFailed);
}

TEST_CASE("When nothing is left that is right, the load fails and names what was tried") {
  const PlantedFault planted(PlantedFault::Fault::kHalvesOutput);
  OnDisk disk;
  Engine engine(Options("auto"), {&planted, Find("reference")});
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  const absl::Status status = engine.Load("m", {});
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(std::string(status.message()).find("cpu_planted failed its self-check") != std::string::npos);
}

TEST_CASE("A wrong shared expert is caught like a wrong routed one") {
  const PlantedFault planted(PlantedFault::Fault::kHalvesOutput);
  TempDir dir;
  CheckpointBuilder builder;
  ModelSpec spec{.family = ModelFamily::kDeepseekV3, .hidden = 64, .intermediate = 64, .num_experts = 2};
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};  // the shared expert stays bf16
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &planted);
  Engine required(Options("auto,scheme:int4=require:cpu_generic,scheme:bf16=require:cpu_planted"), backends);
  REQUIRE(required.Plan("m", dir.path()).ok());
  const absl::Status status = required.Load("m", {});
  CHECK(std::string(status.message()).find("shared expert: cpu_planted is required and failed") != std::string::npos);
  Engine free(Options("auto,scheme:int4=require:cpu_generic"), backends);
  REQUIRE(free.Plan("m", dir.path()).ok());
  REQUIRE(free.Load("m", {}).ok());
  CHECK(free.Status()[0].layers[0].note.find("cpu_planted is quarantined") != std::string::npos);
  CHECK(free.Explain("m")->layers[0].shared_choice != "cpu_planted");
}

TEST_CASE("A model is loaded once") {
  OnDisk disk;
  Engine engine(Options("auto"), LinkedBackends());
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  CHECK(engine.Load("m", {}).code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("A right backend is not blamed") {
  OnDisk disk;
  Engine engine(Options("auto"), LinkedBackends());
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  for (const LayerStatus& layer : std::vector<LayerStatus>(engine.Status()[0].layers)) CHECK(layer.note.empty());
}

TEST_CASE("What a prepared layer notes about its weights stands in the status of the layer") {
  const PlantedFault right(PlantedFault::Fault::kNone);
  OnDisk disk;
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &right);
  Engine engine(Options("require:cpu_planted"), backends);
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  const std::vector<LayerStatus> layers = engine.Status()[0].layers;
  REQUIRE_FALSE(layers.empty());
  for (const LayerStatus& layer : layers) CHECK(layer.note.find("cpu_planted: planted note") != std::string::npos);
}

TEST_CASE("A ready layer tells on which memory nodes its backend's memory lies, and a backend that does not tell is unknown") {
  const PlantedFault right(PlantedFault::Fault::kNone);
  const std::vector<std::byte> touched(100000, std::byte{1});
  const std::span<const std::byte> range(touched);
  const std::vector<int> here = NodesOfMemory(std::span(&range, 1));
  if (here.empty()) return Skip("the kernel does not tell where memory lies");
  OnDisk disk;
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &right);
  Engine engine(Options("require:cpu_planted"), backends);
  REQUIRE(engine.Plan("m", disk.dir.path()).ok());
  CHECK(engine.Status()[0].layers[0].numa_nodes.empty());
  REQUIRE(engine.Load("m", {}).ok());
  CHECK_FALSE(engine.Status()[0].layers[0].numa_nodes.empty());
  Engine silent(Options("require:reference"), backends);
  REQUIRE(silent.Plan("m", disk.dir.path()).ok());
  REQUIRE(silent.Load("m", {}).ok());
  CHECK(silent.Status()[0].layers[0].numa_nodes.empty());
}

}  // namespace moed
