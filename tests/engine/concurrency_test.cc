// B54: threads that call at once, with layers of different sizes and calls of different lengths, get the answers that each
// of them gets alone. What calls share (worker pool, scratch, weights) must not mix them.
#include <catch2/catch.hpp>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "kernels/convert.h"
#include "tests/support/case_calls.h"
#include "tests/support/judge.h"
#include "tests/support/sanitizer.h"

namespace moed {
namespace {

using testing::CaseModel;
using testing::CaseScheme;
using testing::CaseSchemeNamed;
using testing::kThreadSanitizer;

constexpr int kExperts = 4;
constexpr int kTopK = 2;

// A checkpoint and the name under which it is served: two of them, since a model has one H.
struct Served {
  Served(const std::string& as, const CaseScheme& scheme, int64_t width, int64_t intermediate)
      : name(as), hidden(width), model(SpecOf(scheme, kExperts, kTopK, width, intermediate), scheme) {}

  const std::string name;
  const int64_t hidden;
  const CaseModel model;
};

struct TwoModels {
  TwoModels(const CaseScheme& of_wide, const CaseScheme& of_narrow) : wide("wide", of_wide, 128, 64), narrow("narrow", of_narrow, 48, 96) {}

  std::unique_ptr<Engine> Load(EngineOptions options) const {
    options.threads = 3;
    options.device = ThisDevice();
    auto engine = std::make_unique<Engine>(options, LinkedBackends());
    for (const Served* served : {&wide, &narrow}) {
      absl::Status status = engine->Plan(served->name, served->model.path());
      if (status.ok()) status = engine->Load(served->name, {});
      INFO(served->name << ": " << status.ToString());
      REQUIRE(status.ok());
    }
    return engine;
  }

  const Served wide, narrow;
};

// What is asked at once.
struct Crowd {
  int threads = 0;
  int calls = 0;              // of each thread
  std::vector<int64_t> rows;  // lengths of calls
  DType dtype = DType::kF32;  // of hidden states; answers are float32
  double bound = 0.0;         // relative error against the answer when nothing else runs; 0: the same bits
};

// One call of one thread. Its spans point into itself: not to be moved once `call` was made.
struct Question {
  std::string model;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t hidden = 0;
  std::vector<uint8_t> x;
  std::vector<float> logits;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> alone;  // the answer when nothing else runs

  void Fill(const Served& served, int64_t length, DType type, uint32_t seed) {
    model = served.name;
    dtype = type;
    rows = length;
    hidden = served.hidden;
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-2.0f, 2.0f);
    std::vector<float> row(static_cast<size_t>(hidden));
    x.resize(static_cast<size_t>(rows * hidden * DTypeBytes(dtype)));
    for (int64_t r = 0; r < rows; ++r) {
      for (float& v : row) v = value(random);
      RowFromFloat(row.data(), r, {x.data(), dtype, rows, hidden});
    }
    logits.resize(static_cast<size_t>(rows * kExperts));
    for (float& v : logits) v = value(random);
    ids.resize(static_cast<size_t>(rows * kTopK));
    weights.resize(ids.size());
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % kExperts);
    for (float& v : weights) v = value(random);
  }

  // The three ways to route in turn.
  ForwardCall Call(int way) const {
    ForwardCall call;
    call.hidden = {x.data(), dtype, rows, hidden};
    if (way % 3 == 1) call.routing = RoutingByLogits{logits};
    if (way % 3 == 2) call.routing = RoutingByIds{kTopK, ids, weights};
    return call;
  }

  absl::StatusOr<std::vector<float>> Ask(Engine* engine, int way) const {
    std::vector<float> y(static_cast<size_t>(rows * hidden));
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
  std::vector<Question> questions;
  int wrong = 0;
  int failed = 0;

  Caller(int number, const TwoModels& models, const Crowd& crowd, Engine* engine) : questions(2 * crowd.rows.size()), number_(number) {
    for (size_t i = 0; i < questions.size(); ++i) {
      questions[i].Fill(i % 2 == 0 ? models.wide : models.narrow, crowd.rows[i / 2], crowd.dtype, static_cast<uint32_t>(100 * number + i));
      const auto answer = questions[i].Ask(engine, Way(i));
      INFO(answer.status().ToString());
      REQUIRE(answer.ok());
      questions[i].alone = *answer;
    }
  }

  // Each thread in an order of its own.
  void Run(const Crowd& crowd, Engine* engine) {
    for (int call = 0; call < crowd.calls; ++call) {
      const size_t i = static_cast<size_t>(call * 3 + number_) % questions.size();
      const auto answer = questions[i].Ask(engine, Way(i));
      if (!answer.ok()) {
        ++failed;
      } else if (!Same(*answer, questions[i], crowd.bound)) {
        ++wrong;
      }
    }
  }

 private:
  int Way(size_t question) const { return number_ + static_cast<int>(question); }

  static bool Same(const std::vector<float>& answer, const Question& question, double bound) {
    if (bound == 0.0) return SameBits(answer, question.alone);
    return testing::Judge(answer, question.alone, question.hidden, bound).passed;
  }

  const int number_;
};

// Every thread asks `engine`, which serves `models`, alone and then together with the others.
void AskTogether(const TwoModels& models, const Crowd& crowd, Engine* engine) {
  std::vector<Caller> callers;
  callers.reserve(static_cast<size_t>(crowd.threads));
  for (int i = 0; i < crowd.threads; ++i) callers.emplace_back(i, models, crowd, engine);
  // The inputs differ, so that an answer that went to the wrong caller is seen.
  for (size_t i = 0; i < callers[0].questions.size(); ++i) {
    const Question &one = callers[0].questions[i], &other = callers[1].questions[i];
    REQUIRE(!testing::Judge(one.alone, other.alone, one.hidden, 0.1).passed);
  }

  std::atomic<int> waiting{crowd.threads};
  std::vector<std::thread> threads;
  for (Caller& caller : callers) {
    threads.emplace_back([&] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();  // all start together
      caller.Run(crowd, engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Caller& caller : callers) {
    CHECK(caller.failed == 0);
    CHECK(caller.wrong == 0);
  }
}

}  // namespace

TEST_CASE("B54: calls of many threads at once on layers of different widths give each its serial answer to the bit") {
  const TwoModels models(CaseSchemeNamed("int4"), CaseSchemeNamed("bf16"));
  EngineOptions options;
  options.deterministic = true;
  const std::unique_ptr<Engine> engine = models.Load(options);
  AskTogether(models, {.threads = kThreadSanitizer ? 2 : 8, .calls = kThreadSanitizer ? 20 : 200, .rows = {1, 5, 64, 300}}, engine.get());
}

// Rows of bf16, which some backends multiply in another way than float32, and in one call experts of few rows beside experts of
// many, for which some have two ways.
TEST_CASE("B54: on every backend calls at once give their serial answers, to the bit with `deterministic`, else within the bound") {
  struct Way { const char* scheme; ActivationChoice activations; double bound; };
  for (const Way& way : {Way{"int4", ActivationChoice::kFile, 0.01}, Way{"int4", ActivationChoice::kInt8, 0.04},
                         Way{"bf16", ActivationChoice::kFile, 0.01}}) {
    const TwoModels models(CaseSchemeNamed(way.scheme), CaseSchemeNamed(way.scheme));
    for (const std::string& backend : models.wide.model.Backends(way.activations)) {
      for (bool deterministic : {false, true}) {
        INFO(backend << ": " << way.scheme << (deterministic ? ", deterministic" : ""));
        EngineOptions options;
        options.policy = *Policy::Parse("require:" + backend);
        options.activations = way.activations;
        options.deterministic = deterministic;
        const std::unique_ptr<Engine> engine = models.Load(options);
        AskTogether(models, {.threads = kThreadSanitizer ? 2 : 4, .calls = kThreadSanitizer ? 8 : 32, .rows = {1, 5, 9, 64},
                             .dtype = DType::kBf16, .bound = deterministic ? 0.0 : way.bound}, engine.get());
      }
    }
  }
}

}  // namespace moed
