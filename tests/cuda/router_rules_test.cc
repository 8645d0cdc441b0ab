// The router's rule for teams, with teams of host threads, against engine/routing.
#include <catch2/catch.hpp>

#include <atomic>
#include <barrier>
#include <bit>
#include <cstring>
#include <thread>

#include "engine/routing.h"
#include "kernels/cuda/router_rules.h"
#include "tests/cuda/router_cases.h"

namespace moed::cuda {
namespace {

using moed::testing::RandomBias;
using moed::testing::RandomLogits;
using moed::testing::RouterCase;
using moed::testing::RouterCases;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A team of one: its sums are those of the host's loops.
struct Alone {
  int Rank() const { return 0; }
  int Size() const { return 1; }
  void Sync() const {}
  template <class T>
  T Max(T value) const { return value; }
  float Sum(float value) const { return value; }
};

// Several threads, as the device has them: what a missing barrier breaks.
class Threads {
 public:
  struct Shared {
    explicit Shared(int size) : barrier(size), slots(size) {}
    std::barrier<> barrier;
    std::vector<uint64_t> slots;
  };
  Threads(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  int Rank() const { return rank_; }
  int Size() const { return static_cast<int>(shared_.slots.size()); }
  void Sync() { shared_.barrier.arrive_and_wait(); }
  uint32_t Max(uint32_t value) { return static_cast<uint32_t>(Max(static_cast<uint64_t>(value))); }
  uint64_t Max(uint64_t value) {
    const std::vector<uint64_t> all = Exchange(value);
    return *std::max_element(all.begin(), all.end());
  }
  float Sum(float value) {
    float sum = 0.0f;
    for (const uint64_t bits : Exchange(std::bit_cast<uint32_t>(value))) sum += std::bit_cast<float>(static_cast<uint32_t>(bits));
    return sum;
  }

 private:
  std::vector<uint64_t> Exchange(uint64_t value) {
    shared_.slots[rank_] = value;
    Sync();
    const std::vector<uint64_t> all = shared_.slots;
    Sync();
    return all;
  }
  Shared& shared_;
  const int rank_;
};

struct Routed {
  RowOutcome outcome = RowOutcome::kRefused;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// Routes one row with `team_size` threads; scratch and weights are poisoned before.
Routed RunTeam(const RouterCase& c, std::span<const float> logits, std::span<const float> bias, bool own_gate, int team_size) {
  std::vector<uint32_t> keys(c.experts, 0xFFFFFFFF), order(c.experts, 0xFFFFFFFF);
  Routed routed;
  routed.weights.assign(c.top_k, kNan);
  const RouterRow row{c.rule,      c.experts,   c.top_k,      own_gate,
                      logits.data(), bias.empty() ? nullptr : bias.data(), keys.data(), order.data(), routed.weights.data()};
  if (team_size == 1) {
    Alone team;
    routed.outcome = RouteRow(team, row);
  } else {
    Threads::Shared shared(team_size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < team_size; ++rank) {
      threads.emplace_back([&, rank] {
        Threads team(shared, rank);
        const RowOutcome outcome = RouteRow(team, row);
        if (rank == team_size - 1) routed.outcome = outcome;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  routed.ids.assign(order.begin(), order.begin() + c.top_k);
  return routed;
}

struct Wanted {
  absl::Status status;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Wanted RunHost(const RouterCase& c, std::span<const float> logits, std::span<const float> bias, bool own_gate) {
  Wanted wanted;
  wanted.ids.resize(c.top_k);
  wanted.weights.resize(c.top_k);
  const auto function = own_gate ? RouteOwnGate : Route;
  wanted.status = function(c.rule, c.experts, c.top_k, logits, bias, wanted.ids, wanted.weights);
  return wanted;
}

// A team of threads adds in another order, so that only its ids are exact.
void CheckRow(const RouterCase& c, std::span<const float> logits, std::span<const float> bias, int team_size) {
  const Wanted want = RunHost(c, logits, bias, false);
  INFO(c.Name() << ", team of " << team_size << ": " << want.status.ToString());
  const Routed got = RunTeam(c, logits, bias, false, team_size);
  REQUIRE(got.outcome == (want.status.ok() ? RowOutcome::kRouted : RowOutcome::kRefused));
  if (!want.status.ok()) return;
  REQUIRE(got.ids == want.ids);
  for (int j = 0; j < c.top_k; ++j) {
    INFO("slot " << j << ", expert " << want.ids[j]);
    if (team_size == 1 && c.rule.score != RouterRule::Score::kSparseMixer) {
      REQUIRE(std::bit_cast<uint32_t>(got.weights[j]) == std::bit_cast<uint32_t>(want.weights[j]));
    } else {
      REQUIRE(got.weights[j] == Approx(want.weights[j]).epsilon(moed::testing::WeightTolerance(c)).margin(1e-35));
    }
  }
}

TEST_CASE("A team of one gives the ids and the bits of the host's router for every rule") {
  uint32_t seed = 1;
  for (const RouterCase& c : RouterCases()) {
    const int rows = c.experts > 1000 ? 3 : 12;
    const std::vector<float> logits = RandomLogits(c, rows, ++seed);
    const std::vector<float> bias = RandomBias(c, seed);
    for (int t = 0; t < rows; ++t) CheckRow(c, std::span(logits).subspan(t * c.experts, c.experts), bias, 1);
  }
}

TEST_CASE("Teams of several threads choose as the host's router") {
  uint32_t seed = 100;
  for (const RouterCase& c : RouterCases()) {
    if (c.experts > 60 && ++seed % 7 != 0) continue;  // threads that wait for each other are slow
    if (c.experts > 1000 && c.top_k > 8) continue;
    const std::vector<float> logits = RandomLogits(c, 2, ++seed);
    const std::vector<float> bias = RandomBias(c, seed);
    for (int t = 0; t < 2; ++t) CheckRow(c, std::span(logits).subspan(t * c.experts, c.experts), bias, t == 0 ? 3 : 4);
  }
}

TEST_CASE("The largest numbers of experts can be picked from and sorted") {
  RouterCase c;
  c.experts = 65535;
  c.rule.score = RouterRule::Score::kSigmoid;
  c.rule.groups = 257;
  c.rule.groups_kept = 257;
  for (const int top_k : {7, 65535}) {
    c.top_k = top_k;
    CheckRow(c, RandomLogits(c, 1, 9), {}, 1);
  }
  c.rule.groups = c.rule.groups_kept = 1;
  c.rule.score = RouterRule::Score::kSparseMixer;
  c.top_k = 3;
  CheckRow(c, RandomLogits(c, 1, 10), {}, 1);
}

TEST_CASE("Rows that the host refuses are refused: NaN, +Inf, too few finite logits in the groups that are kept") {
  RouterCase c;
  c.experts = 8;
  c.top_k = 2;
  const std::vector<std::vector<float>> rows = {
      {1, 2, 3, kNan, 4, 5, 6, 7},
      {1, 2, 3, -kNan, 4, 5, 6, 7},
      {1, 2, 3, 4, 5, 6, 7, kInf},
      {-kInf, -kInf, -kInf, -kInf, -kInf, 1, -kInf, -kInf},
      {-kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf},
      {-kInf, 5, -kInf, -kInf, -kInf, -kInf, 1, -kInf},          // fits one group of eight only
      {-kInf, 5, -kInf, -kInf, 1, -kInf, 1, -kInf},              // as does this when the best group has one expert
      {3.4e38f, -3.4e38f, -3.4e38f, 3.4e38f, -kInf, 0, -0.0f, 1}  // and this is fine everywhere
  };
  int refused = 0;
  for (const auto score : {RouterRule::Score::kSoftmax, RouterRule::Score::kSoftmaxOfChosen, RouterRule::Score::kSigmoid,
                           RouterRule::Score::kSqrtSoftplus, RouterRule::Score::kSparseMixer}) {
    for (const int groups : {1, 2, 4}) {
      for (const auto group_score : {RouterRule::GroupScore::kMax, RouterRule::GroupScore::kTopTwoSum}) {
        if (score == RouterRule::Score::kSparseMixer && groups > 1) continue;
        c.rule.score = score;
        c.rule.groups = groups;
        c.rule.group_score = group_score;
        for (const std::vector<float>& row : rows) {
          for (const int team_size : {1, 3}) CheckRow(c, row, {}, team_size);
          refused += !RunHost(c, row, {}, false).status.ok();
        }
      }
    }
  }
  CHECK(refused > 5 * 26);
}

TEST_CASE("Logits of the server's own gate that are not finite are told apart from those that cannot be routed") {
  RouterCase c;
  c.experts = 6;
  c.top_k = 3;
  for (const float bad : {kNan, kInf, -kInf}) {
    for (int at = 0; at < 6; ++at) {
      std::vector<float> row = {1, 2, 3, 4, 5, 6};
      row[at] = bad;
      for (const int team_size : {1, 4}) CHECK(RunTeam(c, row, {}, true, team_size).outcome == RowOutcome::kNotFinite);
    }
  }
  const std::vector<float> fine = {1, 6, 3, 4, 5, 2};
  CHECK(RunTeam(c, fine, {}, true, 4).ids == RunHost(c, fine, {}, true).ids);
}

}  // namespace
}  // namespace moed::cuda
