// Several calls of one layer in one run: every part ends as it would alone, on the host and on an accelerator played by a puppet.
#include <catch2/catch.hpp>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/engine/accelerator_bench.h"
#include "tests/support/coming_rows.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary
using Catch::Matchers::Contains;

// Calls whose outputs lie side by side.
struct Parts {
  void Add(const ForwardCall& call, DType output = DType::kF32) {
    outputs.emplace_back(static_cast<size_t>(call.hidden.rows * kHidden) * DTypeBytes(output), std::byte{0x5a});
    ForwardPart part;
    part.call = call;
    part.out = {outputs.back().data(), output, call.hidden.rows, kHidden};
    part.info.want_routing = true;
    parts.push_back(part);
  }
  void Run(Engine* engine) { engine->Forward("m", parts); }

  // Each part as if it ran alone, to the bit; routing as well.
  void CheckAsAlone(Engine* engine) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      INFO("part " << i << ": " << parts[i].status.ToString());
      REQUIRE(parts[i].status.ok());
      std::vector<std::byte> alone(outputs[i].size());
      ForwardInfo info;
      info.want_routing = true;
      MutableTensorView out = parts[i].out;
      out.data = alone.data();
      REQUIRE(engine->Forward("m", parts[i].call, out, &info).ok());
      CHECK(outputs[i] == alone);
      CHECK(parts[i].info.top_k == info.top_k);
      CHECK(parts[i].info.ids == info.ids);
      CHECK(parts[i].info.weights == info.weights);
      CHECK(parts[i].info.backend == info.backend);
      CHECK(parts[i].info.scheme == info.scheme);
      CHECK(parts[i].info.generation == info.generation);
    }
  }

  std::vector<std::vector<std::byte>> outputs;
  std::vector<ForwardPart> parts;
};

// The machine's own backends: as if there were no GPU, each row by one way.
void HostOnly(EngineOptions& options) {
  options.device.has_gpu = false;
  options.deterministic = true;
}

struct Where {
  const char* name;
  const char* policy;
  std::function<void(EngineOptions&)> change;
};
std::vector<Where> Places() {
  return {{"accelerator", "auto", {}},
          {"parted", "auto,scheme:bf16=require:cpu_generic", {}},
          {"cpu_generic", "require:cpu_generic", {}},
          {"host", "auto", HostOnly},
          {"accelerator in chunks", "auto", [](EngineOptions& options) { options.max_tokens = 4; }},
          {"host in chunks", "auto", [](EngineOptions& options) { HostOnly(options), options.max_tokens = 4; }}};
}

std::vector<Input> SomeInputs() {
  std::vector<Input> inputs;
  for (const int64_t rows : {3, 0, 1, 7}) inputs.emplace_back(rows);
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (float& x : inputs[i].x) x *= 1.0f + 0.25f * static_cast<float>(i);  // else all begin alike
  }
  return inputs;
}

}  // namespace

TEST_CASE("Calls that run together get what each gets alone, to the bit") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  for (const Where& place : Places()) {
    Bench bench(place.policy, place.change);
    bench.Load(files);
    for (const int way : {0, 1, 2}) {
      for (const bool routed_only : {false, true}) {
        INFO(place.name << ", way " << way << (routed_only ? ", routed only" : ""));
        Parts parts;
        for (const Input& input : inputs) parts.Add(input.Call(files.layer, way, routed_only));
        parts.Run(bench.engine.get());
        for (const ForwardPart& part : parts.parts) CHECK(part.info.batch_rows == 11);
        parts.CheckAsAlone(bench.engine.get());
      }
    }
  }
}

TEST_CASE("On an accelerator calls that run together are one call of the device") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  Bench bench;
  bench.Load(files);
  Parts parts;
  for (const Input& input : inputs) parts.Add(input.Call(files.layer, 1));
  const int before = bench.puppet.counts().device_calls;
  parts.Run(bench.engine.get());
  CHECK(bench.puppet.counts().device_calls == before + 1);
}

TEST_CASE("Outputs of several types in one run are rounded once, from the same sums") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  for (const Where& place : Places()) {
    INFO(place.name);
    Bench bench(place.policy, place.change);
    bench.Load(files);
    Parts mixed, bf16;
    const DType types[] = {DType::kBf16, DType::kF32, DType::kF16, DType::kBf16};
    for (size_t i = 0; i < inputs.size(); ++i) {
      mixed.Add(inputs[i].Call(files.layer, 0), types[i]);
      bf16.Add(inputs[i].Call(files.layer, 0), DType::kBf16);
    }
    mixed.Run(bench.engine.get());
    mixed.CheckAsAlone(bench.engine.get());
    bf16.Run(bench.engine.get());
    bf16.CheckAsAlone(bench.engine.get());
  }
}

TEST_CASE("Logits that cannot be routed fail their own call only, with its own row") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  for (const Where& place : Places()) {
    INFO(place.name);
    Bench bench(place.policy, place.change);
    bench.Load(files);
    Input bad(5);
    bad.logits[3 * kExperts + 1] = std::numeric_limits<float>::quiet_NaN();
    Parts parts, good;
    parts.Add(inputs[0].Call(files.layer, 1));
    parts.Add(bad.Call(files.layer, 1));
    parts.Add(inputs[3].Call(files.layer, 1));
    parts.Run(bench.engine.get());
    CHECK(absl::IsInvalidArgument(parts.parts[1].status));
    const Answer alone = Ask(bench.engine.get(), bad, bad.Call(files.layer, 1));
    CHECK(parts.parts[1].status.message() == alone.status.message());
    parts.parts.erase(parts.parts.begin() + 1);
    parts.outputs.erase(parts.outputs.begin() + 1);
    parts.CheckAsAlone(bench.engine.get());
    // Nothing but such calls.
    Parts none;
    none.Add(bad.Call(files.layer, 1));
    none.Add(bad.Call(files.layer, 1));
    none.Run(bench.engine.get());
    for (const ForwardPart& part : none.parts) CHECK(absl::IsInvalidArgument(part.status));
  }
}

TEST_CASE("A call that is wrong, or of another kind or layer, does not disturb the others") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  Bench bench;
  bench.Load(files);
  Parts parts;
  parts.Add(inputs[0].Call(files.layer, 0));
  ForwardCall wrong = inputs[3].Call(files.layer, 2);
  std::get<RoutingByIds>(wrong.routing).top_k = 2;  // three were given
  parts.Add(wrong);
  parts.Add(inputs[3].Call(files.layer, 2));  // routed in another way
  parts.Add(inputs[3].Call(files.layer, 0));
  parts.Add(inputs[3].Call(files.layer - 1, 0));
  parts.Run(bench.engine.get());
  CHECK(absl::IsInvalidArgument(parts.parts[1].status));
  CHECK(absl::IsInternal(parts.parts[4].status));
  CHECK(parts.parts[0].info.batch_rows == 10);
  CHECK(parts.parts[2].info.batch_rows == 7);
  for (const size_t at : {4, 1}) {
    parts.parts.erase(parts.parts.begin() + static_cast<ptrdiff_t>(at));
    parts.outputs.erase(parts.outputs.begin() + static_cast<ptrdiff_t>(at));
  }
  parts.CheckAsAlone(bench.engine.get());
}

TEST_CASE("A layer that does not exist, or a device that failed, fails every call") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  Bench bench;
  bench.Load(files);
  Parts lost;
  for (const Input& input : inputs) lost.Add(input.Call(77, 0));
  lost.Run(bench.engine.get());
  for (const ForwardPart& part : lost.parts) CHECK(absl::IsNotFound(part.status));
  bench.puppet.Fail("cable pulled");
  Parts parts;
  for (const Input& input : inputs) parts.Add(input.Call(files.layer, 0));
  parts.Run(bench.engine.get());
  for (const ForwardPart& part : parts.parts) {
    CHECK(absl::IsUnavailable(part.status));
    CHECK_THAT(std::string(part.status.message()), Contains("cable pulled"));
  }
}

TEST_CASE("Rows that still come are waited for, those of every call") {
  const Files files(SharedModel());
  const std::vector<Input> inputs = SomeInputs();
  Bench bench;
  bench.Load(files);
  std::vector<std::vector<float>> places;
  std::vector<std::unique_ptr<ComingRows>> coming;
  Parts parts;
  for (const Input& input : inputs) {
    places.emplace_back(input.x.size(), -7.0f);
    coming.push_back(std::make_unique<ComingRows>(input.x.data(), places.back().data(), input.x.size() * sizeof(float), 100));
    ForwardCall call = input.Call(files.layer, 2);
    call.hidden.data = places.back().data();
    call.incoming = coming.back().get();
    parts.Add(call);
    coming.back()->Start();
  }
  parts.Run(bench.engine.get());
  parts.CheckAsAlone(bench.engine.get());
}

TEST_CASE("Pieces of a call are its rows, whatever its routing") {
  const Files files(SharedModel());
  const Input input(11);
  Bench bench("auto", HostOnly);
  bench.Load(files);
  CHECK(bench.engine->RowsStandAlone("m", files.layer));
  CHECK_FALSE(bench.engine->RowsStandAlone("m", 77));
  CHECK_FALSE(bench.engine->RowsStandAlone("n", files.layer));
  for (const int way : {0, 1, 2}) {
    const ForwardCall call = input.Call(files.layer, way);
    const Answer whole = Ask(bench.engine.get(), input, call);
    REQUIRE(whole.status.ok());
    Answer pieces;
    pieces.y.assign(whole.y.size(), -1.0f);
    pieces.info.want_routing = true;
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 4}, {4, 4}, {8, 3}, {11, 0}}) {
      const MutableTensorView out = {pieces.y.data() + first * kHidden, DType::kF32, rows, kHidden};
      pieces.status = bench.engine->Forward("m", RowsOf(call, first, rows), out, &pieces.info);
      REQUIRE(pieces.status.ok());
    }
    CheckSame(pieces, whole);
  }
}

TEST_CASE("Where activation scales span the rows of a call, calls run one after the other") {
  ModelSpec spec = PlainModel();
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  nlohmann::json quantization = nlohmann::json::parse(PackedConfigText(spec.experts, {}));
  quantization["config_groups"].begin().value()["input_activations"] = {
      {"num_bits", 8}, {"type", "int"}, {"symmetric", true}, {"strategy", "tensor"}, {"dynamic", true}};
  spec.quantization = quantization.dump();
  const Files files(spec);
  Bench bench("auto", HostOnly);
  bench.Load(files);
  CHECK_FALSE(bench.engine->RowsStandAlone("m", files.layer));
  const std::vector<Input> inputs = SomeInputs();
  Parts parts;
  for (const Input& input : inputs) parts.Add(input.Call(files.layer, 2));
  parts.Run(bench.engine.get());
  for (size_t i = 0; i < inputs.size(); ++i) CHECK(parts.parts[i].info.batch_rows == inputs[i].rows);
  parts.CheckAsAlone(bench.engine.get());
}

TEST_CASE("Calls may share a run when they are alike in all that decides it") {
  const Input input(2);
  const ForwardCall call = input.Call(1, 2);
  CHECK(MayShareRun(call, call));
  ForwardCall other = call;
  other.layer = 2;
  CHECK_FALSE(MayShareRun(call, other));
  other = call;
  other.routed_only = true;
  CHECK_FALSE(MayShareRun(call, other));
  other = call;
  other.hidden.dtype = DType::kBf16;
  CHECK_FALSE(MayShareRun(call, other));
  other = call;
  other.hidden.place = Place::kDevice;
  CHECK_FALSE(MayShareRun(call, other));
  other = call;
  other.routing = RoutingByGate{};
  CHECK_FALSE(MayShareRun(call, other));
  other = call;
  std::get<RoutingByIds>(other.routing).top_k = 2;
  CHECK_FALSE(MayShareRun(call, other));
}

}  // namespace moed
