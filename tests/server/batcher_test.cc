// The batcher's rule, with the time given: what shares a run and what does not, whose turn it is, what is cut, dropped and refused.
#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/batcher.h"

namespace moed {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using TimePoint = Batcher::TimePoint;

struct Named : QueuedWork {
  Named(std::string name, Terms terms) : QueuedWork(std::move(terms)), name(std::move(name)) {}
  bool Gone() const override { return gone; }
  void Run(std::span<Part>) override {}
  void Drop(const absl::Status&) override {}
  const std::string name;
  bool gone = false;
};

// A batcher and its time.
struct Bench {
  explicit Bench(const Batcher::Limits& limits = {}) : batcher(limits) {}

  std::shared_ptr<Named> Add(const std::string& name, QueuedWork::Terms terms) {
    auto work = std::make_shared<Named>(name, std::move(terms));
    batcher.Add(work, now);
    return work;
  }
  // Of one layer and kind.
  std::shared_ptr<Named> Add(const std::string& name, int64_t rows, const std::string& layer = "m/0",
                             const std::string& kind = "bf16") {
    return Add(name, {.group = layer, .kind = kind, .rows = rows, .step = 100});
  }

  // The next run as "a[0,16) b[0,8)"; works that are not through go back. Empty: nothing is due.
  std::string Run(bool hurry = false) {
    std::string text;
    Batcher::Dead gone_by;
    for (Batcher::Part& part : batcher.Take(now, hurry, &gone_by)) {
      text += (text.empty() ? "" : " ") + NameOf(*part.work) + "[" + std::to_string(part.first) + "," +
              std::to_string(part.first + part.rows) + ")";
      if (part.next < part.work->terms().rows) batcher.Return(std::move(part), now);
    }
    for (const auto& [work, why] : gone_by) dead.push_back(NameOf(*work) + (absl::IsDeadlineExceeded(why) ? " late" : " gone"));
    return text;
  }

  static std::string NameOf(const QueuedWork& work) { return static_cast<const Named&>(work).name; }

  TimePoint now{std::chrono::hours(1)};
  Batcher batcher;
  std::vector<std::string> dead;
};

}  // namespace

TEST_CASE("What waits of one layer and kind runs together, in order, up to the budget to the row") {
  Bench bench({.batch_rows = 100});
  bench.Add("a", 50);
  bench.Add("b", 49);
  bench.Add("c", 1);
  bench.Add("d", 1);
  CHECK(bench.batcher.waiting_rows() == 101);
  CHECK(bench.Run() == "a[0,50) b[0,49) c[0,1)");
  CHECK(bench.Run() == "d[0,1)");
  CHECK(bench.Run() == "");
  CHECK(bench.batcher.waiting() == 0);
  CHECK(bench.batcher.waiting_rows() == 0);
}

TEST_CASE("One that does not fit ends the run: those of its kind behind it do not overtake it") {
  Bench bench({.batch_rows = 100});
  bench.Add("a", 60);
  bench.Add("b", 60);
  bench.Add("c", 10);
  CHECK(bench.Run() == "a[0,60)");
  CHECK(bench.Run() == "b[0,60) c[0,10)");
}

TEST_CASE("Works of no rows run, with others and alone") {
  Bench bench({.batch_rows = 10});
  bench.Add("a", 0);
  bench.Add("b", 10);
  bench.Add("c", 0);
  CHECK(bench.Run() == "a[0,0) b[0,10) c[0,0)");
  bench.Add("d", 0);
  CHECK(bench.Run() == "d[0,0)");
}

TEST_CASE("Other kinds and other layers share no run, and works without a kind share none") {
  Bench bench;
  bench.Add("a", 1, "m/0", "bf16");
  bench.Add("b", 1, "m/0", "f32");
  bench.Add("c", 1, "m/1", "bf16");
  bench.Add("d", 1, "m/0", "bf16");
  bench.Add("e", 1, "m/1", "");
  bench.Add("f", 1, "m/1", "");
  CHECK(bench.Run() == "a[0,1) d[0,1)");  // past another kind, which is next of its layer in any case
  CHECK(bench.Run() == "c[0,1)");         // the layer that had less
  CHECK(bench.Run() == "e[0,1)");
  CHECK(bench.Run() == "b[0,1)");
  CHECK(bench.Run() == "f[0,1)");
}

TEST_CASE("A work of more rows than its step goes in steps, alone, and those that wait pass in between") {
  Bench bench({.batch_rows = 100});
  bench.Add("prefill", 250);
  bench.Add("a", 4);
  bench.Add("b", 4);
  CHECK(bench.Run() == "prefill[0,100)");
  CHECK(bench.batcher.waiting_rows() == 158);
  CHECK(bench.Run() == "a[0,4) b[0,4)");
  CHECK(bench.Run() == "prefill[100,200)");
  bench.Add("c", 4);
  CHECK(bench.Run() == "prefill[200,250)");  // it was there before
  CHECK(bench.Run() == "c[0,4)");
}

TEST_CASE("Small works pass a waiting prefill once, and then it has its turn") {
  Bench bench({.batch_rows = 100});
  bench.Add("a", 4);
  bench.Add("prefill", 150);
  bench.Add("b", 4);
  CHECK(bench.Run() == "a[0,4) b[0,4)");
  bench.Add("c", 4);
  CHECK(bench.Run() == "prefill[0,100)");
}

TEST_CASE("A work of more rows than the budget that is not cut goes alone, and others pass it once") {
  Bench bench({.batch_rows = 50});
  bench.Add("a", 4);
  bench.Add("large", 51);
  bench.Add("b", 4);
  CHECK(bench.Run() == "a[0,4) b[0,4)");
  bench.Add("c", 4);
  CHECK(bench.Run() == "large[0,51)");
  CHECK(bench.Run() == "c[0,4)");
}

TEST_CASE("A work that may not be cut goes at once, whatever its rows, and alone") {
  Bench bench({.batch_rows = 100});
  bench.Add("spans", {.group = "m/0", .rows = 250});
  bench.Add("a", 4);
  CHECK(bench.Run() == "spans[0,250)");
  CHECK(bench.Run() == "a[0,4)");
}

TEST_CASE("A work goes on from where its run says, also from the beginning") {
  Bench bench({.batch_rows = 100});
  bench.Add("a", 250);
  Batcher::Dead dead;
  std::vector<Batcher::Part> parts = bench.batcher.Take(bench.now, false, &dead);
  REQUIRE(parts.size() == 1);
  CHECK(parts[0].next == 100);
  parts[0].next = 30;
  bench.batcher.Return(std::move(parts[0]), bench.now);
  CHECK(bench.batcher.waiting_rows() == 220);
  CHECK(bench.Run() == "a[30,130)");
}

TEST_CASE("Layers take turns by what was run for them") {
  // Layer a always has 100 rows waiting and b 10.
  Bench bench({.batch_rows = 100});
  std::map<char, int64_t> runs;
  bench.Add("a", 100, "m/a");
  bench.Add("b", 10, "m/b");
  for (int i = 0; i < 238; ++i) {
    const char layer = bench.Run().at(0);
    ++runs[layer];
    layer == 'a' ? bench.Add("a", 100, "m/a") : bench.Add("b", 10, "m/b");
  }
  // (100 + 64) to (10 + 64) rows a run.
  CHECK(runs['a'] == Approx(74).margin(1));
  CHECK(runs['b'] == Approx(164).margin(1));
}

TEST_CASE("No layer starves: with every layer always busy each is served within a round") {
  Bench bench({.batch_rows = 100});
  constexpr int kLayers = 20;
  std::vector<int> last(kLayers, 0);
  for (int layer = 0; layer < kLayers; ++layer) bench.Add(std::to_string(layer), 5, "m/" + std::to_string(layer));
  for (int i = 1; i <= 50 * kLayers; ++i) {
    const int layer = std::stoi(bench.Run());
    CHECK(i - last[layer] <= 2 * kLayers);
    last[layer] = i;
    bench.Add(std::to_string(layer), 5, "m/" + std::to_string(layer));
  }
}

TEST_CASE("A layer that was idle is owed nothing, and owes what it had") {
  Bench bench({.batch_rows = 100});
  for (int i = 0; i < 50; ++i) {
    bench.Add("a", 100, "m/a");
    CHECK(bench.Run() == "a[0,100)");
  }
  // A newcomer does not make up for the fifty runs: they take turns at once.
  for (int i = 0; i < 4; ++i) bench.Add("b", 100, "m/b");
  for (int i = 0; i < 4; ++i) bench.Add("a", 100, "m/a");
  std::string order;
  for (int i = 0; i < 8; ++i) order += bench.Run().at(0);
  CHECK(order == "babababa");
  // And one that comes back after each run does not go before the others every time.
  bench.Add("c", 100, "m/c");
  bench.Add("b", 100, "m/b");
  bench.Add("b", 100, "m/b");
  order.clear();
  for (int i = 0; i < 4; ++i) {
    order += bench.Run().at(0);
    if (order.back() == 'c') bench.Add("c", 100, "m/c");
  }
  CHECK(std::count(order.begin(), order.end(), 'c') == 2);
}

TEST_CASE("With a wait a work is due when it is over, or when the budget is full, or when all must go") {
  Bench bench({.batch_rows = 100, .wait = microseconds(500)});
  CHECK(bench.batcher.Due() == TimePoint::max());
  bench.Add("a", 60);
  CHECK(bench.batcher.Due() == bench.now + microseconds(500));
  CHECK(bench.Run() == "");
  bench.now += microseconds(499);
  bench.Add("b", 10);
  CHECK(bench.Run() == "");
  bench.now += microseconds(1);
  CHECK(bench.Run() == "a[0,60) b[0,10)");
  bench.Add("c", 60);
  bench.Add("d", 40);
  CHECK(bench.batcher.Due() <= bench.now);
  CHECK(bench.Run() == "c[0,60) d[0,40)");
  bench.Add("e", 1);
  CHECK(bench.Run(true) == "e[0,1)");
}

TEST_CASE("With a wait nothing waits that can share no run, and other layers do not wait with it") {
  Bench bench({.batch_rows = 100, .wait = microseconds(500)});
  bench.Add("a", 1, "m/0");
  bench.Add("alone", 1, "m/1", "");
  bench.Add("prefill", 101, "m/2");
  CHECK(bench.Run() == "alone[0,1)");
  CHECK(bench.Run() == "prefill[0,100)");
  CHECK(bench.Run() == "prefill[100,101)");
  CHECK(bench.Run() == "");
}

TEST_CASE("A work does not expire for lack of company") {
  Bench bench({.wait = milliseconds(10)});
  bench.Add("a", {.group = "m/0", .kind = "k", .deadline = bench.now + milliseconds(4)});
  CHECK(bench.batcher.Due() == bench.now + milliseconds(2));
}

TEST_CASE("Works that cannot matter any more are handed back, wherever the run comes by them") {
  Bench bench({.batch_rows = 100});
  bench.Add("late", {.group = "m/0", .kind = "k", .rows = 90, .deadline = bench.now + milliseconds(1)});
  bench.Add("a", {.group = "m/0", .kind = "k", .rows = 50});
  const auto gone = bench.Add("b", {.group = "m/0", .kind = "k", .rows = 90});
  bench.Add("c", {.group = "m/0", .kind = "k", .rows = 50});
  bench.now += milliseconds(1);
  gone->gone = true;
  CHECK(bench.Run() == "a[0,50) c[0,50)");
  CHECK(bench.dead == std::vector<std::string>{"late late", "b gone"});
  CHECK(bench.batcher.waiting() == 0);
  CHECK(bench.batcher.waiting_rows() == 0);
}

TEST_CASE("A prefill whose caller goes is dropped between its steps") {
  Bench bench({.batch_rows = 100});
  const auto work = bench.Add("prefill", 1000);
  CHECK(bench.Run() == "prefill[0,100)");
  work->gone = true;
  CHECK(bench.Run() == "");
  CHECK(bench.dead == std::vector<std::string>{"prefill gone"});
  CHECK(bench.batcher.waiting_rows() == 0);
}

TEST_CASE("All dead works of all layers are found at once") {
  Bench bench;
  for (const char* layer : {"m/0", "m/1"}) {
    bench.Add("late", {.group = layer, .rows = 2, .deadline = bench.now});
    bench.Add("alive", {.group = layer, .rows = 3});
  }
  CHECK(bench.batcher.TakeDead(bench.now).size() == 2);
  CHECK(bench.batcher.waiting() == 2);
  CHECK(bench.batcher.waiting_rows() == 6);
}

TEST_CASE("Room ends with the calls and with the rows, with the numbers, but nothing is too large for an empty queue") {
  Bench bench({.calls = 2, .rows = 100});
  CHECK(bench.batcher.CheckRoom(1000).ok());
  bench.Add("a", 40);
  CHECK(bench.batcher.CheckRoom(60).ok());
  const absl::Status rows = bench.batcher.CheckRoom(61);
  CHECK(absl::IsResourceExhausted(rows));
  CHECK_THAT(std::string(rows.message()), Catch::Matchers::Contains("40 rows wait, with these 101, 100 may"));
  bench.Add("b", 1);
  const absl::Status calls = bench.batcher.CheckRoom(0);
  CHECK(absl::IsResourceExhausted(calls));
  CHECK_THAT(std::string(calls.message()), Catch::Matchers::Contains("2 calls wait, 2 may"));
}

TEST_CASE("Who has less time left than a run takes is dropped while another waits that has enough, and runs where none has") {
  Bench bench({.batch_rows = 20});
  const auto add = [&](const std::string& name, milliseconds left) {
    bench.Add(name, {.group = "m/0", .kind = "bf16", .rows = 10, .step = 100, .deadline = bench.now + left});
  };
  SECTION("nothing is known of runs") {
    add("a", milliseconds(1)), add("b", milliseconds(500));
    CHECK(bench.Run() == "a[0,10) b[0,10)");
    CHECK(bench.dead.empty());
  }
  SECTION("runs of 20 rows took 100 ms, which may be 200") {
    bench.batcher.Measure("m/0", 20, milliseconds(100));
    add("a", milliseconds(190)), add("b", milliseconds(210)), add("c", milliseconds(190)), add("d", milliseconds(210));
    CHECK(bench.Run() == "b[0,10) d[0,10)");
    CHECK(bench.dead == std::vector<std::string>{"a late", "c late"});
  }
  SECTION("nobody has enough time") {
    bench.batcher.Measure("m/0", 20, milliseconds(100));
    add("a", milliseconds(10)), add("b", milliseconds(20));
    CHECK(bench.Run() == "a[0,10) b[0,10)");
    CHECK(bench.dead.empty());
  }
  SECTION("one of few rows takes their share of the time, whatever large runs took") {
    bench.batcher.Measure("m/0", 1000, milliseconds(1000));
    add("a", milliseconds(40)), add("b", milliseconds(500));
    CHECK(bench.Run() == "a[0,10) b[0,10)");
    CHECK(bench.dead.empty());
  }
  SECTION("many rows take no longer than a run does, whatever small ones took for a row") {
    bench.batcher.Measure("m/0", 1, milliseconds(10));
    add("a", milliseconds(40)), add("b", milliseconds(500));
    CHECK(bench.Run() == "a[0,10) b[0,10)");
    CHECK(bench.dead.empty());
  }
  SECTION("another layer's runs say nothing") {
    bench.batcher.Measure("m/1", 20, milliseconds(100));
    add("a", milliseconds(10)), add("b", milliseconds(500));
    CHECK(bench.Run() == "a[0,10) b[0,10)");
    CHECK(bench.dead.empty());
  }
}

}  // namespace moed
