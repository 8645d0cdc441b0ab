// Calls whose hidden states are still being written: the same answers as when all is there, and no wait where none is needed.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <variant>

#include "kernels/incoming_rows.h"
#include "tests/engine/accelerator_bench.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

// Hidden states of a call that another thread writes a few bytes at a time.
class ComingRows : public IncomingRows {
 public:
  ComingRows(const Input& input, size_t part) : from_(input.x), to_(input.x.size(), -7.0f), part_(part) {}
  ~ComingRows() override {
    if (writer_.joinable()) writer_.join();
  }
  // `call` with hidden states that are not there yet.
  ForwardCall Of(ForwardCall call) {
    call.hidden.data = to_.data();
    call.incoming = this;
    return call;
  }
  void Start() {
    writer_ = std::thread([this] {
      for (size_t at = 0; at < bytes(); at += part_) {
        const size_t end = std::min(at + part_, bytes());
        std::memcpy(reinterpret_cast<char*>(to_.data()) + at, reinterpret_cast<const char*>(from_.data()) + at, end - at);
        there_.store(end, std::memory_order_release);
        std::this_thread::yield();
      }
    });
  }
  size_t WaitPast(size_t past) override {
    ++waits_;
    while (there_.load(std::memory_order_acquire) <= std::min(past, bytes() - 1)) std::this_thread::yield();
    return there_.load(std::memory_order_acquire);
  }
  int waits() const { return waits_; }

 private:
  size_t bytes() const { return from_.size() * sizeof(float); }

  const std::vector<float>& from_;
  std::vector<float> to_;
  const size_t part_;
  std::atomic<size_t> there_{0};
  std::thread writer_;
  int waits_ = 0;
};

}  // namespace

TEST_CASE("Hidden states may come while a call runs, in parts that need not end with rows; layers of the host wait for all of them") {
  const Files files(SharedModel());
  for (const std::string policy : {"auto", "auto,scheme:bf16=require:cpu_generic", "require:cpu_generic"}) {
    for (const bool chunks : {false, true}) {
      Bench bench(policy, [&](EngineOptions& options) { options.max_tokens = chunks ? 4 : 64; });
      bench.Load(files);
      for (const size_t part : {size_t{100}, size_t{256}, size_t{5000}}) {
        for (int64_t rows : {1, 4, 11}) {
          INFO(policy << ", parts of " << part << " bytes, " << rows << " rows" << (chunks ? " in chunks" : ""));
          const Input input(rows);
          ComingRows coming(input, part);
          const ForwardCall call = input.Call(files.layer, static_cast<int>(rows % 3));
          const ForwardCall early = coming.Of(call);
          coming.Start();
          CheckSame(Ask(bench.engine.get(), input, early), Ask(bench.engine.get(), input, call));
          if (policy != "auto") CHECK(coming.waits() == 1);
          if (policy == "auto" && chunks && rows == 11) CHECK(coming.waits() > 1);  // once for each chunk
        }
      }
      CHECK((bench.puppet.counts().incoming_parts > 0) == (policy == "auto"));
    }
  }
}

TEST_CASE("A call that fails before it needs its hidden states does not wait for them, and no row can be coming to a call without rows") {
  const Files files(SharedModel());
  Bench bench;
  bench.Load(files);
  const Input input(5), none(0);
  ComingRows coming(input, 100), nothing(none, 100);  // of which not a byte ever comes
  const auto fails = [&](const ForwardCall& call) { return Ask(bench.engine.get(), input, coming.Of(call)).status; };
  CHECK(absl::IsNotFound(fails(input.Call(17, 0))));
  ForwardCall wrong = input.Call(files.layer, 2);
  std::get<RoutingByIds>(wrong.routing).top_k = 0;
  CHECK(absl::IsInvalidArgument(fails(wrong)));
  CHECK(Ask(bench.engine.get(), none, nothing.Of(none.Call(files.layer, 0))).status.ok());
  bench.puppet.Fail("fell off the bus");
  for (int i = 0; i < 2; ++i) CHECK(absl::IsUnavailable(fails(input.Call(files.layer, 0))));
  CHECK(coming.waits() == 0);
  CHECK(nothing.waits() == 0);
}

}  // namespace moed
