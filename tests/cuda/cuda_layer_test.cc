// Whole layers on the GPU: routing of all kinds and rules, shared experts, ranges of experts, captured launches, and refused calls.
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>

#include "kernels/cuda/cuda_lane.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/whole_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::FamilySpecs;
using testing::Gpu;
using testing::GpuLane;
using testing::HaveGpu;
using testing::LayerInput;
using testing::LayerRun;
using testing::LayerSpec;
using testing::RunWhole;
using testing::Skip;
using testing::WholeLayer;

constexpr RoutingKind kKinds[] = {RoutingKind::kIds, RoutingKind::kLogits, RoutingKind::kGate};
constexpr DType kDtypes[] = {DType::kF32, DType::kBf16, DType::kF16};

std::unique_ptr<Lane> NewLane() {
  auto lane = Gpu().NewLane();
  REQUIRE(lane.ok());
  return *std::move(lane);
}

void RunAndCheck(const WholeLayer& layer, int64_t rows, RoutingKind kind, DType x, DType out, uint64_t seed,
                 bool routed_only = false) {
  const LayerInput input = layer.Input(rows, x, seed);
  DeviceCall call = input.Call(kind);
  call.routed_only = routed_only;
  layer.Check(input, kind, RunWhole(layer.device(), call, out, GpuLane()), out, routed_only);
}

// Of gate and shared expert, so that every kernel of a layer runs.
LayerSpec FullSpec() {
  LayerSpec spec;
  spec.rule.normalize = RouterRule::Normalize::kSum;
  spec.shared = spec.shared_gate = true;
  return spec;
}

}  // namespace

TEST_CASE("cuda_layer: ids, logits and the own gate by every family's rule give the judge's sum at any number of rows") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2000;
  for (const LayerSpec& spec : FamilySpecs()) {
    const WholeLayer layer(spec, ++seed);
    size_t turn = 0;
    for (int64_t rows : {0, 1, 3, 8, 33, 128, 129, 300, 513, 1000}) {
      for (RoutingKind kind : kKinds) {
        RunAndCheck(layer, rows, kind, kDtypes[turn % 3], kDtypes[turn / 3 % 3], ++seed);
        ++turn;
      }
      RunAndCheck(layer, rows, RoutingKind::kGate, DType::kF32, DType::kF32, ++seed);
    }
  }
}

TEST_CASE("cuda_layer: few rows of every kind of routing and dtype, with a shared expert and its gate", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2100);
  uint64_t seed = 2101;
  for (RoutingKind kind : kKinds) {
    for (DType x : kDtypes) {
      for (DType out : kDtypes) RunAndCheck(layer, 5, kind, x, out, ++seed);
    }
  }
}

TEST_CASE("cuda_layer: the shared expert is added with its gate, without one, or left out", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 2200;
  for (bool gated : {false, true}) {
    LayerSpec spec = FullSpec();
    spec.shared_gate = gated;
    spec.gate_bias = true;
    const WholeLayer layer(spec, ++seed);
    for (int64_t rows : {1, 3, 33}) {
      for (RoutingKind kind : kKinds) {
        for (bool routed_only : {false, true}) RunAndCheck(layer, rows, kind, DType::kF32, DType::kF32, ++seed, routed_only);
      }
    }
    // One lane's graphs and arguments serve both: neither leaves anything behind for the other.
    const LayerInput input = layer.Input(7, DType::kF32, ++seed);
    DeviceCall call = input.Call(RoutingKind::kGate);
    const LayerRun with = RunWhole(layer.device(), call, DType::kF32, GpuLane());
    call.routed_only = true;
    const LayerRun without = RunWhole(layer.device(), call, DType::kF32, GpuLane());
    CHECK(with.bytes != without.bytes);
    call.routed_only = false;
    CHECK(RunWhole(layer.device(), call, DType::kF32, GpuLane()).bytes == with.bytes);
  }
}

TEST_CASE("cuda_layer: two halves of the experts sum to the whole") {
  if (!HaveGpu()) return Skip("no GPU");
  LayerSpec spec = FullSpec();
  const WholeLayer whole(spec, 2300);
  spec.held = 8;
  const WholeLayer low(spec, 2300);
  spec.first = 8;
  const WholeLayer high(spec, 2300);
  uint64_t seed = 2301;
  for (int64_t rows : {1, 3, 33, 129, 600}) {
    for (RoutingKind kind : kKinds) {
      const LayerInput input = whole.Input(rows, DType::kF32, ++seed);
      DeviceCall call = input.Call(kind);
      const LayerRun all = RunWhole(whole.device(), call, DType::kF32, GpuLane());
      const LayerRun first = RunWhole(low.device(), call, DType::kF32, GpuLane());
      call.routed_only = true;  // the shared expert is one half's task
      const LayerRun second = RunWhole(high.device(), call, DType::kF32, GpuLane());
      low.Check(input, kind, first, DType::kF32);
      high.Check(input, kind, second, DType::kF32, true);
      CHECK(first.ids == all.ids);
      CHECK(second.ids == all.ids);
      std::vector<float> sum = first.out;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += second.out[i];
      CHECK(testing::Judge(sum, all.out, spec.hidden, 2e-6).passed);
    }
  }
}

TEST_CASE("cuda_layer: calls by ids may have other numbers of slots than the model", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2400);
  uint64_t seed = 2401;
  for (int top_k : {1, 3, 7, 16}) {
    for (int64_t rows : {1, 5, 40}) {
      LayerInput input = layer.Input(rows, DType::kF32, ++seed, top_k);
      if (rows == 5) input.batch.ids[1] = -1;
      if (rows == 5) input.batch.ids[0] = -1;
      const LayerRun run = RunWhole(layer.device(), input.Call(RoutingKind::kIds), DType::kF32, GpuLane());
      layer.Check(input, RoutingKind::kIds, run, DType::kF32);
    }
  }
}

TEST_CASE("cuda_layer: a row that cannot be routed is named, host memory is left alone, and the next call is right", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2500);
  for (int64_t rows : {6, 600}) {
    LayerInput input = layer.Input(rows, DType::kF32, 2501);
    const LayerRun right = RunWhole(layer.device(), input.Call(RoutingKind::kLogits), DType::kF32, GpuLane());
    const float before = input.logits[5 * 16 + 3];
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      input.logits[5 * 16 + 3] = bad;
      const LayerRun run = RunWhole(layer.device(), input.Call(RoutingKind::kLogits), DType::kF32, GpuLane());
      INFO(run.status);
      CHECK(absl::IsInvalidArgument(run.status));
      CHECK(run.status.message().find("row 5 ") != std::string_view::npos);
      CHECK(std::all_of(run.bytes.begin(), run.bytes.end(), [](uint8_t byte) { return byte == 0xFF; }));
      CHECK(run.ids.empty());
      input.logits[5 * 16 + 3] = before;
      CHECK(RunWhole(layer.device(), input.Call(RoutingKind::kLogits), DType::kF32, GpuLane()).bytes == right.bytes);
    }
    const LayerRun by_ids = RunWhole(layer.device(), input.Call(RoutingKind::kIds), DType::kF32, GpuLane());
    for (int32_t bad : {16, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
      LayerInput wrong = input;
      wrong.batch.ids[2 * 4 + 1] = bad;
      wrong.batch.ids[4 * 4] = bad;
      const LayerRun run = RunWhole(layer.device(), wrong.Call(RoutingKind::kIds), DType::kF32, GpuLane());
      INFO(run.status);
      CHECK(absl::IsInvalidArgument(run.status));
      CHECK(run.status.message().find("row 2 ") != std::string_view::npos);
      CHECK(RunWhole(layer.device(), input.Call(RoutingKind::kIds), DType::kF32, GpuLane()).bytes == by_ids.bytes);
    }
  }
  CHECK(Gpu().Health().ok());
}

TEST_CASE("cuda_layer: NaN in a row makes that row NaN under the own gate and leaves every other row's bits alone", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2600);
  LayerInput input = layer.Input(9, DType::kF32, 2601);
  const LayerRun clean = RunWhole(layer.device(), input.Call(RoutingKind::kGate), DType::kF32, GpuLane());
  reinterpret_cast<float*>(input.batch.x.data())[4 * 96 + 7] = std::numeric_limits<float>::quiet_NaN();
  const LayerRun dirty = RunWhole(layer.device(), input.Call(RoutingKind::kGate), DType::kF32, GpuLane());
  REQUIRE((clean.status.ok() && dirty.status.ok()));
  for (size_t i = 0; i < clean.out.size(); ++i) {
    if (i / 96 == 4) {
      CHECK(dirty.out[i] != dirty.out[i]);
    } else {
      CHECK(dirty.out[i] == clean.out[i]);
    }
  }
}

TEST_CASE("cuda_layer: captured launches give the bits of plain ones, on any lane and after the workspace has moved") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2700), other(FamilySpecs()[9], 2701);
  const std::unique_ptr<Lane> lane = NewLane(), plain = NewLane();
  struct Case {
    const WholeLayer* layer;
    RoutingKind kind;
    DType dtype;
    LayerInput input;
    std::vector<uint8_t> bytes;
  };
  std::vector<Case> cases;
  uint64_t seed = 2702;
  for (const WholeLayer* of : {&layer, &other}) {
    for (RoutingKind kind : kKinds) {
      for (DType dtype : kDtypes) {
        for (int64_t rows : {1, 2, 3, 5, 8, 9, 33, 100, 128, 129, 300, 512, 513}) {
          cases.push_back({of, kind, dtype, of->Input(rows, dtype, ++seed), {}});
          Case& c = cases.back();
          const LayerRun run = RunWhole(of->device(), c.input.Call(kind), dtype, *lane);
          REQUIRE(run.status.ok());
          c.bytes = run.bytes;
        }
      }
    }
  }
  const auto all_equal = [&](Lane& on) {
    for (const Case& c : cases) {
      const LayerRun run = RunWhole(c.layer->device(), c.input.Call(c.kind), c.dtype, on);
      INFO("M=" << c.input.batch.rows << ", routing " << static_cast<int>(c.kind) << ", " << DTypeName(c.dtype));
      CHECK(run.status.ok());
      CHECK(run.bytes == c.bytes);
    }
  };
  REQUIRE(layer.device().WarmUp(*lane).ok());
  all_equal(*lane);
  REQUIRE(other.device().WarmUp(*lane).ok());
  REQUIRE(layer.device().WarmUp(*lane).ok());  // again: nothing is left to capture
  all_equal(*lane);
  testing::PoisonLane(*lane, size_t{256} << 20);
  all_equal(*lane);
  all_equal(*plain);
}

TEST_CASE("cuda_layer: a lane that is warm from its first call on is right, whatever came before", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 2800);
  const std::unique_ptr<Lane> lane = NewLane();
  REQUIRE(layer.device().WarmUp(*lane).ok());
  uint64_t seed = 2801;
  for (int64_t rows : {33, 1, 600, 2, 64, 0, 1}) {
    for (RoutingKind kind : kKinds) {
      const LayerInput input = layer.Input(rows, DType::kBf16, ++seed);
      layer.Check(input, kind, RunWhole(layer.device(), input.Call(kind), DType::kBf16, *lane), DType::kBf16);
    }
  }
}

TEST_CASE("cuda_layer: the largest number of experts is routed and sorted") {
  if (!HaveGpu()) return Skip("no GPU");
  LayerSpec spec;
  spec.experts = 65535;
  spec.hidden = spec.intermediate = 16;
  spec.scheme = testing::Weights(ElementType::kBf16, ScaleType::kNone, {});
  spec.top_k = 8;
  const WholeLayer layer(spec, 2900);
  uint64_t seed = 2901;
  for (RoutingKind kind : kKinds) {
    for (int64_t rows : {1, 3, 40}) RunAndCheck(layer, rows, kind, DType::kF32, DType::kF32, ++seed);
  }
}

TEST_CASE("cuda_layer: parts that do not fit each other, and calls that do not fit the layer, are refused", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(), 3000);
  const auto refused = [&](auto change) {
    DeviceLayerParts parts = layer.parts();
    change(parts);
    const absl::Status status = Gpu().Assemble(parts).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
  };
  refused([](DeviceLayerParts& parts) { parts.routed = nullptr; });
  refused([](DeviceLayerParts& parts) { parts.hidden = 64; });
  refused([](DeviceLayerParts& parts) { parts.first_expert = 1; });
  refused([](DeviceLayerParts& parts) { parts.first_expert = -1; });
  refused([](DeviceLayerParts& parts) { parts.num_experts = 15; });
  refused([](DeviceLayerParts& parts) { parts.top_k = 0; });
  refused([](DeviceLayerParts& parts) { parts.top_k = 17; });
  refused([](DeviceLayerParts& parts) { parts.gate = parts.gate.subspan(1); });
  refused([](DeviceLayerParts& parts) { parts.gate_bias = parts.gate.first(15); });
  refused([](DeviceLayerParts& parts) { parts.correction_bias = parts.gate.first(17); });
  refused([](DeviceLayerParts& parts) { parts.shared_gate = parts.gate.first(95); });
  refused([](DeviceLayerParts& parts) { parts.shared = parts.routed; });

  DeviceLayerParts bare = layer.parts();
  bare.gate = {};
  bare.rule.correction_bias = true;
  const auto without = Gpu().Assemble(bare);
  REQUIRE(without.ok());
  const LayerInput input = layer.Input(3, DType::kF32, 3001);
  const auto status = [&](const DeviceLayer& device, const DeviceCall& call) {
    return RunWhole(device, call, DType::kF32, GpuLane()).status;
  };
  CHECK(absl::IsFailedPrecondition(status(**without, input.Call(RoutingKind::kGate))));
  CHECK(absl::IsFailedPrecondition(status(**without, input.Call(RoutingKind::kLogits))));
  CHECK(status(**without, input.Call(RoutingKind::kIds)).ok());
  DeviceCall call = input.Call(RoutingKind::kIds);
  call.top_k = 3;
  CHECK(absl::IsInvalidArgument(status(layer.device(), call)));
  call.top_k = 0;
  CHECK(absl::IsInvalidArgument(status(layer.device(), call)));
  call = input.Call(RoutingKind::kLogits);
  call.logits = call.logits.first(47);
  CHECK(absl::IsInvalidArgument(status(layer.device(), call)));
  call = input.Call(RoutingKind::kIds);
  call.top_k = std::numeric_limits<int>::max();
  const absl::Status slots = status(layer.device(), call);
  CHECK(absl::IsInvalidArgument(slots));
  CHECK(slots.message().find(" slots") != std::string_view::npos);
  const testing::DeviceBytes x(input.batch.x, 2), out(input.batch.x);
  call = input.Call(RoutingKind::kGate);
  call.x.data = x.data();
  call.x.place = Place::kDevice;
  const absl::Status odd = layer.device().Forward(call, {out.data(), DType::kF32, 3, 96, Place::kDevice}, GpuLane(), nullptr);
  CHECK(absl::IsInvalidArgument(odd));
  CHECK(odd.message().find("aligned") != std::string_view::npos);
  CHECK(Gpu().Health().ok());
  const LayerInput many = layer.Input(1025, DType::kF32, 3002);
  CHECK(absl::IsInvalidArgument(status(layer.device(), many.Call(RoutingKind::kGate))));
}

}  // namespace moed
