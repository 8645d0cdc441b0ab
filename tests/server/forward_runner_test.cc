// Forwards from caller to caller through queue and engine, without a transport and mostly without threads: what runs together, what
// goes in pieces, where outputs go, and that everybody is answered once.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/backends.h"
#include "server/forward_runner.h"
#include "server/recorder.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/puppet_accelerator.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int64_t kHidden = 64;
constexpr int kExperts = 4;

// Who keeps its rows and what it was answered.
struct Caller : ForwardCaller {
  Caller(int64_t count, float factor) : rows(count), x(CaseHidden(count, kHidden)) {
    for (float& value : x) value *= factor;
  }
  TimePoint started() const override { return begun; }
  TimePoint deadline() const override { return until; }
  bool Gone() const override { return gone; }
  void Prepare() override { ++prepared; }
  void Answer(ForwardAnswer got) override {
    if (no_memory) throw std::bad_alloc();
    answer.emplace(std::move(got));
    ++ended;
  }
  void Fail(const absl::Status& why) override {
    failure = why;
    ++ended;
  }

  const int64_t rows;
  std::vector<float> x;
  std::vector<float> logits;
  const TimePoint begun = steady_clock::now();
  TimePoint until = TimePoint::max();
  bool gone = false, no_memory = false;
  int prepared = 0;
  std::atomic<int> ended{0};
  std::optional<ForwardAnswer> answer;
  absl::Status failure;
};

// What an observer of a layer was told.
struct Observer : LayerObserver {
  struct Run {
    int calls = 0;
    int64_t rows = 0;
    std::vector<int32_t> ids;
    bool operator==(const Run&) const = default;
  };
  void Finished(const FinishedForward&) override { FAIL("the end of a call is its transport's to tell"); }
  void Ran(const FinishedRun& run) override {
    Run told{run.calls, run.rows, {}};
    for (const auto& ids : run.ids) told.ids.insert(told.ids.end(), ids.begin(), ids.end());
    CHECK(run.compute_us >= 0);
    runs.push_back(told);
  }
  std::vector<Run> runs;
};

// An engine with a model of two layers, on the puppet or on the host, and a queue that runs when told.
struct Bench {
  explicit Bench(bool on_device = true, int64_t batch_rows = 16) : queue(Limits(batch_rows), [this] { return now; }) {
    CheckpointBuilder builder;
    AddModel({.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = kHidden, .intermediate = 64}, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
    EngineOptions options;
    options.threads = 2;
    options.deterministic = true;
    options.device = ThisDevice();
    if (on_device) puppet.Describe(&options.device);
    std::vector<const Backend*> backends = LinkedBackends();
    backends.insert(backends.begin(), &backend);
    engine = std::make_unique<Engine>(options, backends);
    REQUIRE(engine->Plan("m", dir.path()).ok());
    REQUIRE(engine->Load("m", {}).ok());
    runner = std::make_unique<ForwardRunner>(engine.get(), &queue, batch_rows);
  }
  static WorkQueue::Limits Limits(int64_t batch_rows) {
    WorkQueue::Limits limits;
    limits.calls = 8;
    limits.batch_rows = batch_rows;
    return limits;
  }

  std::shared_ptr<Caller> Submit(int64_t rows, float factor, const std::function<void(ForwardWork*)>& change = {}) {
    auto caller = std::make_shared<Caller>(rows, factor);
    CHECK(SubmitFor(caller, change).ok());
    return caller;
  }
  absl::Status SubmitFor(const std::shared_ptr<Caller>& caller, const std::function<void(ForwardWork*)>& change = {}) {
    ForwardWork work;
    work.checked.model = "m";
    work.checked.call.layer = 1;
    work.checked.call.hidden = {caller->x.data(), DType::kF32, caller->rows, kHidden};
    work.want_routing = true;
    work.caller = caller;
    if (change) change(&work);
    return runner->Submit(std::move(work));
  }
  void RunAll() {
    while (queue.RunNext()) {
    }
  }
  // Answered as the engine answers the call alone.
  void CheckAnswer(const Caller& caller, int layer = 1) const {
    INFO(caller.failure.ToString());
    CHECK(caller.ended == 1);
    CHECK(caller.prepared == 1);
    REQUIRE(caller.answer.has_value());
    std::vector<float> alone(caller.x.size());
    ForwardCall call;
    call.layer = layer;
    call.hidden = {caller.x.data(), DType::kF32, caller.rows, kHidden};
    if (!caller.logits.empty()) call.routing = RoutingByLogits{caller.logits};
    ForwardInfo info;
    info.want_routing = true;
    REQUIRE(engine->Forward("m", call, {alone.data(), DType::kF32, caller.rows, kHidden}, &info).ok());
    if (caller.answer->output) CHECK(std::memcmp(caller.answer->output->data(), alone.data(), alone.size() * sizeof(float)) == 0);
    CHECK(caller.answer->info.ids == info.ids);
    CHECK(caller.answer->info.weights == info.weights);
    CHECK(caller.answer->receive_us >= 0);
    CHECK(caller.answer->queue_us >= 0);
  }

  WorkQueue::TimePoint now{std::chrono::hours(1)};
  TempDir dir;
  PuppetAccelerator puppet;
  PuppetBackend backend{&puppet};
  std::unique_ptr<Engine> engine;
  WorkQueue queue;
  std::unique_ptr<ForwardRunner> runner;
};

}  // namespace

TEST_CASE("Calls of one layer that wait go in one run, and each gets its own answer") {
  for (const bool on_device : {true, false}) {
    INFO((on_device ? "device" : "host"));
    Bench bench(on_device);
    std::vector<std::shared_ptr<Caller>> callers;
    for (int i = 0; i < 3; ++i) callers.push_back(bench.Submit(3 + i, 1.0f + 0.5f * static_cast<float>(i)));
    CHECK(bench.queue.RunNext());
    CHECK_FALSE(bench.queue.RunNext());
    for (const auto& caller : callers) {
      bench.CheckAnswer(*caller);
      CHECK(caller->answer->info.batch_rows == 12);
    }
    CHECK(bench.queue.counters().merged == 3);
    CHECK(bench.queue.counters().rows == 12);
  }
}

TEST_CASE("Calls that differ in layer, dtype, routing, number of slots or shared expert share no run") {
  Bench bench;
  const std::vector<int32_t> ids(8, 1);
  const std::vector<float> weights(8, 0.5f);
  const std::vector<uint16_t> bf16(4 * kHidden, 0x3f80);
  bench.Submit(4, 1.0f);
  bench.Submit(4, 1.0f, [](ForwardWork* work) { work->checked.call.layer = 0; });
  bench.Submit(4, 1.0f, [&](ForwardWork* work) { work->checked.call.routing = RoutingByIds{2, ids, weights}; });
  bench.Submit(4, 1.0f, [&](ForwardWork* work) {
    work->checked.call.routing = RoutingByIds{1, std::span(ids).first(4), std::span(weights).first(4)};
  });
  bench.Submit(4, 1.0f, [](ForwardWork* work) { work->checked.call.routed_only = true; });
  bench.Submit(4, 1.0f, [&](ForwardWork* work) { work->checked.call.hidden = {bf16.data(), DType::kBf16, 4, kHidden}; });
  bench.RunAll();
  CHECK(bench.queue.counters().runs == 6);
  CHECK(bench.queue.counters().finished == 6);
  CHECK(bench.queue.counters().merged == 0);
}

TEST_CASE("A call of more rows than a run goes in pieces, others pass in between, and its answer is whole") {
  for (const bool on_device : {true, false}) {
    INFO((on_device ? "device" : "host"));
    Bench bench(on_device);
    const auto large = bench.Submit(40, 1.0f);
    const auto small = bench.Submit(2, 2.0f);
    CHECK(bench.queue.RunNext());
    CHECK(large->ended == 0);
    CHECK(bench.queue.RunNext());
    bench.CheckAnswer(*small);
    CHECK(large->ended == 0);
    CHECK(bench.queue.RunNext());
    CHECK(bench.queue.RunNext());
    CHECK_FALSE(bench.queue.RunNext());
    bench.CheckAnswer(*large);
    CHECK(large->answer->info.batch_rows == 16);
    CHECK(bench.queue.counters().finished == 2);
  }
}

TEST_CASE("A large call whose deadline passes between two pieces is dropped there and counted, and so is one whose caller goes") {
  Bench bench;
  auto late = std::make_shared<Caller>(40, 1.0f);
  late->until = bench.now + milliseconds(10);
  REQUIRE(bench.SubmitFor(late).ok());
  const auto gone = bench.Submit(40, 1.0f);
  CHECK(bench.queue.RunNext());
  CHECK(bench.queue.RunNext());
  bench.now += milliseconds(10);
  gone->gone = true;
  bench.RunAll();
  CHECK(late->ended == 1);
  CHECK(absl::IsDeadlineExceeded(late->failure));
  CHECK(gone->ended == 1);
  CHECK(absl::IsCancelled(gone->failure));
  CHECK(bench.queue.counters().expired == 1);
  CHECK(bench.queue.counters().cancelled == 1);
  CHECK(bench.queue.counters().runs == 2);
}

TEST_CASE("A layer's observer is told of each run, with the experts that ran, and callers get no routing for that") {
  for (const bool on_device : {true, false}) {
    INFO((on_device ? "device" : "host"));
    Bench bench(on_device);
    const auto observer = std::make_shared<Observer>();
    const auto observed = [&](bool want_routing) {
      return [&observer, want_routing](ForwardWork* work) {
        work->checked.observer = observer;
        work->want_routing = want_routing;
      };
    };
    const auto one = bench.Submit(3, 1.0f, observed(false)), other = bench.Submit(5, 1.5f, observed(true));
    bench.RunAll();
    bench.CheckAnswer(*other);
    REQUIRE(one->answer.has_value());
    CHECK(one->answer->info.ids.empty());
    CHECK(one->answer->info.weights.empty());
    CHECK_FALSE(one->answer->info.want_routing);
    REQUIRE(observer->runs.size() == 1);
    CHECK(observer->runs[0].calls == 2);
    CHECK(observer->runs[0].rows == 8);
    const size_t top_k = static_cast<size_t>(other->answer->info.top_k);
    if (!on_device) CHECK(observer->runs[0].ids.size() == 8 * top_k);  // from a device they come where a caller wants them
    const std::vector<int32_t> last(observer->runs[0].ids.end() - static_cast<ptrdiff_t>(5 * top_k), observer->runs[0].ids.end());
    CHECK(last == other->answer->info.ids);
  }
}

TEST_CASE("A recorded call has its whole answer, also one that goes in pieces or shares a run, and one that fails is lost") {
  for (const bool on_device : {true, false}) {
    INFO((on_device ? "device" : "host"));
    TempDir folder;
    Recorder::Options options;
    options.folder = folder.path();
    options.rate = 1;
    const auto recorder = Recorder::Open(options, [] { return std::chrono::system_clock::time_point(); });
    REQUIRE(recorder.ok());
    Bench bench(on_device);
    const auto recorded = [&](ForwardWork* work) {
      work->checked.output_dtype = DType::kF32;
      work->checked.recording = (*recorder)->Sample(work->checked, ModelFacts(), "", Transport::kRpc);
      CHECK(work->checked.recording != nullptr);
    };
    std::vector<std::shared_ptr<Caller>> callers;
    for (const int64_t rows : {40, 3, 5}) callers.push_back(bench.Submit(rows, 1.0f, recorded));
    const std::vector<int32_t> bad(4, kExperts);
    const std::vector<float> weights(4, 1.0f);
    bench.Submit(4, 1.0f, [&](ForwardWork* work) {
      work->checked.call.routing = RoutingByIds{1, bad, weights};
      recorded(work);
    });
    bench.RunAll();
    for (const auto& caller : callers) bench.CheckAnswer(*caller);
    (*recorder)->Stop();
    CHECK((*recorder)->counts().lost[static_cast<size_t>(RecordLoss::kFailed)] == 1);
    const auto files = FindRecordings({folder.path()});
    REQUIRE(files.ok());
    REQUIRE(files->size() == 3);
    for (const std::string& file : *files) {
      const auto call = ReadRecordedCall(file);
      REQUIRE(call.ok());
      const auto of = [&](const std::shared_ptr<Caller>& caller) { return caller->rows == call->rows; };
      const Caller& caller = **std::find_if(callers.begin(), callers.end(), of);
      CHECK(std::memcmp(call->hidden.data(), caller.x.data(), call->hidden.size()) == 0);
      CHECK(std::memcmp(call->output.data(), caller.answer->output->data(), call->output.size()) == 0);
      CHECK(call->backend == caller.answer->info.backend);
    }
  }
}

TEST_CASE("Pieces of a large call are runs of their own to the observer, and a call that fails is none") {
  Bench bench(false);
  const auto observer = std::make_shared<Observer>();
  const std::vector<int32_t> ids(40, 1), bad(4, kExperts);
  const std::vector<float> weights(40, 1.0f);
  const auto by = [&](const std::vector<int32_t>& all, size_t rows) {
    return [&, rows](ForwardWork* work) {
      work->checked.observer = observer;
      work->want_routing = false;
      work->checked.call.routing = RoutingByIds{1, std::span(all).first(rows), std::span(weights).first(rows)};
    };
  };
  const auto large = bench.Submit(40, 1.0f, by(ids, 40));
  const auto failed = bench.Submit(4, 1.0f, by(bad, 4));
  bench.RunAll();
  CHECK(large->answer.has_value());
  CHECK(absl::IsInvalidArgument(failed->failure));
  REQUIRE(observer->runs.size() == 3);
  CHECK(observer->runs[0] == Observer::Run{1, 16, std::vector<int32_t>(16, 1)});
  CHECK(observer->runs[2] == Observer::Run{1, 8, std::vector<int32_t>(8, 1)});
}

TEST_CASE("A row that cannot be routed fails its call alone, and is named by its place in the call also in a later piece") {
  Bench bench(false);
  const auto logits = [](Caller* caller) {
    for (int64_t i = 0; i < caller->rows * kExperts; ++i) caller->logits.push_back(static_cast<float>((i * 7) % 11));
  };
  std::vector<std::shared_ptr<Caller>> callers;
  for (const int64_t rows : {4, 4, 40}) {
    callers.push_back(std::make_shared<Caller>(rows, 1.0f));
    logits(callers.back().get());
  }
  callers[1]->logits[2 * kExperts] = std::numeric_limits<float>::quiet_NaN();
  callers[2]->logits[20 * kExperts] = std::numeric_limits<float>::quiet_NaN();
  for (const auto& caller : callers) {
    const auto by_logits = [&](ForwardWork* work) { work->checked.call.routing = RoutingByLogits{caller->logits}; };
    REQUIRE(bench.SubmitFor(caller, by_logits).ok());
  }
  bench.RunAll();
  bench.CheckAnswer(*callers[0]);
  for (const int bad : {1, 2}) {
    CHECK(callers[bad]->ended == 1);
    CHECK(absl::IsInvalidArgument(callers[bad]->failure));
  }
  CHECK_THAT(std::string(callers[1]->failure.message()), Catch::Matchers::Contains("row 2"));
  CHECK_THAT(std::string(callers[2]->failure.message()),
             Catch::Matchers::Contains("row 4") && Catch::Matchers::Contains("counted from row 16 of the call"));
}

TEST_CASE("The output goes to memory that the caller gives") {
  Bench bench;
  std::vector<float> memory(5 * kHidden, -1.0f);
  const auto given = bench.Submit(5, 1.5f, [&](ForwardWork* work) { work->output = reinterpret_cast<std::byte*>(memory.data()); });
  const auto other = bench.Submit(5, 1.5f);
  bench.RunAll();
  bench.CheckAnswer(*given);
  bench.CheckAnswer(*other);
  CHECK_FALSE(given->answer->output.has_value());
  REQUIRE(other->answer->output.has_value());
  CHECK(std::memcmp(memory.data(), other->answer->output->data(), memory.size() * sizeof(float)) == 0);
}

TEST_CASE("One answer that finds no memory fails its call alone") {
  Bench bench;
  std::vector<std::shared_ptr<Caller>> callers;
  for (int i = 0; i < 3; ++i) callers.push_back(bench.Submit(2, 1.0f));
  callers[1]->no_memory = true;
  bench.RunAll();
  bench.CheckAnswer(*callers[0]);
  bench.CheckAnswer(*callers[2]);
  CHECK(callers[1]->ended == 1);
  CHECK(absl::IsResourceExhausted(callers[1]->failure));
}

TEST_CASE("A device that failed fails every call of a run") {
  Bench bench;
  std::vector<std::shared_ptr<Caller>> callers;
  for (int i = 0; i < 3; ++i) callers.push_back(bench.Submit(2, 1.0f));
  bench.puppet.Fail("cable pulled");
  bench.RunAll();
  for (const auto& caller : callers) {
    CHECK(caller->ended == 1);
    CHECK(absl::IsUnavailable(caller->failure));
  }
}

TEST_CASE("From many threads at once, on two compute threads, everybody gets the answer of its own rows") {
  Bench bench;
  WorkQueue queue(Bench::Limits(16), [] { return steady_clock::now(); });
  ForwardRunner runner(bench.engine.get(), &queue, 16);
  queue.Start(2);
  constexpr int kThreads = 4, kCalls = 25;
  std::vector<std::shared_ptr<Caller>> callers[kThreads];
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < kCalls; ++i) {
      callers[thread].push_back(std::make_shared<Caller>(i % 7 == 6 ? 40 : 1 + i % 5, 1.0f + 0.01f * static_cast<float>(thread)));
    }
    threads.emplace_back([&, thread] {
      for (const auto& caller : callers[thread]) {
        ForwardWork work;
        work.checked.model = "m";
        work.checked.call.layer = 1;
        work.checked.call.hidden = {caller->x.data(), DType::kF32, caller->rows, kHidden};
        work.want_routing = true;
        work.caller = caller;
        while (!runner.Submit(work).ok()) std::this_thread::yield();  // the queue is full
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  queue.Shutdown();
  for (const auto& of_thread : callers) {
    for (const auto& caller : of_thread) bench.CheckAnswer(*caller);
  }
  CHECK(queue.counters().finished == kThreads * kCalls);
}

TEST_CASE("A full queue refuses with the time after which to try again, and the caller is not told") {
  Bench bench;
  for (int i = 0; i < 8; ++i) bench.Submit(1, 1.0f);
  const auto refused = std::make_shared<Caller>(1, 1.0f);
  const absl::Status status = bench.SubmitFor(refused);
  CHECK(absl::IsResourceExhausted(status));
  CHECK(status.GetPayload("type.googleapis.com/google.rpc.RetryInfo").has_value());
  bench.RunAll();
  CHECK(refused->ended == 0);
}

}  // namespace moed
