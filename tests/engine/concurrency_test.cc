// B54: threads that call at once, with layers of different sizes and calls of different lengths, get the answers that each
// of them gets alone, to the bit. What calls share (worker pool, scratch, weights) must not mix them.
#include <catch2/catch.hpp>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

constexpr int kThreads = kThreadSanitizer ? 2 : 8;
constexpr int kCalls = kThreadSanitizer ? 20 : 200;
constexpr int64_t kRows[] = {1, 5, 64, 300};
constexpr int kExperts = 4;

// Two models, since a model has one H: int4 on the fast kernels, and bf16 with rows of another length.
struct TwoModels {
  TwoModels() : engine(Options(), LinkedBackends()) {
    ModelSpec wide{.family = ModelFamily::kMixtral, .hidden = 128, .intermediate = 64, .num_experts = kExperts};
    wide.experts = {.format = ExpertFormat::kGptq, .group = 32};
    Serve("wide", wide);
    Serve("narrow", {.family = ModelFamily::kQwen3Moe, .hidden = 48, .intermediate = 96, .num_experts = kExperts});
  }

  static EngineOptions Options() {
    EngineOptions options;
    options.threads = 3;
    options.deterministic = true;
    options.device = ThisDevice();
    return options;
  }

  void Serve(const std::string& name, const ModelSpec& spec) {
    CheckpointBuilder builder;
    AddModel(spec, &builder);
    const std::string path = dir.MakeDir(name);
    REQUIRE(builder.Write(path).ok());
    REQUIRE(engine.Plan(name, path).ok());
    const absl::Status loaded = engine.Load(name, {});
    INFO(loaded.ToString());
    REQUIRE(loaded.ok());
  }

  TempDir dir;
  Engine engine;
};

// One call of one thread. Its spans point into itself: not to be moved once `call` was made.
struct Question {
  std::string model;
  int64_t rows = 0;
  int64_t hidden = 0;
  std::vector<float> x;
  std::vector<float> logits;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> alone;  // the answer when nothing else runs

  void Fill(const std::string& name, int64_t width, int64_t length, uint32_t seed) {
    model = name;
    rows = length;
    hidden = width;
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-2.0f, 2.0f);
    x.resize(static_cast<size_t>(rows * hidden));
    for (float& v : x) v = value(random);
    logits.resize(static_cast<size_t>(rows * kExperts));
    for (float& v : logits) v = value(random);
    ids.resize(static_cast<size_t>(rows * 2));
    weights.resize(ids.size());
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % kExperts);
    for (float& v : weights) v = value(random);
  }

  // The three ways to route in turn.
  ForwardCall Call(int way) const {
    ForwardCall call;
    call.hidden = {x.data(), DType::kF32, rows, hidden};
    if (way % 3 == 1) call.routing = RoutingByLogits{logits};
    if (way % 3 == 2) call.routing = RoutingByIds{2, ids, weights};
    return call;
  }

  absl::StatusOr<std::vector<float>> Ask(Engine* engine, int way) const {
    std::vector<float> y(x.size());
    ForwardInfo info;
    const absl::Status status = engine->Forward(model, Call(way), {y.data(), DType::kF32, rows, hidden}, &info);
    if (!status.ok()) return status;
    return y;
  }
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The calls of one thread: every length on both models, each with an input of its own, asked over and over.
struct Caller {
  std::vector<Question> questions{2 * std::size(kRows)};
  int wrong = 0;
  int failed = 0;

  Caller(int number, Engine* engine) : number_(number) {
    for (size_t i = 0; i < questions.size(); ++i) {
      const bool wide = i % 2 == 0;
      questions[i].Fill(wide ? "wide" : "narrow", wide ? 128 : 48, kRows[i / 2], static_cast<uint32_t>(100 * number + i));
      const auto answer = questions[i].Ask(engine, Way(i));
      INFO(answer.status().ToString());
      REQUIRE(answer.ok());
      questions[i].alone = *answer;
    }
  }

  // Each thread in an order of its own.
  void Run(Engine* engine) {
    for (int call = 0; call < kCalls; ++call) {
      const size_t i = static_cast<size_t>(call * 3 + number_) % questions.size();
      const auto answer = questions[i].Ask(engine, Way(i));
      if (!answer.ok()) ++failed;
      if (answer.ok() && !SameBits(*answer, questions[i].alone)) ++wrong;
    }
  }

 private:
  int Way(size_t question) const { return number_ + static_cast<int>(question); }

  const int number_;
};

}  // namespace

TEST_CASE("B54: calls of many threads at once on layers of different widths give each its serial answer to the bit") {
  TwoModels models;
  std::vector<Caller> callers;
  callers.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) callers.emplace_back(i, &models.engine);
  // The inputs differ, so that an answer that went to the wrong caller is seen.
  for (size_t i = 0; i < callers[0].questions.size(); ++i) {
    REQUIRE(!SameBits(callers[0].questions[i].alone, callers[1].questions[i].alone));
  }

  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (Caller& caller : callers) {
    threads.emplace_back([&] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();  // all start together
      caller.Run(&models.engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Caller& caller : callers) {
    CHECK(caller.failed == 0);
    CHECK(caller.wrong == 0);
  }
}

}  // namespace moed
