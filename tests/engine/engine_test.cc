// The engine on small checkpoints with known answers: probe layers of cases.md, states, policies, limits and bad calls.
#include <catch2/catch.hpp>

#include <cmath>

#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/judge.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

EngineOptions Options(const std::string& policy) {
  EngineOptions options;
  options.threads = 2;
  options.device = ThisDevice();
  options.policy = *Policy::Parse(policy);
  return options;
}

struct Served {
  explicit Served(const ModelSpec& spec, const std::string& policy = "auto", const std::function<void(CheckpointBuilder&)>& change = {})
      : engine(Options(policy), LinkedBackends()) {
    CheckpointBuilder builder;
    reference = AddModel(spec, &builder);
    if (change) change(builder);
    REQUIRE(builder.Write(dir.path()).ok());
    const absl::Status planned = engine.Plan("m", dir.path());
    INFO(planned.ToString());
    REQUIRE(planned.ok());
    const absl::Status loaded = engine.Load("m", {});
    INFO(loaded.ToString());
    REQUIRE(loaded.ok());
  }

  // One row through `layer`, float32 in and out.
  absl::StatusOr<std::vector<float>> Row(const std::vector<float>& x, ForwardCall call = {}) {
    const int64_t hidden = static_cast<int64_t>(x.size());
    call.layer = reference[0].layer;
    call.hidden = {x.data(), DType::kF32, 1, hidden};
    std::vector<float> out(x.size());
    absl::Status status = engine.Forward("m", call, {out.data(), DType::kF32, 1, hidden}, &info);
    if (!status.ok()) return status;
    return out;
  }

  TempDir dir;
  Engine engine;
  std::vector<LayerReference> reference;
  ForwardInfo info;
};

const std::vector<std::string> kBackends = {"auto", "require:reference", "require:cpu_generic"};

std::vector<float> FirstUnit(int64_t hidden) {
  std::vector<float> x(static_cast<size_t>(hidden), 0.0f);
  x[0] = 1.0f;
  return x;
}

ForwardCall ByIds(const std::vector<int32_t>& ids, const std::vector<float>& weights, int top_k) {
  ForwardCall call;
  call.routing = RoutingByIds{top_k, ids, weights};
  return call;
}

}  // namespace

TEST_CASE("B25: the clamp of gpt-oss bounds the gate from above and up on both sides") {
  // g = min(24, 7) = 7, u = clamp(-32, -7, 7) = -7: (u + 1) g sigmoid(1.702 g)
  const double want = -6.0 * 7.0 / (1.0 + std::exp(-1.702 * 7.0));
  ModelSpec spec{.family = ModelFamily::kGptOss, .hidden = 64, .intermediate = 32, .num_experts = 2, .top_k = 1};
  spec.weights = PcWeights(64, 32, 24.0f, -32.0f);
  spec.biases = false;
  const std::vector<int32_t> ids = {1};
  const std::vector<float> ones = {1.0f};
  for (const std::string& policy : kBackends) {
    Served served(spec, policy);
    CHECK((*served.Row(FirstUnit(64), ByIds(ids, ones, 1)))[3] == Approx(want).epsilon(1e-2));
  }
}

TEST_CASE("B01: a required backend is the one that runs, per layer and per scheme; unknown names are refused with the list") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  for (const std::string name : {"reference", "cpu_generic"}) {
    Served served(spec, "require:" + name);
    CHECK(served.engine.Status()[0].layers[0].backend == name);
    REQUIRE(served.Row(FirstUnit(64)).ok());
    CHECK(served.info.backend == name);
  }
  Served by_scheme(spec, "auto,scheme:int4=require:cpu_generic,scheme:bf16=require:reference");
  CHECK(by_scheme.engine.Status()[0].layers[0].backend == "cpu_generic");
  Engine engine(Options("require:no_such"), LinkedBackends());
  const absl::Status status = engine.Plan("m", by_scheme.dir.path());
  CHECK(status.code() == absl::StatusCode::kNotFound);
  for (const Backend* backend : LinkedBackends()) {
    CHECK(std::string(status.message()).find(backend->Name()) != std::string::npos);
  }
}

TEST_CASE("A backend that the processor cannot run is refused with the missing flags, and never chosen") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  EngineOptions options = Options("require:cpu_avx512");
  options.device.isa = IsaFlags();
  Engine forced(options, LinkedBackends());
  const absl::Status status = forced.Plan("m", dir.path());
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(std::string(status.message()).find("avx512f") != std::string::npos);
  CHECK(std::string(status.message()).find("layer 0") != std::string::npos);
  options.policy = Policy();
  Engine free(options, LinkedBackends());
  REQUIRE(free.Plan("m", dir.path()).ok());
  CHECK(free.Status()[0].layers[0].backend == "cpu_generic");
}

TEST_CASE("Before Load a call gets UNAVAILABLE and after it an answer") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  Engine engine(Options("auto"), LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  CHECK(engine.Plan("m", dir.path()).code() == absl::StatusCode::kAlreadyExists);
  std::vector<float> x(64, 1.0f), out(64);
  ForwardCall call;
  call.hidden = {x.data(), DType::kF32, 1, 64};
  ForwardInfo info;
  CHECK(engine.Forward("m", call, {out.data(), DType::kF32, 1, 64}, &info).code() == absl::StatusCode::kUnavailable);
  std::vector<int> seen;
  REQUIRE(engine.Load("m", [&](const LoadProgress& progress) {
    CHECK(progress.total == 1);
    CHECK(progress.done == static_cast<int>(seen.size()) + 1);
    CHECK(progress.file_bytes == engine.Status()[0].layers[0].file_bytes);
    CHECK(progress.total_file_bytes == progress.file_bytes);
    seen.push_back(progress.layer);
  }).ok());
  CHECK(seen == std::vector<int>{0});
  CHECK(engine.Forward("m", call, {out.data(), DType::kF32, 1, 64}, &info).ok());
  CHECK(info.generation == 1);
}

TEST_CASE("A load that fails leaves the model failed, with the reason in its status and in every answer") {
  ModelSpec spec{.family = ModelFamily::kMixtral, .hidden = 64, .intermediate = 64, .num_experts = 4, .mlp_names = true};
  spec.experts = {.format = ExpertFormat::kGptq, .group = 32};
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  builder.Find("model.layers.0.mlp.experts.1.up_proj.qzeros")->bytes[0] = 0;
  REQUIRE(builder.Write(dir.path()).ok());
  Engine engine(Options("auto"), LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  const absl::Status status = engine.Load("m", {});
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(status.message()).find("experts.1.up_proj.qzeros") != std::string::npos);
  const ModelStatus model = engine.Status()[0];
  CHECK(model.state == LayerState::kFailed);
  CHECK(model.error == std::string(status.message()));
  CHECK(model.layers[0].state == LayerState::kFailed);
}

TEST_CASE("A memory limit below the need is refused with both numbers before anything is read") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  EngineOptions options = Options("auto");
  options.memory_limit = 1000;
  Engine engine(options, LinkedBackends());
  const absl::Status status = engine.Plan("m", dir.path());
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK(std::string(status.message()).find("1000 are allowed") != std::string::npos);
}

TEST_CASE("The memory limit holds for all models together") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  Engine probe(Options("auto"), LinkedBackends());
  REQUIRE(probe.Plan("a", dir.path()).ok());
  const LayerExplanation layer = probe.Explain("a")->layers[0];
  EngineOptions options = Options("auto");
  options.memory_limit = layer.workspace_bytes + layer.bytes * 3 / 2;  // one model and a half
  Engine engine(options, LinkedBackends());
  CHECK(engine.Plan("a", dir.path()).ok());
  CHECK(engine.Plan("b", dir.path()).code() == absl::StatusCode::kResourceExhausted);
}

TEST_CASE("A layer whose activation scales span the request is computed whole or refused, never in chunks") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  nlohmann::json quantization = nlohmann::json::parse(PackedConfigText(spec.experts, {}));
  quantization["config_groups"].begin().value()["input_activations"] = {
      {"num_bits", 8}, {"type", "int"}, {"symmetric", true}, {"strategy", "tensor"}, {"dynamic", true}};
  spec.quantization = quantization.dump();
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(dir.path()).ok());
  EngineOptions options = Options("auto");
  options.max_tokens = 4;
  Engine engine(options, LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  const std::vector<float> x = CaseHidden(5, 64);
  std::vector<float> out(5 * 64);
  ForwardInfo info;
  for (int64_t rows : {4, 5}) {
    ForwardCall call;
    call.hidden = {x.data(), DType::kF32, rows, 64};
    const absl::Status status = engine.Forward("m", call, {out.data(), DType::kF32, rows, 64}, &info);
    INFO(status.ToString());
    CHECK(status.ok() == (rows == 4));
    if (rows == 5) CHECK(std::string(status.message()).find("5 rows, want at most 4") != std::string::npos);
  }
  // What is asked of the memory is the workspace of all rows, however large.
  const auto workspace = [&](int64_t max_tokens) {
    const auto report = ExplainCheckpoint(dir.path(), ThisDevice(), LinkedBackends(), Policy(), ActivationChoice::kFile, -1, max_tokens);
    REQUIRE(report.ok());
    return report->need.host.workspace;
  };
  CHECK(workspace(int64_t{1} << 20) > uint64_t{256} << 20);
  CHECK(workspace(int64_t{1} << 22) > 2 * workspace(int64_t{1} << 20));
}

TEST_CASE("Bad calls are refused with the numbers and the next call is right") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 64, .num_experts = 4};
  Served served(spec);
  const std::vector<float> x(64, 0.5f);
  const std::vector<float> good = *served.Row(x);
  std::vector<float> out(128);
  const auto refused = [&](ForwardCall call, absl::StatusCode code, const std::string& text) {
    if (call.hidden.data == nullptr) call.hidden = {x.data(), DType::kF32, 1, 64};
    const absl::Status status =
        served.engine.Forward("m", call, {out.data(), DType::kF32, call.hidden.rows, call.hidden.cols}, &served.info);
    INFO(status.ToString());
    CHECK(status.code() == code);
    CHECK(std::string(status.message()).find(text) != std::string::npos);
    CHECK(*served.Row(x) == good);
  };
  const std::vector<int32_t> ids = {0, 4}, low = {-2, 0};
  const std::vector<float> weights = {1, 1}, nan_logits = {0, NAN, 0, 0}, few = {0, 0, 0};
  ForwardCall wrong_layer;
  wrong_layer.layer = 7;
  refused(wrong_layer, absl::StatusCode::kNotFound, "no MoE layer 7; its MoE layers are 0");
  ForwardCall narrow;
  narrow.hidden = {x.data(), DType::kF32, 1, 63};
  refused(narrow, absl::StatusCode::kInvalidArgument, "63 columns, want H = 64");
  refused(ByIds(ids, weights, 2), absl::StatusCode::kInvalidArgument, "slot 1 is 4, want -1 to 3");
  refused(ByIds(low, weights, 2), absl::StatusCode::kInvalidArgument, "slot 0 is -2");
  refused(ByIds(ids, weights, 1), absl::StatusCode::kInvalidArgument, "2 ids and 2 weights, want 1");
  refused(ByIds(ids, weights, 0), absl::StatusCode::kInvalidArgument, "k = 0");
  refused(ByIds(ids, weights, 5), absl::StatusCode::kInvalidArgument, "k = 5, want 1 to E = 4");
  ForwardCall logits;
  logits.routing = RoutingByLogits{nan_logits};
  refused(logits, absl::StatusCode::kInvalidArgument, "row 0");
  logits.routing = RoutingByLogits{few};
  refused(logits, absl::StatusCode::kInvalidArgument, "3 values, want 4");
  ForwardInfo info;
  ForwardCall call;
  call.hidden = {x.data(), DType::kF32, 1, 64};
  CHECK(served.engine.Forward("other", call, {out.data(), DType::kF32, 1, 64}, &info).code() == absl::StatusCode::kNotFound);
}

TEST_CASE("NaN from the server's own gate makes that row NaN and leaves the rest as they were") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 8};
  for (const std::string& policy : kBackends) {
    Served served(spec, policy);
    std::vector<float> x = CaseHidden(5, 64), out(5 * 64), clean(5 * 64);
    ForwardCall call;
    call.hidden = {x.data(), DType::kF32, 5, 64};
    REQUIRE(served.engine.Forward("m", call, {clean.data(), DType::kF32, 5, 64}, &served.info).ok());
    x[2 * 64 + 9] = NAN;
    REQUIRE(served.engine.Forward("m", call, {out.data(), DType::kF32, 5, 64}, &served.info).ok());
    for (int row = 0; row < 5; ++row) {
      for (int c = 0; c < 64; ++c) {
        const size_t at = static_cast<size_t>(row * 64 + c);
        CHECK((row == 2 ? std::isnan(out[at]) : out[at] == clean[at]));
      }
    }
  }
}

TEST_CASE("B30: a stray model.safetensors beside an index changes nothing") {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 4};
  TempDir dir;
  CheckpointBuilder builder, zeros;
  AddModel(spec, &builder);
  for (const BuilderTensor& tensor : builder.tensors()) {
    zeros.Add(tensor.name, tensor.dtype, tensor.shape, std::vector<uint8_t>(tensor.bytes.size(), 0));
  }
  REQUIRE(zeros.Write(dir.path()).ok());  // the stray file
  REQUIRE(builder.Write(dir.path(), 2).ok());
  Served clean(spec);
  Engine engine(Options("auto"), LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  const std::vector<float> x = CaseHidden(1, 64);
  std::vector<float> out(64);
  ForwardCall call;
  call.hidden = {x.data(), DType::kF32, 1, 64};
  REQUIRE(engine.Forward("m", call, {out.data(), DType::kF32, 1, 64}, &clean.info).ok());
  CHECK(out == *clean.Row(x));
}

namespace {

// A gated block [64 x 32] with probe weights PC(a, b) below `prefix`.
void AddProbeBlock(CheckpointBuilder& builder, const std::string& prefix, float a, float b) {
  const WeightFn probe = PcWeights(64, 32, a, b);
  const std::pair<const char*, int> projections[] = {{"gate_proj", kGate}, {"up_proj", kUp}, {"down_proj", kDown}};
  for (const auto& [name, projection] : projections) {
    std::vector<float> weights;
    for (int64_t n = 0; n < 64 * 32; ++n) weights.push_back(probe(0, projection, n));
    const std::vector<int64_t> shape = projection == kDown ? std::vector<int64_t>{64, 32} : std::vector<int64_t>{32, 64};
    builder.AddFloats(prefix + name + ".weight", StDtype::kBf16, shape, weights);
  }
}

// The config of `builder` with these keys changed.
void ChangeConfig(CheckpointBuilder& builder, const nlohmann::json& keys) {
  nlohmann::json config = nlohmann::json::parse(builder.GetFile("config.json"), nullptr, false);
  config.update(keys);
  builder.SetConfig(config.dump());
}

const char kSharedGate[] = "model.layers.0.mlp.shared_expert_gate.weight";

// Makes a qwen2_moe of a qwen3_moe: a shared expert PC(2, 1) whose gate looks at x[1] alone: sigmoid(ln 3 * x[1]).
void MakeGatedShared(CheckpointBuilder& builder) {
  ChangeConfig(builder, {{"model_type", "qwen2_moe"}, {"architectures", {"Qwen2MoeForCausalLM"}},
                         {"shared_expert_intermediate_size", 32}});
  AddProbeBlock(builder, "model.layers.0.mlp.shared_expert.", 2.0f, 1.0f);
  std::vector<float> gate(64, 0.0f);
  gate[1] = std::log(3.0f);
  builder.AddFloats(kSharedGate, StDtype::kF32, {1, 64}, gate);
}

ModelSpec GatedSpec() {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 4, .top_k = 1};
  spec.weights = PcWeights(64, 32, 1.0f, 1.0f);
  return spec;
}

double Silu(double z) { return z / (1.0 + std::exp(-z)); }

}  // namespace

TEST_CASE("The shared expert's own gate multiplies its output row by row, and the routed sum not at all") {
  const std::vector<int32_t> ids = {0};
  const std::vector<float> ones = {1.0f};
  for (const std::string& policy : kBackends) {
    Served served(GatedSpec(), policy, MakeGatedShared);
    for (const auto& [second, factor] : {std::pair<float, double>{1.0f, 0.75}, {-1.0f, 0.25}, {0.0f, 0.5}, {200.0f, 1.0}, {-200.0f, 0.0}}) {
      std::vector<float> x = FirstUnit(64);
      x[1] = second;
      CHECK((*served.Row(x, ByIds(ids, ones, 1)))[7] == Approx(Silu(1.0) + factor * Silu(2.0)).epsilon(1e-3));
      ForwardCall routed_only = ByIds(ids, ones, 1);
      routed_only.routed_only = true;
      CHECK((*served.Row(x, routed_only))[7] == Approx(Silu(1.0)).epsilon(1e-3));
    }
  }
}

TEST_CASE("The factor of the shared expert depends on its own row only, also beside a row of NaN") {
  Served served(GatedSpec(), "require:reference", MakeGatedShared);
  constexpr int64_t kRows = 5;
  std::vector<float> x = CaseHidden(kRows, 64), out(kRows * 64);
  for (int64_t h = 0; h < 64; ++h) x[2 * 64 + h] = NAN;
  const std::vector<int32_t> ids(kRows, 1);
  const std::vector<float> ones(kRows, 1.0f);
  ForwardCall call = ByIds(ids, ones, 1);
  call.hidden = {x.data(), DType::kF32, kRows, 64};
  REQUIRE(served.engine.Forward("m", call, {out.data(), DType::kF32, kRows, 64}, &served.info).ok());
  const std::vector<int32_t> one_id = {1};
  const std::vector<float> one = {1.0f};
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> alone = *served.Row({x.begin() + row * 64, x.begin() + (row + 1) * 64}, ByIds(one_id, one, 1));
    for (int64_t h = 0; h < 64; ++h) {
      const float together = out[static_cast<size_t>(row * 64 + h)];
      CHECK((row == 2 ? std::isnan(together) : together == alone[static_cast<size_t>(h)]));
    }
  }
}

TEST_CASE("A shared expert's gate that is missing, misshapen or not finite is refused by name") {
  const auto outcome = [](const std::function<void(CheckpointBuilder&)>& change) {
    TempDir dir;
    CheckpointBuilder builder;
    AddModel(GatedSpec(), &builder);
    MakeGatedShared(builder);
    change(builder);
    REQUIRE(builder.Write(dir.path()).ok());
    Engine engine(Options("auto"), LinkedBackends());
    const absl::Status planned = engine.Plan("m", dir.path());
    return planned.ok() ? engine.Load("m", {}) : planned;
  };
  CHECK(outcome([](CheckpointBuilder&) {}).ok());
  const absl::Status missing = outcome([](CheckpointBuilder& b) { b.Remove(kSharedGate); });
  CHECK(missing.code() == absl::StatusCode::kNotFound);
  CHECK(std::string(missing.message()).find(kSharedGate) != std::string::npos);
  const absl::Status shape = outcome([](CheckpointBuilder& b) { b.Find(kSharedGate)->shape = {2, 32}; });
  CHECK(shape.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(shape.message()).find("[2, 32]") != std::string::npos);
  const absl::Status nan = outcome([](CheckpointBuilder& b) {
    std::vector<uint8_t>& bytes = b.Find(kSharedGate)->bytes;
    std::fill(bytes.begin(), bytes.begin() + 4, uint8_t{0xFF});
  });
  CHECK(nan.code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(nan.message()).find(kSharedGate) != std::string::npos);
}

TEST_CASE("llama4: transposed experts, the router's sigmoid on their input, and a shared expert without a gate") {
  const auto make = [](CheckpointBuilder& builder) {
    const std::string block = "language_model.model.layers.0.feed_forward.";
    nlohmann::json text = {{"model_type", "llama4_text"},   {"hidden_size", 64},       {"num_hidden_layers", 1},
                           {"intermediate_size", 32},       {"intermediate_size_mlp", 64}, {"num_local_experts", 2},
                           {"num_experts_per_tok", 1},      {"interleave_moe_layer_step", 1}};
    builder.SetConfig(nlohmann::json{{"model_type", "llama4"}, {"text_config", text}}.dump());
    while (!builder.tensors().empty()) builder.Remove(std::string(builder.tensors().back().name));
    // Expert 0 is PC(2, 2), expert 1 is zero; the router prefers expert 0 with logit 0 to expert 1 with logit -1.
    std::vector<float> gate_up(2 * 64 * 64, 0.0f), down(2 * 32 * 64, 0.0f), router(2 * 64, 0.0f);
    for (int64_t column = 0; column < 64; ++column) gate_up[static_cast<size_t>(column)] = 2.0f;
    for (int64_t at = 0; at < 32 * 64; ++at) down[static_cast<size_t>(at)] = 1.0f / 32;
    router[64] = -1.0f;
    builder.AddFloats(block + "experts.gate_up_proj", StDtype::kBf16, {2, 64, 64}, gate_up);
    builder.AddFloats(block + "experts.down_proj", StDtype::kBf16, {2, 32, 64}, down);
    builder.AddFloats(block + "router.weight", StDtype::kBf16, {2, 64}, router);
    AddProbeBlock(builder, block + "shared_expert.", 1.0f, 1.0f);
  };
  for (const std::string& policy : kBackends) {
    Served served(GatedSpec(), policy, make);
    // sigmoid(0) = 0.5 halves x: silu(1) * 1, not 0.5 * silu(2) * 2.
    CHECK((*served.Row(FirstUnit(64)))[9] == Approx(2.0 * Silu(1.0)).epsilon(1e-3));
    ForwardCall routed_only;
    routed_only.routed_only = true;
    CHECK((*served.Row(FirstUnit(64), routed_only))[9] == Approx(Silu(1.0)).epsilon(1e-3));
  }
}

}  // namespace moed
