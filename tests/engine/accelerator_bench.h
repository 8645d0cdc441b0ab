// What tests of layers on an accelerator share: checkpoints, an engine with a puppet, and calls with their answers.
#ifndef MOED_TESTS_ENGINE_ACCELERATOR_BENCH_H_
#define MOED_TESTS_ENGINE_ACCELERATOR_BENCH_H_

#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/puppet_accelerator.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

inline constexpr int kExperts = 6, kTopK = 2;
inline constexpr int64_t kHidden = 64;

// Layers with a shared expert whose weights are bf16, and int4 routed experts: policies can part them.
inline ModelSpec SharedModel() {
  ModelSpec spec{.family = ModelFamily::kDeepseekV3, .num_layers = 2, .hidden = kHidden, .intermediate = 32};
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  return spec;
}
inline ModelSpec PlainModel() {
  return {.family = ModelFamily::kQwen3Moe, .hidden = kHidden, .intermediate = 64, .num_experts = kExperts, .top_k = kTopK};
}

struct Files {
  explicit Files(const ModelSpec& spec) {
    CheckpointBuilder builder;
    layer = AddModel(spec, &builder).back().layer;
    REQUIRE(builder.Write(dir.path()).ok());
  }
  TempDir dir;
  int layer = 0;  // the last one
};

// An engine with a puppet. The puppet outlives it.
struct Bench {
  explicit Bench(const std::string& policy = "auto", const std::function<void(EngineOptions&)>& change = {}) {
    EngineOptions options;
    options.threads = 2;
    options.device = ThisDevice();
    puppet.Describe(&options.device);
    options.policy = *Policy::Parse(policy);
    if (change) change(options);
    std::vector<const Backend*> backends = LinkedBackends();
    backends.insert(backends.begin(), &backend);
    engine = std::make_unique<Engine>(options, backends);
  }
  void Load(const Files& files) {
    absl::Status status = engine->Plan("m", files.dir.path());
    if (status.ok()) status = engine->Load("m", {});
    INFO(status.ToString());
    REQUIRE(status.ok());
  }

  PuppetAccelerator puppet;
  PuppetBackend backend{&puppet};
  std::unique_ptr<Engine> engine;
};

// Rows and the three ways to route them.
struct Input {
  explicit Input(int64_t count) : rows(count), x(CaseHidden(count, kHidden)), logits(static_cast<size_t>(count * kExperts)) {
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>((i * 7919) % 13) / 4.0f;
    for (int64_t row = 0; row < count; ++row) {
      for (int slot = 0; slot < 3; ++slot) {
        ids.push_back(static_cast<int32_t>((row + 2 * slot) % kExperts));
        weights.push_back(0.5f + 0.25f * static_cast<float>(slot));
      }
    }
  }
  ForwardCall Call(int layer, int way, bool routed_only = false) const {
    ForwardCall call;
    call.layer = layer;
    call.hidden = {x.data(), DType::kF32, rows, kHidden};
    call.routed_only = routed_only;
    if (way == 1) call.routing = RoutingByLogits{logits};
    if (way == 2) call.routing = RoutingByIds{3, ids, weights};
    return call;
  }

  int64_t rows;
  std::vector<float> x;
  std::vector<float> logits;
  std::vector<int32_t> ids;  // three slots, more than the model's
  std::vector<float> weights;
};

struct Answer {
  absl::Status status;
  std::vector<float> y;
  ForwardInfo info;
};

inline Answer Ask(Engine* engine, const Input& input, const ForwardCall& call) {
  Answer answer;
  answer.y.assign(static_cast<size_t>(input.rows * kHidden), -1.0f);
  answer.info.want_routing = true;
  answer.status = engine->Forward("m", call, {answer.y.data(), DType::kF32, input.rows, kHidden}, &answer.info);
  return answer;
}

inline void CheckSame(const Answer& got, const Answer& want) {
  INFO(got.status.ToString() << " / " << want.status.ToString());
  REQUIRE((got.status.ok() && want.status.ok()));
  REQUIRE(got.y.size() == want.y.size());
  CHECK((got.y.empty() || std::memcmp(got.y.data(), want.y.data(), got.y.size() * sizeof(float)) == 0));
  CHECK(got.info.top_k == want.info.top_k);
  CHECK(got.info.ids == want.info.ids);
  CHECK(got.info.weights == want.info.weights);
}

}  // namespace moed::testing

#endif  // MOED_TESTS_ENGINE_ACCELERATOR_BENCH_H_
