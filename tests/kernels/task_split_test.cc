// How stages are cut into tasks: every pair of every expert with rows once and in order, tasks of about equal cost.
#include <catch2/catch.hpp>

#include <algorithm>
#include <vector>

#include "kernels/cpu/task_split.h"
#include "tests/support/random_layer.h"

namespace moed::cpu {
namespace {

// A stage: rows of each expert, pairs of an expert.
struct Stage {
  std::vector<int64_t> rows;
  int64_t pairs = 0;
  int64_t pair_bytes = 0;
  int threads = 1;

  TaskList Split() const {
    SortedSlots sorted;
    sorted.begin.push_back(0);
    for (int64_t count : rows) sorted.begin.push_back(sorted.begin.back() + static_cast<int32_t>(count));
    return SplitTasks(sorted, static_cast<int>(rows.size()), pairs, pair_bytes, threads);
  }
};

// Every pair of every expert that has rows, once, in ascending order over the whole list; no task and no part is empty.
void CheckCovers(const Stage& stage, const TaskList& list) {
  size_t expert = 0;
  int64_t pair = 0;
  const auto skip = [&] {
    while (expert < stage.rows.size() && (stage.rows[expert] == 0 || pair == stage.pairs)) ++expert, pair = 0;
  };
  for (int64_t task = 0; task < list.size(); ++task) {
    REQUIRE_FALSE(list.parts(task).empty());
    for (const TaskPart& part : list.parts(task)) {
      skip();
      REQUIRE(expert < stage.rows.size());
      REQUIRE(part.expert == static_cast<int>(expert));
      REQUIRE(part.first == pair);
      REQUIRE(part.last > part.first);
      REQUIRE(part.last <= stage.pairs);
      pair = part.last;
    }
  }
  skip();
  REQUIRE(expert == stage.rows.size());
}

// What a pair of `expert` costs in the units of SplitTasks: its rows, and reading it, which takes as long as four of them.
int64_t CostOf(const Stage& stage, int expert) { return 4 + stage.rows[static_cast<size_t>(expert)]; }

int64_t CostOf(const Stage& stage, std::span<const TaskPart> parts) {
  int64_t cost = 0;
  for (const TaskPart& part : parts) cost += (part.last - part.first) * CostOf(stage, part.expert);
  return cost;
}

Stage RandomStage(testing::Random& random) {
  Stage stage;
  const int64_t experts = 1 + random.Below(random.Below(2) ? 8 : 300), most = 1 + random.Below(random.Below(2) ? 3 : 5000);
  for (int64_t e = 0; e < experts; ++e) stage.rows.push_back(random.Below(3) ? random.Below(most + 1) : 0);
  stage.pairs = 1 + random.Below(random.Below(2) ? 6 : 400);
  stage.pair_bytes = 64 << random.Below(16);
  stage.threads = static_cast<int>(1 + random.Below(random.Below(2) ? 4 : 256));
  return stage;
}

}  // namespace

TEST_CASE("Any experts, rows, pairs and threads: every pair is in one task, in order, and no task is empty") {
  testing::Random random(1);
  for (int trial = 0; trial < 4000; ++trial) {
    const Stage stage = RandomStage(random);
    INFO("trial " << trial << ": " << stage.rows.size() << " experts, " << stage.pairs << " pairs, " << stage.threads << " threads");
    const TaskList list = stage.Split();
    CheckCovers(stage, list);
    REQUIRE(list.size() <= 8 * stage.threads);
  }
}

TEST_CASE("A stage without rows has no tasks") {
  CHECK(Stage{{0, 0, 0}, 10, 1024, 4}.Split().size() == 0);
  CHECK(Stage{{}, 10, 1024, 4}.Split().size() == 0);
}

TEST_CASE("No task takes much more than its share, and none but the last much less") {
  testing::Random random(2);
  for (int trial = 0; trial < 4000; ++trial) {
    const Stage stage = RandomStage(random);
    const TaskList list = stage.Split();
    int64_t total = 0, largest = 0, active = 0;
    for (size_t e = 0; e < stage.rows.size(); ++e) {
      if (stage.rows[e] == 0) continue;
      largest = std::max(largest, CostOf(stage, static_cast<int>(e)));
      total += stage.pairs * CostOf(stage, static_cast<int>(e));
      ++active;
    }
    if (active == 0) continue;
    const int64_t tasks = stage.threads * std::clamp<int64_t>(active * stage.pairs * stage.pair_bytes / stage.threads / (512 << 10), 1, 8);
    INFO("trial " << trial << ": " << stage.rows.size() << " experts, " << stage.pairs << " pairs, " << stage.threads << " threads, total "
                  << total << ", share " << total / tasks << ", a pair up to " << largest);
    for (int64_t task = 0; task < list.size(); ++task) {
      const int64_t cost = CostOf(stage, list.parts(task));
      INFO("task " << task << " of " << list.size() << " costs " << cost);
      REQUIRE(cost <= total / tasks + 1 + largest);
      if (task + 1 < list.size()) REQUIRE(cost >= total / tasks - largest);
    }
  }
}

}  // namespace moed::cpu
