// Several lanes at once, tensors in every place, and ops that callers enqueue themselves: all bitwise what one lane gives alone.
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/cuda/cuda_backends.h"
#include "kernels/cuda/device_op.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/cuda/router_device.h"
#include "tests/cuda/whole_layers.h"
#include "tests/support/batched_rows.h"
#include "tests/support/coming_rows.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/schemes.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using testing::DeviceArray;
using testing::Gpu;
using testing::GpuLane;
using testing::HaveGpu;
using testing::LayerInput;
using testing::LayerRun;
using testing::LayerSpec;
using testing::RandomBatch;
using testing::RunWhole;
using testing::Skip;
using testing::WholeLayer;

constexpr RoutingKind kKinds[] = {RoutingKind::kIds, RoutingKind::kLogits, RoutingKind::kGate};

std::unique_ptr<Lane> NewLane() {
  auto lane = Gpu().NewLane();
  REQUIRE(lane.ok());
  return *std::move(lane);
}

LayerSpec FullSpec(int64_t intermediate) {
  LayerSpec spec;
  spec.intermediate = intermediate;
  spec.rule.normalize = RouterRule::Normalize::kSum;
  spec.shared = spec.shared_gate = true;
  return spec;
}

// A call and what it gives when nothing else runs.
struct KnownCall {
  const WholeLayer* layer;
  RoutingKind kind;
  LayerInput input;
  LayerRun alone;
};

std::vector<KnownCall> KnownCalls(const std::vector<const WholeLayer*>& layers) {
  std::vector<KnownCall> calls;
  uint64_t seed = 4000;
  for (int64_t rows : {1, 3, 17, 64, 200, 600}) {
    for (RoutingKind kind : kKinds) {
      for (const WholeLayer* layer : layers) {
        calls.push_back({layer, kind, layer->Input(rows, DType::kBf16, ++seed), {}});
        calls.back().alone = RunWhole(layer->device(), calls.back().input.Call(kind), DType::kBf16, GpuLane());
        REQUIRE(calls.back().alone.status.ok());
      }
    }
  }
  return calls;
}

// Runs `count` of the calls, starting with the `first`; how many were not as they are alone. For any thread: asserts nothing.
int Differing(const std::vector<KnownCall>& calls, size_t first, int count, Lane& lane) {
  int differing = 0;
  for (int i = 0; i < count; ++i) {
    const KnownCall& known = calls[(first + static_cast<size_t>(i) * 7) % calls.size()];
    DeviceCall call = known.input.Call(known.kind);
    std::vector<uint8_t> out(known.alone.bytes.size(), 0xFF);
    std::vector<int32_t> ids;
    std::vector<float> weights;
    call.used_ids = &ids, call.used_weights = &weights;
    const MutableTensorView view = {out.data(), DType::kBf16, call.x.rows, call.x.cols};
    const absl::Status status = known.layer->device().Forward(call, view, lane, &testing::Pool());
    differing += !status.ok() || out != known.alone.bytes || ids != known.alone.ids || weights != known.alone.weights;
  }
  return differing;
}

// A tensor's bytes in a place, and back.
class Placed {
 public:
  enum class Where { kPageable, kPinned, kDevice, kDeviceOdd };

  Placed(Where where, std::span<const uint8_t> bytes, size_t odd) : where_(where), host_(bytes.begin(), bytes.end()) {
    if (where == Where::kDevice || where == Where::kDeviceOdd) {
      device_ = std::make_unique<testing::DeviceBytes>(bytes, where == Where::kDeviceOdd ? odd : 0);
    } else if (where == Where::kPinned) {
      auto pinned = Gpu().AllocatePinned(bytes.size());
      REQUIRE(pinned.ok());
      pinned_ = *std::move(pinned);
      REQUIRE(pinned_->bytes().size() == bytes.size());
      std::memcpy(pinned_->bytes().data(), bytes.data(), bytes.size());
    }
  }
  void* data() {
    if (device_ != nullptr) return device_->data();
    return pinned_ != nullptr ? static_cast<void*>(pinned_->bytes().data()) : host_.data();
  }
  Place place() const { return device_ != nullptr ? Place::kDevice : Place::kHost; }
  std::vector<uint8_t> Read() {
    if (device_ != nullptr) return device_->Read();
    const auto* at = static_cast<const uint8_t*>(data());
    return {at, at + host_.size()};
  }

 private:
  const Where where_;
  std::vector<uint8_t> host_;
  std::unique_ptr<testing::DeviceBytes> device_;
  std::unique_ptr<PinnedBuffer> pinned_;
};

constexpr Placed::Where kWheres[] = {Placed::Where::kPageable, Placed::Where::kPinned, Placed::Where::kDevice,
                                     Placed::Where::kDeviceOdd};

}  // namespace

TEST_CASE("cuda lanes: two and four at once, on one layer and on several, give the bits of one alone") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer first(FullSpec(80), 4001), second(FullSpec(144), 4002);
  const std::vector<KnownCall> one = KnownCalls({&first}), both = KnownCalls({&first, &second});
  for (const std::vector<KnownCall>* calls : {&one, &both}) {
    for (size_t threads : {2, 4}) {
      for (bool warm : {false, true}) {
        std::vector<std::unique_ptr<Lane>> lanes;
        std::vector<std::thread> running;
        std::vector<int> differing(threads, -1);
        for (size_t t = 0; t < threads; ++t) lanes.push_back(NewLane());
        for (size_t t = 0; t < threads; ++t) {
          running.emplace_back([&, t] {
            // Captures of one lane go on beside calls, allocations and captures of the others.
            const bool ready = !warm || (first.device().WarmUp(*lanes[t]).ok() && second.device().WarmUp(*lanes[t]).ok());
            differing[t] = ready ? Differing(*calls, t * 5, 200, *lanes[t]) : -2;
          });
        }
        for (std::thread& thread : running) thread.join();
        for (size_t t = 0; t < threads; ++t) {
          INFO("thread " << t << " of " << threads);
          CHECK(differing[t] == 0);
        }
      }
    }
  }
}

TEST_CASE("cuda lanes: layers may be loaded, lanes made and dropped while others run") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(80), 4101);
  const std::vector<KnownCall> calls = KnownCalls({&layer});
  const std::unique_ptr<Lane> lane = NewLane();
  std::atomic<bool> stop = false;
  std::atomic<int> differing = 0, rounds = 0;
  std::thread running([&] {
    for (; !stop; ++rounds) differing += Differing(calls, static_cast<size_t>(rounds.load()), 20, *lane);
  });
  for (int round = 0; round < 5; ++round) {
    const WholeLayer other(FullSpec(144), 4102);
    const std::unique_ptr<Lane> its = NewLane();
    CHECK(other.device().WarmUp(*its).ok());
    const LayerInput input = other.Input(33, DType::kF32, 4103);
    const LayerRun run = RunWhole(other.device(), input.Call(RoutingKind::kGate), DType::kF32, *its);
    other.Check(input, RoutingKind::kGate, run, DType::kF32);
    CHECK(Gpu().Health().ok());
  }
  stop = true;
  running.join();
  CHECK(rounds > 0);
  CHECK(differing == 0);
}

TEST_CASE("cuda lanes: x and out may lie in pageable, pinned and device memory, aligned or not", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  // 64 inputs: a whole block, so that aligned bf16 rows are used in place.
  LayerSpec spec = FullSpec(80);
  spec.hidden = 64;
  const WholeLayer layer(spec, 4201);
  uint64_t seed = 4202;
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    for (RoutingKind kind : kKinds) {
      const LayerInput input = layer.Input(21, dtype, ++seed);
      const LayerRun want = RunWhole(layer.device(), input.Call(kind), dtype, GpuLane());
      layer.Check(input, kind, want, dtype);
      for (Placed::Where x_where : kWheres) {
        for (Placed::Where out_where : kWheres) {
          Placed x(x_where, input.batch.x, DTypeBytes(dtype));
          Placed out(out_where, std::vector<uint8_t>(want.bytes.size(), 0xFF), DTypeBytes(dtype));
          DeviceCall call = input.Call(kind);
          call.x.data = x.data();
          call.x.place = x.place();
          testing::PoisonLane(size_t{16} << 20);
          const absl::Status status = layer.device().Forward(call, {out.data(), dtype, 21, 64, out.place()}, GpuLane(), nullptr);
          INFO(static_cast<int>(x_where) << " to " << static_cast<int>(out_where) << ": " << status);
          CHECK(status.ok());
          CHECK(out.Read() == want.bytes);
          CHECK(x.Read() == input.batch.x);
        }
      }
    }
  }
}

TEST_CASE("cuda lanes: rows may come while the call runs, into pinned memory or not, and give the same bits", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  LayerSpec spec = FullSpec(80);
  spec.hidden = 2048;
  const WholeLayer layer(spec, 4009);
  const std::unique_ptr<Lane> lane = NewLane();
  for (int64_t rows : {1, 128, 300}) {  // the last two cross the bus in several pieces
    for (RoutingKind kind : kKinds) {
      const LayerInput input = layer.Input(rows, DType::kBf16, 4010 + static_cast<uint64_t>(rows));
      DeviceCall call = input.Call(kind);
      const LayerRun want = RunWhole(layer.device(), call, DType::kBf16, *lane);
      REQUIRE(want.status.ok());
      const void* const from = call.x.data;
      const std::vector<uint8_t> stale(call.x.bytes(), 0x7F);
      for (const Placed::Where where : {Placed::Where::kPinned, Placed::Where::kPageable}) {
        for (const size_t part : {size_t{1000}, size_t{100'000}, size_t{1} << 20}) {
          Placed x(where, stale, 0);
          testing::ComingRows coming(from, x.data(), call.x.bytes(), part);
          call.x.data = x.data();
          call.incoming = &coming;
          coming.Start();
          const LayerRun got = RunWhole(layer.device(), call, DType::kBf16, *lane);
          INFO(rows << " rows, routing " << static_cast<int>(kind) << ", parts of " << part << " bytes: " << got.status.ToString());
          REQUIRE(got.status.ok());
          CHECK(got.bytes == want.bytes);
          CHECK(got.ids == want.ids);
          CHECK(coming.waits() >= 1);
        }
      }
    }
  }
}

TEST_CASE("cuda lanes: ids and weights may be more than travel with a call's arguments", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  const WholeLayer layer(FullSpec(80), 4251);
  // 1024 rows of 7 slots are 56 KiB of ids and weights, of 16 slots 128 KiB; then a small call again, where the large one was.
  for (const auto& [rows, top_k] : {std::pair<int64_t, int>{1024, 7}, {1024, 16}, {3, 4}}) {
    const LayerInput input = layer.Input(rows, DType::kBf16, 4252, top_k);
    const LayerRun run = RunWhole(layer.device(), input.Call(RoutingKind::kIds), DType::kBf16, GpuLane());
    layer.Check(input, RoutingKind::kIds, run, DType::kBf16);
  }
}

TEST_CASE("cuda lanes: asking for the device's health leaves no error behind for the thread's next launch", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  cudaGetLastError();
  for (int i = 0; i < 200; ++i) {
    CHECK(Gpu().Health().ok());
    REQUIRE(cudaPeekAtLastError() == cudaSuccess);
  }
}

namespace {

// Enqueues `op`, all but its workspace, on a stream of its own and waits for it.
void RunOp(const cuda::CudaMoe& moe, const cuda::DeviceOp& op) {
  const DeviceArray<std::byte> workspace(cuda::DeviceOpBytes(moe, op));
  cuda::CallBlock block;
  cuda::LaunchPlan plan;
  cuda::PlanDeviceOp(moe, op, workspace.data(), &block, &plan);
  const DeviceArray<cuda::CallBlock> device_block(std::span<const cuda::CallBlock>(&block, 1));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cuda::Enqueue(plan, device_block.data(), stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaStreamDestroy(stream);
  workspace.Read(cuda::DeviceOpBytes(moe, op));  // nothing behind it was touched
}

WeightScheme Ordered() {
  WeightScheme ordered = testing::Weights(ElementType::kInt4, ScaleType::kF16, {1, 32});
  ordered.act_order = true;
  return ordered;
}

QuantScheme Quantized() {
  LinearScheme quantized;
  quantized.weights = testing::Weights(ElementType::kInt8, ScaleType::kF32, {1, 0});
  quantized.input = testing::Int8(ActivationMode::kDynamic, 1);
  return UniformScheme(quantized);
}

QuantScheme Uniform(const WeightScheme& weights) { return UniformScheme({weights, {}}); }

// Counted rows of an op of batched experts on the GPU, as RunBatchedLayer gives them.
std::vector<float> RunBatchedOp(const cuda::CudaMoe& moe, const testing::BatchedRows& rows, int64_t spare) {
  const int64_t all = static_cast<int64_t>(rows.counts.size()) * rows.max_m;
  const DeviceArray<uint8_t> x(rows.x);
  const DeviceArray<int32_t> counts(rows.counts);
  const std::vector<float> untouched(static_cast<size_t>(all * rows.hidden), -12345.0f);
  const DeviceArray<float> out(untouched);
  cuda::DeviceOp op;
  op.x = x.data(), op.x_dtype = rows.dtype, op.rows = all, op.top_k = 1;
  op.counts = counts.data(), op.max_m = rows.max_m, op.counted = rows.counted() + spare;
  op.out = out.data(), op.out_dtype = DType::kF32;
  RunOp(moe, op);
  const std::vector<float> got = out.Read(untouched.size());
  std::vector<float> counted;
  for (int64_t row = 0; row < all; ++row) {
    const float* const from = got.data() + row * rows.hidden;
    if (row % rows.max_m < rows.counts[static_cast<size_t>(row / rows.max_m)]) {
      counted.insert(counted.end(), from, from + rows.hidden);
    } else {
      CHECK(std::all_of(from, from + rows.hidden, [](float value) { return value == -12345.0f; }));
    }
  }
  return counted;
}

}  // namespace

TEST_CASE("cuda lanes: an op that its caller enqueues or captures gives the bits of Run", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 4300;
  for (const QuantScheme& scheme : {Quantized(), Uniform(testing::Weights(ElementType::kInt4, ScaleType::kF16, {1, 32})),
                                    Uniform(Ordered()), Uniform(testing::Weights(ElementType::kBf16, ScaleType::kNone, {}))}) {
    MoeDesc desc = testing::MakeDesc(5, 2, 128, 96, scheme);
    desc.max_tokens = 256;
    const testing::RandomExperts experts(desc, ++seed);
    const auto moe = cuda::CudaBackends().back()->Prepare(desc, experts, testing::Pool());
    REQUIRE(moe.ok());
    for (DType dtype : {DType::kBf16, DType::kF32, DType::kF16}) {
      for (int64_t rows : {1, 33, 200}) {
        RandomBatch batch(desc, rows, 2, dtype, ++seed);
        batch.ids[1] = -1;
        const auto want = testing::RunOnGpu(**moe, batch.view(), DType::kF32);
        REQUIRE(want.ok());
        const DeviceArray<uint8_t> x(batch.x);
        const DeviceArray<int32_t> ids(batch.ids);
        const DeviceArray<float> weights(batch.weights), out(want->size());
        cuda::DeviceOp op;
        op.x = x.data(), op.x_dtype = dtype, op.rows = rows, op.top_k = 2;
        op.ids = ids.data(), op.weights = weights.data(), op.out = out.data(), op.out_dtype = DType::kF32;
        INFO(rows << " rows of " << DTypeName(dtype));
        RunOp(static_cast<const cuda::CudaMoe&>(**moe), op);
        const std::vector<float> got = out.Read(want->size());
        CHECK(std::memcmp(got.data(), want->data(), got.size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("cuda lanes: an op of batched experts gives the bits of RunBatched, and leaves what lies beyond the counts", "[small]") {
  if (!HaveGpu()) return Skip("no GPU");
  uint64_t seed = 4600;
  for (const QuantScheme& scheme : {Quantized(), Uniform(testing::Weights(ElementType::kInt4, ScaleType::kF16, {1, 32})),
                                    Uniform(Ordered())}) {
    MoeDesc desc = testing::MakeDesc(5, 2, 128, 96, scheme);
    desc.max_tokens_per_expert = 40;
    const testing::RandomExperts experts(desc, ++seed);
    const auto moe = cuda::CudaBackends().back()->Prepare(desc, experts, testing::Pool());
    REQUIRE(moe.ok());
    const std::vector<int32_t> all_counts[] = {{0, 1, 0, 0, 0}, {3, 0, 40, 1, 17}, {40, 40, 40, 40, 40}};
    for (const std::vector<int32_t>& counts : all_counts) {
      for (DType dtype : {DType::kBf16, DType::kF32}) {
        const testing::BatchedRows rows(desc, counts, dtype, ++seed);
        const auto want = testing::RunBatchedLayer(**moe, rows, DType::kF32, testing::Pool(), &GpuLane());
        REQUIRE(want.ok());
        for (int64_t spare : {0, 19}) {
          INFO(rows.counted() << " rows of " << DTypeName(dtype) << ", room for " << spare << " more");
          const std::vector<float> got = RunBatchedOp(static_cast<const cuda::CudaMoe&>(**moe), rows, spare);
          REQUIRE(got.size() == want->y.size());
          CHECK(std::memcmp(got.data(), want->y.data(), got.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

}  // namespace moed
