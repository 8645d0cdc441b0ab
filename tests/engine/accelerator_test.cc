// The engine with layers on an accelerator, played by a puppet whose arithmetic is that of cpu_generic: which way a call takes, how
// many run at once, and what happens when the device refuses or fails.
#include <catch2/catch.hpp>

#include <atomic>
#include <cstring>
#include <future>
#include <limits>
#include <thread>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/engine/accelerator_bench.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary
using Catch::Matchers::Contains;

// Every way to route, with and without the shared expert, in one piece and in chunks.
void CompareWithHost(const Files& files, Bench& bench, Bench& host) {
  for (int64_t rows : {0, 1, 4, 11}) {
    const Input input(rows);
    for (int way : {0, 1, 2}) {
      for (bool routed_only : {false, true}) {
        INFO(rows << " rows, way " << way << (routed_only ? ", routed only" : ""));
        const ForwardCall call = input.Call(files.layer, way, routed_only);
        CheckSame(Ask(bench.engine.get(), input, call), Ask(host.engine.get(), input, call));
      }
    }
  }
}

void FewRows(EngineOptions& options) { options.max_tokens = 4; }

}  // namespace

TEST_CASE("A layer that is wholly on the accelerator is assembled, warmed up on every lane, and answers as the host does") {
  for (const ModelSpec& spec : {SharedModel(), PlainModel()}) {
    const Files files(spec);
    Bench bench("auto", [](EngineOptions& options) { options.max_tokens = 4, options.lanes = 3; });
    Bench host("require:cpu_generic", FewRows);
    bench.Load(files);
    host.Load(files);
    CHECK(bench.engine->UsesGpu());
    CHECK(bench.engine->CallsAtOnce() == 3);
    CHECK(bench.engine->Status()[0].layers[0].backend == "cuda_puppet");
    CHECK(bench.engine->Host().gpu == "puppet");
    CHECK(bench.puppet.counts().lanes == 3);
    CHECK(bench.puppet.counts().assembles == spec.num_layers);
    CHECK(bench.puppet.counts().warm_ups == 3 * spec.num_layers);
    CHECK(bench.puppet.counts().device_calls == 0);
    const int prepared_calls = bench.puppet.counts().prepared_calls;  // of the self-check
    CHECK(prepared_calls > 0);
    CompareWithHost(files, bench, host);
    CHECK(bench.puppet.counts().prepared_calls == prepared_calls);
    CHECK(bench.puppet.counts().device_calls > 0);
    const auto rows = bench.engine->SelfCheck("m", -1, 8, 1);
    REQUIRE(rows.ok());
    for (const SelfCheckRow& row : *rows) CHECK(row.passed);
    CHECK(bench.puppet.counts().lanes == 3);
    CHECK_FALSE(host.engine->UsesGpu());
    CHECK(host.engine->CallsAtOnce() == 1);
    CHECK(host.puppet.counts().lanes == 0);
  }
}

TEST_CASE("A layer with one part on the accelerator and one on the host takes the host's way, with a lane for its part") {
  const Files files(SharedModel());
  for (const std::string policy : {"auto,scheme:bf16=require:cpu_generic", "auto,scheme:int4=require:cpu_generic"}) {
    INFO(policy);
    Bench bench(policy, FewRows);
    Bench host("require:cpu_generic", FewRows);
    bench.Load(files);
    host.Load(files);
    CHECK(bench.engine->UsesGpu());
    CHECK(bench.puppet.counts().assembles == 0);
    CompareWithHost(files, bench, host);
    CHECK(bench.puppet.counts().device_calls == 0);
    CHECK(bench.puppet.counts().prepared_calls > 0);
    CHECK(bench.engine->SelfCheck("m", -1, 4, 1).ok());
  }
}

TEST_CASE("A server that holds a range of experts gives its accelerator the model's ids") {
  const Files files(SharedModel());
  for (const auto& [first, end] : {std::pair(0, 2), std::pair(2, 6)}) {
    const auto range = [from = first, to = end](EngineOptions& options) { options.first_expert = from, options.end_expert = to; };
    Bench bench("auto", range);
    Bench host("require:cpu_generic", range);
    bench.Load(files);
    host.Load(files);
    CompareWithHost(files, bench, host);
  }
}

TEST_CASE("As many calls as there are lanes run at once, beside a call on the host, and a further one waits") {
  ModelSpec spec = SharedModel();
  const Files files(spec);
  Bench bench("auto,layers:1=require:cpu_generic");
  bench.Load(files);
  const Input input(3);
  const ForwardCall call = input.Call(files.layer, 0);
  const Answer alone = Ask(bench.engine.get(), input, call);
  bench.puppet.Block();
  std::vector<std::future<Answer>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(std::async(std::launch::async, [&] { return Ask(bench.engine.get(), input, call); }));
  REQUIRE(bench.puppet.WaitForBlocked(2));
  CHECK(Ask(bench.engine.get(), input, input.Call(1, 0)).status.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(bench.puppet.counts().device_calls == 3);  // the one alone and two of the three
  bench.puppet.Release();
  for (std::future<Answer>& one : calls) CheckSame(one.get(), alone);
}

TEST_CASE("Threads that call at once on layers of host and accelerator get each its serial answer") {
  const Files files(SharedModel());
  Bench bench("auto,layers:1=require:cpu_generic", FewRows);
  bench.Load(files);
  const auto ask = [&](int caller, int turn) {
    const Input input(1 + caller * 3);
    return Ask(bench.engine.get(), input, input.Call(turn % 3 == 0 ? 1 : files.layer, turn % 3));
  };
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    std::vector<Answer> want;
    for (int turn = 0; turn < 6; ++turn) want.push_back(ask(caller, turn));
    threads.emplace_back([&, caller, want] {
      for (int round = 0; round < 30; ++round) {
        const Answer got = ask(caller, round % 6);
        wrong += !got.status.ok() || got.y != want[round % 6].y || got.info.ids != want[round % 6].info.ids;
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 3; ++i) wrong += !bench.engine->SelfCheck("m", -1, 2, 1).ok();
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("Logits that cannot be routed fail a call on the accelerator, and the row can be found also in a later chunk") {
  const Files files(PlainModel());
  Bench bench("auto", FewRows);
  bench.Load(files);
  Input input(11);
  input.logits[9 * kExperts + 1] = std::numeric_limits<float>::quiet_NaN();
  const Answer answer = Ask(bench.engine.get(), input, input.Call(files.layer, 1));
  CHECK(absl::IsInvalidArgument(answer.status));
  CHECK_THAT(std::string(answer.status.message()), Contains("row 1") && Contains("rows counted from row 8 of the call"));
}

TEST_CASE("Memory of the GPU is counted apart from the host's: weights and one workspace for each lane") {
  const Files files(SharedModel());
  Bench probe;
  REQUIRE(probe.engine->Plan("m", files.dir.path()).ok());
  const ExplainReport report = *probe.engine->Explain("m");
  CHECK(report.need.host == MemoryNeed::Part());
  CHECK(report.need.gpu.weights > 0);
  const uint64_t needed = report.need.gpu.weights + 3 * report.need.gpu.workspace;
  for (const bool enough : {true, false}) {
    Bench bench("auto", [&](EngineOptions& options) {
      options.lanes = 3;
      options.memory_limit = 1;  // of the host: no matter here
      options.device.gpu_free_bytes = enough ? needed : needed - 1;
    });
    const absl::Status status = bench.engine->Plan("m", files.dir.path());
    CHECK(status.ok() == enough);
    if (enough) continue;
    CHECK(absl::IsResourceExhausted(status));
    CHECK_THAT(std::string(status.message()), Contains(std::to_string(report.need.gpu.weights) + " bytes of GPU memory") &&
                                                  Contains("3 lanes") && Contains(std::to_string(needed - 1) + " are free"));
    Bench split("auto,scheme:bf16=require:cpu_generic", [](EngineOptions& options) { options.memory_limit = 1; });
    CHECK_THAT(std::string(split.engine->Plan("m", files.dir.path()).message()), Contains("1 are allowed (memory limit)"));
  }
  DeviceInfo small = ThisDevice();
  probe.puppet.Describe(&small);
  small.gpu_free_bytes = 1000;
  std::vector<const Backend*> backends = LinkedBackends();
  backends.insert(backends.begin(), &probe.backend);
  const auto explained = ExplainCheckpoint(files.dir.path(), small, backends, Policy(), ActivationChoice::kFile, -1, 8192, 3);
  REQUIRE(explained.ok());
  CHECK_FALSE(explained->fits);
  CHECK_THAT(explained->layers.back().note, Contains("bytes of GPU memory") && Contains("1000 are free"));
  small.has_gpu = false;
  CHECK(ExplainCheckpoint(files.dir.path(), small, backends, Policy(), ActivationChoice::kFile, -1, 8192, 3)->layers[0].choice !=
        "cuda_puppet");
}

namespace {

// A backend whose rows may depend on their company.
class LooseBackend : public PuppetBackend {
 public:
  using PuppetBackend::PuppetBackend;
  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override {
    Verdict verdict = PuppetBackend::Check(desc, device);
    if (desc.deterministic) verdict.reasons.push_back({"not_deterministic", "rows depend on their company"});
    return verdict;
  }
};

}  // namespace

TEST_CASE("The report of a deterministic engine, and the memory that it asks for, are those of the backends that run") {
  const Files files(SharedModel());
  PuppetAccelerator puppet;
  const LooseBackend loose(&puppet);
  for (const bool deterministic : {false, true}) {
    EngineOptions options;
    options.threads = 2;
    options.deterministic = deterministic;
    options.device = ThisDevice();
    puppet.Describe(&options.device);
    std::vector<const Backend*> backends = LinkedBackends();
    std::erase_if(backends, [](const Backend* backend) { return backend->OnGpu(); });
    backends.insert(backends.begin(), &loose);
    Engine engine(options, backends);
    REQUIRE(engine.Plan("m", files.dir.path()).ok());
    const ExplainReport report = *engine.Explain("m");
    const std::vector<LayerStatus> layers = engine.Status()[0].layers;
    REQUIRE(report.layers.size() == layers.size());
    for (size_t index = 0; index < layers.size(); ++index) {
      CHECK(report.layers[index].choice == layers[index].backend);
      CHECK((report.layers[index].choice == loose.Name()) == !deterministic);
      CHECK((report.layers[index].shared_choice == loose.Name()) == !deterministic);
      CHECK(report.layers[index].backends[0].verdict.ok() == !deterministic);
    }
    CHECK((report.need.gpu.weights > 0) == !deterministic);
  }
}

TEST_CASE("A device without memory fails the load, with the reason in the status") {
  const Files files(PlainModel());
  Bench bench;
  bench.puppet.RefuseMemory(true);
  REQUIRE(bench.engine->Plan("m", files.dir.path()).ok());
  CHECK(absl::IsResourceExhausted(bench.engine->Load("m", {})));
  CHECK(bench.engine->Status()[0].state == LayerState::kFailed);
  CHECK_THAT(bench.engine->Status()[0].error, Contains("no memory for weights"));
}

TEST_CASE("When the device fails its layers fail with the reason, at once after a call or when it is asked; others go on") {
  const Files files(SharedModel());
  for (const bool by_call : {true, false}) {
    Bench bench("auto,layers:1=require:cpu_generic");
    bench.Load(files);
    const Input input(3);
    CHECK(bench.engine->DeviceHealth().ok());
    CHECK(Ask(bench.engine.get(), input, input.Call(files.layer, 0)).status.ok());
    bench.puppet.Fail("fell off the bus");
    CHECK(bench.engine->Status()[0].state == LayerState::kReady);  // nobody knows yet
    const absl::Status first =
        by_call ? Ask(bench.engine.get(), input, input.Call(files.layer, 0)).status : bench.engine->DeviceHealth();
    CHECK(absl::IsUnavailable(first));
    CHECK(std::string(first.message()) == "puppet failed: fell off the bus");
    const int calls = bench.puppet.counts().device_calls;
    CHECK(Ask(bench.engine.get(), input, input.Call(files.layer, 0)).status == first);
    CHECK(bench.engine->SelfCheck("m", files.layer, 2, 1).status() == first);
    CHECK(bench.engine->DeviceHealth() == first);
    CHECK(bench.puppet.counts().device_calls == calls);
    CHECK(Ask(bench.engine.get(), input, input.Call(1, 0)).status.ok());
    const ModelStatus status = bench.engine->Status()[0];
    CHECK(status.state == LayerState::kFailed);
    CHECK_THAT(status.error, Contains("fell off the bus"));
    CHECK(status.layers[0].state == LayerState::kReady);
    CHECK(status.layers[1].state == LayerState::kFailed);
    CHECK_THAT(status.layers[1].note, Contains("puppet failed: fell off the bus"));
    CHECK(bench.engine->FindModel("m")->state == LayerState::kFailed);
  }
}

TEST_CASE("Memory for calls of layers on the accelerator is pinned and reused, for others not, and may outlive the engine") {
  const Files files(SharedModel());
  auto bench = std::make_unique<Bench>("auto,layers:1=require:cpu_generic");
  bench->Load(files);
  Engine& engine = *bench->engine;
  void* first = nullptr;
  {
    const auto memory = engine.AllocateForCall("m", files.layer, 100000);
    REQUIRE(memory.ok());
    first = memory->data();
    std::memset(first, 1, 100000);
    CHECK(engine.AllocateForCall("m", files.layer, 100000)->data() != first);
  }
  CHECK(bench->puppet.counts().pinned == 2);
  for (size_t bytes : {100000, 90000}) CHECK(engine.AllocateForCall("m", files.layer, bytes).ok());
  CHECK(bench->puppet.counts().pinned == 2);
  CHECK(engine.AllocateForCall("m", files.layer, 10)->data() != nullptr);
  CHECK(engine.AllocateForCall("m", files.layer, 0)->data() != nullptr);
  CHECK(engine.AllocateForCall("m", 1, 100000)->data() != nullptr);
  CHECK(engine.AllocateForCall("no such", 1, 64)->data() != nullptr);
  const int pinned = bench->puppet.counts().pinned;
  bench->puppet.RefuseMemory(true);
  const auto from_heap = engine.AllocateForCall("m", files.layer, 40 << 20);
  REQUIRE(from_heap.ok());
  CHECK(bench->puppet.counts().pinned == pinned);
  {
    auto last = engine.AllocateForCall("m", files.layer, 100000);
    REQUIRE(last.ok());
    bench->engine.reset();
    std::memset(last->data(), 2, 100000);
    CHECK(bench->puppet.counts().pinned_alive == pinned);  // the cache lives as long as this one
  }
  CHECK(bench->puppet.counts().pinned_alive == 0);
}

TEST_CASE("Device memory of others is opened once, kept for 64 allocations, and only taken by layers wholly on the accelerator") {
  const Files files(SharedModel());
  Bench bench("auto,layers:1=require:cpu_generic");
  bench.Load(files);
  Engine& engine = *bench.engine;
  const Input input(5);
  std::vector<float> x = input.x, y(x.size());
  const SharedHandle of_x = bench.puppet.Share(reinterpret_cast<std::byte*>(x.data()), x.size() * sizeof(float));
  const SharedHandle of_y = bench.puppet.Share(reinterpret_cast<std::byte*>(y.data()), y.size() * sizeof(float));
  for (int round = 0; round < 2; ++round) {
    const auto in = engine.OpenShared("m", files.layer, of_x), out = engine.OpenShared("m", files.layer, of_y);
    REQUIRE((in.ok() && out.ok()));
    ForwardCall call = input.Call(files.layer, 0);
    call.hidden.data = (*in)->data();
    call.hidden.place = Place::kDevice;
    ForwardInfo info;
    const MutableTensorView there = {(*out)->data(), DType::kF32, 5, kHidden, Place::kDevice};
    REQUIRE(engine.Forward("m", call, there, &info).ok());
    CHECK(y == Ask(&engine, input, input.Call(files.layer, 0)).y);
    call.layer = 1;  // on the host
    const absl::Status refused = engine.Forward("m", call, there, &info);
    CHECK(absl::IsInvalidArgument(refused));
    CHECK_THAT(std::string(refused.message()), Contains("device memory") && Contains("cpu_generic"));
  }
  CHECK(bench.puppet.counts().opened == 2);
  CHECK(absl::IsInvalidArgument(engine.OpenShared("m", 1, of_x).status()));
  CHECK(absl::IsInvalidArgument(engine.OpenShared("m", files.layer, SharedHandle{}).status()));
  CHECK(absl::IsNotFound(engine.OpenShared("m", 9, of_x).status()));

  const auto held = engine.OpenShared("m", files.layer, of_y);
  std::vector<std::byte> other(64);
  for (int i = 0; i < 64; ++i) CHECK(engine.OpenShared("m", files.layer, bench.puppet.Share(other.data(), other.size())).ok());
  CHECK(bench.puppet.counts().opened == 66);
  CHECK(bench.puppet.counts().open_alive == 64);  // others made way, not the one that is held
  CHECK(engine.OpenShared("m", files.layer, of_y).ok());
  CHECK(bench.puppet.counts().opened == 66);
  CHECK((*held)->bytes() == y.size() * sizeof(float));
  bench.puppet.Fail("fell off the bus");
  CHECK(absl::IsUnavailable(engine.DeviceHealth()));
  CHECK(absl::IsUnavailable(engine.OpenShared("m", files.layer, of_x).status()));
}

TEST_CASE("Device memory that its owner freed and allocated again is opened: what is kept of it makes way, unless a call uses it") {
  const Files files(SharedModel());
  Bench bench;
  bench.Load(files);
  std::vector<std::byte> one(64), other(64);
  const SharedHandle beside = bench.puppet.Share(other.data(), other.size()), first = bench.puppet.Share(one.data(), one.size());
  const SharedHandle second = bench.puppet.ShareAgain(first);
  const auto open = [&](const SharedHandle& handle) { return bench.engine->OpenShared("m", files.layer, handle); };
  const auto held = open(beside);
  {
    const auto used = open(first);
    REQUIRE((held.ok() && used.ok()));
    const absl::Status refused = open(second).status();
    CHECK(absl::IsInvalidArgument(refused));
    CHECK_THAT(std::string(refused.message()), Contains("what was there before is open"));
    CHECK(open(first).ok());
  }
  CHECK(open(second).ok());
  CHECK(open(beside).ok());
  CHECK(bench.puppet.counts().opened == 3);  // what a call used was not closed
  CHECK(bench.puppet.counts().open_alive == 2);
}

TEST_CASE("The cache of pinned memory stays within its limit: free buffers go first, then the heap gives") {
  PuppetAccelerator puppet;
  auto cache = std::make_shared<PinnedCache>(puppet);
  constexpr size_t kThird = PinnedCache::kMaxBytes / 3;
  { const auto freed = cache->Allocate(kThird), other = cache->Allocate(2 << 20); }
  CHECK(cache->free_buffers() == 2);
  std::vector<CallMemory> held;
  for (int i = 0; i < 4; ++i) held.push_back(*cache->Allocate(kThird - (size_t{3} << 20)));
  CHECK(puppet.counts().pinned_alive == 3);  // two of them new, the small one went; the fourth is from the heap
  CHECK(puppet.counts().pinned == 4);
  for (const CallMemory& memory : held) CHECK(memory.data() != nullptr);
  held.clear();
  CHECK(cache->free_buffers() == 3);
  std::vector<CallMemory> small;
  for (size_t i = 0; i < PinnedCache::kMaxFree + 8; ++i) small.push_back(*cache->Allocate(64));
  small.clear();
  CHECK(cache->free_buffers() == PinnedCache::kMaxFree);
  CHECK(puppet.counts().pinned_alive == static_cast<int>(PinnedCache::kMaxFree));
}

}  // namespace moed
