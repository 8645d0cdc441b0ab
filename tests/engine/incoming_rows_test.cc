// Calls whose hidden states are still being written: the same answers as when all is there, and no wait where none is needed.
#include <catch2/catch.hpp>

#include <string>
#include <variant>
#include <vector>

#include "tests/engine/accelerator_bench.h"
#include "tests/support/coming_rows.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

// Hidden states of `input` that come to a place of their own.
struct Coming {
  Coming(const Input& input, size_t part)
      : to(input.x.size(), -7.0f), rows(input.x.data(), to.data(), input.x.size() * sizeof(float), part) {}
  // `call` with hidden states that are not there yet.
  ForwardCall Of(ForwardCall call) {
    call.hidden.data = to.data();
    call.incoming = &rows;
    return call;
  }

  std::vector<float> to;
  ComingRows rows;
};

}  // namespace

TEST_CASE("Hidden states may come while a call runs, in parts of any size; layers of the host wait for all of them") {
  const Files files(SharedModel());
  for (const std::string policy : {"auto", "auto,scheme:bf16=require:cpu_generic", "require:cpu_generic"}) {
    for (const bool chunks : {false, true}) {
      Bench bench(policy, [&](EngineOptions& options) { options.max_tokens = chunks ? 4 : 64; });
      bench.Load(files);
      for (const size_t part : {size_t{100}, size_t{256}, size_t{5000}}) {
        for (int64_t rows : {1, 4, 11}) {
          INFO(policy << ", parts of " << part << " bytes, " << rows << " rows" << (chunks ? " in chunks" : ""));
          const Input input(rows);
          Coming coming(input, part);
          const ForwardCall call = input.Call(files.layer, static_cast<int>(rows % 3));
          const ForwardCall early = coming.Of(call);
          coming.rows.Start();
          CheckSame(Ask(bench.engine.get(), input, early), Ask(bench.engine.get(), input, call));
          if (policy != "auto") CHECK(coming.rows.waits() == 1);
          if (policy == "auto" && chunks && rows == 11) CHECK(coming.rows.waits() > 1);  // once for each chunk
        }
      }
      CHECK((bench.puppet.counts().incoming_parts > 0) == (policy == "auto"));
    }
  }
}

TEST_CASE("A call that fails before it needs its hidden states, or has no rows, does not wait for them") {
  const Files files(SharedModel());
  Bench bench;
  bench.Load(files);
  const Input input(5), none(0);
  Coming coming(input, 100), nothing(none, 100);  // of which not a byte ever comes
  const auto fails = [&](const ForwardCall& call) { return Ask(bench.engine.get(), input, coming.Of(call)).status; };
  CHECK(absl::IsNotFound(fails(input.Call(17, 0))));
  ForwardCall wrong = input.Call(files.layer, 2);
  std::get<RoutingByIds>(wrong.routing).top_k = 0;
  CHECK(absl::IsInvalidArgument(fails(wrong)));
  CHECK(Ask(bench.engine.get(), none, nothing.Of(none.Call(files.layer, 0))).status.ok());
  bench.puppet.Fail("fell off the bus");
  for (int i = 0; i < 2; ++i) CHECK(absl::IsUnavailable(fails(input.Call(files.layer, 0))));
  CHECK(coming.rows.waits() == 0);
  CHECK(nothing.rows.waits() == 0);
}

}  // namespace moed
