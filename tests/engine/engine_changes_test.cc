// Models that change while they are served: every answer is of the old weights or of the new ones, memory is asked for first and given
// back, and what fails leaves all as it was.
#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary
using Catch::Matchers::Contains;

constexpr int64_t kHidden = 64, kRows = 5;

EngineOptions Options() {
  EngineOptions options;
  options.threads = 2;
  options.device = ThisDevice();
  options.deterministic = true;
  return options;
}

// A checkpoint whose weights are those of RcWeights times `factor`.
struct Folder {
  explicit Folder(float factor, int layers = 2, int64_t hidden = kHidden, int experts = 4) {
    CheckpointBuilder builder;
    ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = layers, .hidden = hidden, .intermediate = 32, .num_experts = experts};
    spec.weights = [plain = RcWeights(hidden, 32), factor](int expert, int projection, int64_t index) {
      return plain(expert, projection, index) * factor;
    };
    AddModel(spec, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
  }
  const std::string& path() const { return dir.path(); }
  TempDir dir;
};

struct Answer {
  absl::Status status;
  std::vector<float> y;
  uint64_t generation = 0;
};

Answer Ask(Engine& engine, int layer = 1, int64_t hidden = kHidden) {
  static const std::vector<float> x = CaseHidden(kRows, 256);
  ForwardCall call;
  call.layer = layer;
  call.hidden = {x.data(), DType::kF32, kRows, hidden};
  Answer answer;
  answer.y.resize(static_cast<size_t>(kRows * hidden));
  ForwardInfo info;
  answer.status = engine.Forward("m", call, {answer.y.data(), DType::kF32, kRows, hidden}, &info);
  answer.generation = info.generation;
  return answer;
}

std::unique_ptr<Engine> Serving(const std::string& path, const EngineOptions& options = Options()) {
  auto engine = std::make_unique<Engine>(options, LinkedBackends());
  REQUIRE(engine->Plan("m", path).ok());
  REQUIRE(engine->Load("m", {}).ok());
  return engine;
}

std::vector<float> Alone(const Folder& checkpoint) { return Ask(*Serving(checkpoint.path())).y; }

}  // namespace

TEST_CASE("A swap gives the new weights a larger generation, and rollback the old ones another") {
  const Folder one(1.0f), two(0.5f);
  const std::vector<float> y1 = Alone(one), y2 = Alone(two);
  REQUIRE(y1 != y2);
  for (const bool keep : {false, true}) {
    const auto engine = Serving(one.path());
    CHECK(absl::IsFailedPrecondition(engine->Rollback("m", {})));
    CHECK((Ask(*engine).y == y1 && Ask(*engine).generation == 1));
    REQUIRE(engine->Swap("m", two.path(), keep, {}).ok());
    CHECK((Ask(*engine).y == y2 && Ask(*engine).generation == 2));
    CHECK(engine->Status()[0].path == two.path());
    REQUIRE(engine->Rollback("", {}).ok());
    CHECK((Ask(*engine).y == y1 && Ask(*engine).generation == 3));
    REQUIRE(engine->Rollback("m", {}).ok());  // of the rollback
    CHECK((Ask(*engine).y == y2 && Ask(*engine).generation == 4));
  }
}

TEST_CASE("Under load every answer is of one generation's weights, and no call fails") {
  const Folder one(1.0f), two(0.5f);
  const std::vector<float> y1 = Alone(one), y2 = Alone(two);
  const auto engine = Serving(one.path());
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, answers{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      uint64_t last = 0;
      while (!stop) {
        const Answer answer = Ask(*engine);
        const std::vector<float>& want = answer.generation % 2 == 1 ? y1 : y2;
        wrong += !answer.status.ok() || answer.y != want || answer.generation < last;
        last = answer.generation;
        ++answers;
      }
    });
  }
  for (int swap = 0; swap < 10; ++swap) {
    const int before = answers;
    CHECK(engine->Swap("m", swap % 2 == 0 ? two.path() : one.path(), swap % 3 == 0, {}).ok());
    for (int i = 0; answers < before + 3 && i < 20'000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
  CHECK(answers > 10);
  CHECK(engine->Status()[0].generation == 11);
}

TEST_CASE("The new weights may have other layers and other sizes") {
  const Folder small(1.0f), large(1.0f, 3, 128, 6);
  const auto engine = Serving(small.path());
  REQUIRE(engine->Swap("m", large.path(), false, {}).ok());
  CHECK(Ask(*engine, 2, 128).status.ok());
  CHECK(absl::IsInvalidArgument(Ask(*engine, 1, kHidden).status));
  CHECK(engine->Status()[0].layers.size() == 3);
  CHECK(engine->Status()[0].num_experts == 6);
}

TEST_CASE("What fails leaves the weights that were served: a bad path, a stop, too little memory, a second change") {
  const Folder one(1.0f), two(0.5f);
  const std::vector<float> y1 = Alone(one);
  EngineOptions options = Options();
  const LayerExplanation layer = Serving(one.path())->Explain("m")->layers[0];
  options.memory_limit = layer.workspace_bytes + layer.bytes * 3;  // one model of two layers, and half of another
  const auto tight = Serving(one.path(), options);
  const absl::Status refused = tight->Swap("m", two.path(), false, {});
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()), Contains(std::to_string(options.memory_limit)));
  CHECK((Ask(*tight).y == y1 && Ask(*tight).generation == 1));

  const auto engine = Serving(one.path());
  CHECK_FALSE(engine->Swap("m", one.path() + "/none", false, {}).ok());
  CHECK(absl::IsNotFound(engine->Swap("other", two.path(), false, {})));
  int asked = 0;
  const absl::Status stopped = engine->Swap("m", two.path(), false, [&](const LoadProgress& progress) {
    ++asked;
    CHECK((progress.done == 1 && progress.total == 2));
    std::thread([&] {
      CHECK(absl::IsFailedPrecondition(engine->Swap("m", two.path(), false, {})));
      CHECK(absl::IsFailedPrecondition(engine->Remove("m")));
    }).join();
    CHECK(Ask(*engine).y == y1);
    return absl::CancelledError("enough");
  });
  CHECK((stopped == absl::CancelledError("enough") && asked == 1));
  CHECK((Ask(*engine).y == y1 && Ask(*engine).generation == 1));
  CHECK(engine->Status()[0].state == LayerState::kReady);
}

TEST_CASE("Kept weights count as memory until they are let go") {
  const Folder one(1.0f), two(0.5f);
  EngineOptions options = Options();
  const LayerExplanation layer = Serving(one.path())->Explain("m")->layers[0];
  options.memory_limit = layer.workspace_bytes + layer.bytes * 5;  // two models of two layers, and half of another
  const auto engine = Serving(one.path(), options);
  REQUIRE(engine->Swap("m", two.path(), true, {}).ok());
  CHECK(absl::IsResourceExhausted(engine->Add("n", one.path(), {})));
  REQUIRE(engine->Swap("m", two.path(), false, {}).ok());  // lets them go first
  CHECK(engine->Add("n", one.path(), {}).ok());
}

TEST_CASE("Models come and go, and a name that comes again goes on with its generations") {
  const Folder one(1.0f), two(0.5f);
  const auto engine = Serving(one.path());
  CHECK(absl::IsAlreadyExists(engine->Add("m", two.path(), {})));
  REQUIRE(engine->Add("n", two.path(), {}).ok());
  CHECK(engine->Status().size() == 2);
  REQUIRE(engine->Remove("m").ok());
  CHECK(absl::IsNotFound(Ask(*engine).status));
  CHECK(absl::IsNotFound(engine->Remove("m")));
  REQUIRE(engine->Add("m", two.path(), {}).ok());
  CHECK(Ask(*engine).generation == 2);
  REQUIRE(engine->Remove("m").ok());
  REQUIRE(engine->Remove("n").ok());
  CHECK(engine->Status().empty());
  CHECK(absl::IsNotFound(Ask(*engine).status));
}

}  // namespace moed
