// The operator's choice about activations: which schemes it changes, how, and what is said about those that it does not.
#include <catch2/catch.hpp>

#include "engine/activations.h"
#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

constexpr ElementType kElements[] = {ElementType::kF32,     ElementType::kBf16,    ElementType::kF16,
                                     ElementType::kInt4,    ElementType::kInt8,    ElementType::kFp8E4m3,
                                     ElementType::kFp4E2m1, ElementType::kFp6E2m3, ElementType::kFp6E3m2};

bool TakesInt8(ElementType element) {
  return element == ElementType::kInt4 || element == ElementType::kInt8 || element == ElementType::kFp4E2m1;
}

// Static FP8 activations: what no choice sets.
LinearScheme StaticFp8(ElementType weights) {
  LinearScheme linear;
  linear.weights.element = weights;
  linear.input = {.mode = ActivationMode::kStatic, .element = ElementType::kFp8E4m3, .group = {0, 0}};
  return linear;
}

// Layer 0 int4 with a bf16 shared expert, layer 1 bf16 with an int4 one, layer 2 int4 without one.
std::vector<LayerPlan> ThreePlans() {
  std::vector<LayerPlan> plans(3);
  for (LayerPlan& plan : plans) {
    plan.routed.scheme = UniformScheme(StaticFp8(ElementType::kInt4));
    plan.shared.scheme = UniformScheme(StaticFp8(ElementType::kBf16));
  }
  std::swap(plans[1].routed, plans[1].shared);
  plans[0].has_shared = plans[1].has_shared = true;
  return plans;
}

// Two layers, int4 and bf16, or bf16 both.
struct OnDisk {
  explicit OnDisk(bool mixed) {
    const ExpertSpec int4 = {.format = ExpertFormat::kPacked, .group = 32}, bf16;
    ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = 64, .intermediate = 64};
    if (mixed) {
      spec.experts = int4;
      spec.layer_experts = {int4, bf16};
      spec.quantization = PackedConfigText(int4, {"re:.*layers\\.1\\..*"});
    }
    CheckpointBuilder builder;
    AddModel(spec, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
  }

  std::unique_ptr<Engine> Load(ActivationChoice choice, const std::string& policy = "auto") const {
    EngineOptions options;
    options.threads = 2;
    options.device = ThisDevice();
    options.policy = *Policy::Parse(policy);
    options.activations = choice;
    auto engine = std::make_unique<Engine>(options, LinkedBackends());
    const absl::Status planned = engine->Plan("m", dir.path());
    INFO(planned.ToString());
    REQUIRE(planned.ok());
    const absl::Status loaded = engine->Load("m", {});
    INFO(loaded.ToString());
    REQUIRE(loaded.ok());
    return engine;
  }

  TempDir dir;
};

int NotesAbout(const ModelStatus& model, const std::string& text) {
  int count = 0;
  for (const std::string& note : model.notes) count += note.find(text) != std::string::npos;
  return count;
}

}  // namespace

TEST_CASE("int8 sets one dynamic scale a token for int4, int8 and FP4 weights, and nothing for others") {
  const ActivationScheme want = {.mode = ActivationMode::kDynamic, .element = ElementType::kInt8, .scale = ScaleType::kF32,
                                 .group = {1, 0}, .rule = ScaleRule::kAbsMax};
  for (ElementType element : kElements) {
    for (bool act_order : {false, true}) {
      LinearScheme linear = StaticFp8(element);
      linear.weights.act_order = act_order;
      const QuantScheme file = UniformScheme(linear), chosen = WithActivations(file, ActivationChoice::kInt8);
      INFO(ElementName(element));
      CHECK(TakesInt8Activations(file) == TakesInt8(element));
      CHECK(chosen.gate.weights == file.gate.weights);
      CHECK(chosen.down.weights == file.down.weights);
      for (const LinearScheme* projection : {&chosen.gate, &chosen.up, &chosen.down}) {
        CHECK(projection->input == (TakesInt8(element) ? want : linear.input));
      }
    }
  }
}

TEST_CASE("none unsets the activations of every element, and file changes nothing") {
  for (ElementType element : kElements) {
    const QuantScheme file = UniformScheme(StaticFp8(element));
    CHECK(WithActivations(file, ActivationChoice::kFile) == file);
    const QuantScheme none = WithActivations(file, ActivationChoice::kNone);
    for (const LinearScheme* projection : {&none.gate, &none.up, &none.down}) CHECK(projection->input == ActivationScheme());
    CHECK(none.up.weights == file.up.weights);
  }
}

TEST_CASE("One projection of another element keeps the activations of all three") {
  for (LinearScheme QuantScheme::*projection : {&QuantScheme::gate, &QuantScheme::up, &QuantScheme::down}) {
    QuantScheme scheme = UniformScheme(StaticFp8(ElementType::kInt4));
    (scheme.*projection).weights.element = ElementType::kFp8E4m3;
    CHECK(WithActivations(scheme, ActivationChoice::kInt8) == scheme);
  }
}

TEST_CASE("Routed and shared experts are judged apart, and the note counts those that keep what the file says") {
  std::vector<LayerPlan> plans = ThreePlans();
  const std::vector<LayerPlan> file = plans;
  ApplyActivations(ActivationChoice::kInt8, plans);
  for (size_t layer = 0; layer < plans.size(); ++layer) {
    const bool routed = layer != 1;
    CHECK((plans[layer].routed.scheme == file[layer].routed.scheme) != routed);
    CHECK((plans[layer].shared.scheme == file[layer].shared.scheme) == routed);
  }
  CHECK(KeptActivationsNote(ActivationChoice::kInt8, plans) ==
        "int8 activations: 1 of 3 layers and 1 of 2 shared experts keep what the file says, wanted int4, int8 or FP4 weights");
  CHECK(KeptActivationsNote(ActivationChoice::kInt8, std::span(plans).first(1)) ==
        "int8 activations: 1 of 1 shared experts keep what the file says, wanted int4, int8 or FP4 weights");
  CHECK(KeptActivationsNote(ActivationChoice::kFile, plans).empty());
  CHECK(KeptActivationsNote(ActivationChoice::kNone, plans).empty());
  CHECK(KeptActivationsNote(ActivationChoice::kInt8, std::span(plans).subspan(2)).empty());
}

TEST_CASE("In a mixed model the int4 layer runs with int8 activations, the bf16 one as the file says, and one note counts it") {
  const OnDisk mixed(true);
  for (const std::string policy : {"auto", "require:reference", "require:cpu_generic"}) {
    const ModelStatus model = mixed.Load(ActivationChoice::kInt8, policy)->Status()[0];
    CHECK(model.layers[0].scheme == "int4 g32 symmetric, bf16 scales, 16-bit activations");
    CHECK(model.layers[0].executed_scheme == "int4 g32 symmetric, bf16 scales, int8 dynamic token activations");
    CHECK(model.layers[1].executed_scheme == "bf16, 16-bit activations");
    CHECK(NotesAbout(model, "int8 activations: 1 of 2 layers keep what the file says") == 1);
  }
  CHECK(NotesAbout(mixed.Load(ActivationChoice::kNone)->Status()[0], "activations") == 0);
}

TEST_CASE("A bf16 model answers to the bit the same with int8 activations chosen, and the note says that no layer took them") {
  const OnDisk plain(false);
  const std::unique_ptr<Engine> file = plain.Load(ActivationChoice::kFile), chosen = plain.Load(ActivationChoice::kInt8);
  CHECK(NotesAbout(chosen->Status()[0], "2 of 2 layers keep what the file says") == 1);
  const std::vector<float> x = CaseHidden(3, 64);
  std::vector<float> a(x.size()), b(x.size(), 1.0f);
  for (int layer : {0, 1}) {
    ForwardCall call;
    call.layer = layer;
    call.hidden = {x.data(), DType::kF32, 3, 64};
    ForwardInfo info;
    REQUIRE(file->Forward("m", call, {a.data(), DType::kF32, 3, 64}, &info).ok());
    const std::string backend = info.backend, scheme = info.scheme;
    REQUIRE(chosen->Forward("m", call, {b.data(), DType::kF32, 3, 64}, &info).ok());
    CHECK(a == b);
    CHECK(info.backend == backend);
    CHECK(info.scheme == scheme);
  }
}

TEST_CASE("A checkpoint is explained with each choice as it is served") {
  const OnDisk mixed(true);
  for (ActivationChoice choice : {ActivationChoice::kFile, ActivationChoice::kNone, ActivationChoice::kInt8}) {
    const auto engine = mixed.Load(choice);
    const auto report = ExplainCheckpoint(mixed.dir.path(), ThisDevice(), LinkedBackends(), Policy(), choice, -1, 8192);
    REQUIRE(report.ok());
    REQUIRE(report->layers.size() == 2);
    for (size_t at = 0; at < 2; ++at) {
      const LayerStatus served = engine->Status()[0].layers[at];
      CHECK(report->layers[at].scheme == served.executed_scheme);
      CHECK(report->layers[at].choice == served.backend);
      CHECK(report->layers[at].bytes == served.bytes);
    }
  }
}

}  // namespace moed
