// The router on the device against engine/routing. Without a GPU every case is skipped.
#include <catch2/catch.hpp>

#include <bit>

#include "engine/routing.h"
#include "kernels/cuda/router.h"
#include "tests/cuda/router_cases.h"
#include "tests/cuda/router_device.h"
#include "tests/support/skip.h"

namespace moed::cuda {
namespace {

using namespace moed::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kSpareRows = 5;  // capacity behind the rows of a call

// The experts [first, first + held) are here.
struct Held {
  int first = 0;
  int held = 0;
};

struct Routed {
  std::vector<int32_t> ids, local_ids;
  std::vector<float> weights;
  int32_t error_row = 0;
};

Routed RunDevice(const RouterCase& c, const std::vector<float>& logits, const std::vector<float>& bias, bool own_gate = false,
                 Held held = {}) {
  const int rows = static_cast<int>(logits.size() / c.experts);
  const int capacity = rows + kSpareRows;
  const size_t slots = static_cast<size_t>(rows) * c.top_k;
  const size_t spare = static_cast<size_t>(kSpareRows) * c.top_k;
  DeviceArray<float> device_logits(logits), device_bias(bias), weights(slots + spare);
  DeviceArray<float> scratch(static_cast<size_t>(capacity) * 2 * c.experts);
  DeviceArray<int32_t> ids(slots + spare), local_ids(slots + spare);
  const int32_t none = INT32_MAX;
  DeviceArray<int32_t> error_row(std::span<const int32_t>(&none, 1));
  RouterArgs args;
  args.rows = rows;
  args.experts = c.experts;
  args.top_k = c.top_k;
  args.rule = c.rule;
  args.logits = device_logits.data();
  args.route = true;
  args.own_gate = own_gate;
  args.correction_bias = bias.empty() ? nullptr : device_bias.data();
  args.ids = ids.data();
  args.weights = weights.data();
  args.scratch = scratch.data();
  args.first_expert = held.first;
  args.held = held.held;
  args.local_ids = local_ids.data();
  args.error_row = error_row.data();
  DeviceArray<RouterArgs> device_args(std::span<const RouterArgs>(&args, 1));
  REQUIRE(LaunchRouter(device_args.data(), capacity, c.experts, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return {ids.Read(slots), local_ids.Read(slots), weights.Read(slots), error_row.Read(1)[0]};
}

struct Wanted {
  absl::Status status;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Wanted RunHost(const RouterCase& c, std::span<const float> logits, std::span<const float> bias, bool own_gate = false) {
  const size_t slots = logits.size() / c.experts * c.top_k;
  Wanted wanted{absl::OkStatus(), std::vector<int32_t>(slots), std::vector<float>(slots)};
  const auto function = own_gate ? RouteOwnGate : Route;
  wanted.status = function(c.rule, c.experts, c.top_k, logits, bias, wanted.ids, wanted.weights);
  return wanted;
}

// Compares one row; returns in how many slots the device chose differently where float32 may. The weights of such a row are left
// out: another expert at the border changes what all are divided by.
int CompareRow(const RouterCase& c, std::span<const float> logits, std::span<const float> bias, const Wanted& want,
               const Routed& got, int t) {
  const size_t first = static_cast<size_t>(t) * c.top_k;
  int swapped = 0;
  for (size_t i = first; i < first + c.top_k; ++i) {
    INFO("row " << t << ", slot " << i - first << ": expert " << got.ids[i] << ", wanted " << want.ids[i]);
    REQUIRE((got.ids[i] >= 0 && got.ids[i] < c.experts));
    if (got.ids[i] == want.ids[i]) continue;
    REQUIRE(MayBeSwapped(c, ChoiceOf(c, logits, bias), got.ids[i], want.ids[i]));
    ++swapped;
  }
  for (size_t i = first; swapped == 0 && i < first + c.top_k; ++i) {
    INFO("row " << t << ", slot " << i - first);
    REQUIRE(got.weights[i] == Approx(want.weights[i]).epsilon(WeightTolerance(c)).margin(1e-35));
  }
  return swapped;
}

TEST_CASE("The device routes as the host for every rule, up to the last bits") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 0;
  size_t swapped = 0, slots = 0;
  for (const RouterCase& c : RouterCases()) {
    const int rows = std::vector<int>{33, 1, 3, 0}[++seed % 4];
    const std::vector<float> logits = RandomLogits(c, rows, seed);
    const std::vector<float> bias = RandomBias(c, seed);
    const Wanted want = RunHost(c, logits, bias);
    INFO(c.Name() << ", " << rows << " rows: " << want.status.ToString());
    REQUIRE(want.status.ok());
    const Routed got = RunDevice(c, logits, bias);
    REQUIRE(got.error_row == INT32_MAX);
    for (int t = 0; t < rows; ++t) {
      swapped += CompareRow(c, std::span(logits).subspan(static_cast<size_t>(t) * c.experts, c.experts), bias, want, got, t);
    }
    slots += got.ids.size();
  }
  INFO(swapped << " of " << slots << " slots differ where scores are as good as equal");
  CHECK(swapped * 500 <= slots);
}

TEST_CASE("The largest number of experts can be picked from and sorted on the device") {
  if (!HaveGpu()) return Skip("no GPU");
  RouterCase c;
  c.experts = 65535;
  for (const int top_k : {8, 3000, 65535}) {
    c.top_k = top_k;
    const std::vector<float> logits = RandomLogits(c, 2, 3);
    const Wanted want = RunHost(c, logits, {});
    REQUIRE(want.status.ok());
    const Routed got = RunDevice(c, logits, {});
    CHECK(got.error_row == INT32_MAX);
    CHECK(got.ids == want.ids);
  }
}

TEST_CASE("A row is routed to the same bits alone and in a batch") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 50;
  for (const RouterCase& c : RouterCases()) {
    if (++seed % 5 != 0) continue;
    INFO(c.Name());
    const std::vector<float> logits = RandomLogits(c, 33, seed);
    const std::vector<float> bias = RandomBias(c, seed);
    const Routed batch = RunDevice(c, logits, bias);
    for (const int t : {0, 17, 32}) {
      const auto row = logits.begin() + static_cast<size_t>(t) * c.experts;
      const Routed alone = RunDevice(c, {row, row + c.experts}, bias);
      for (int j = 0; j < c.top_k; ++j) {
        const size_t i = static_cast<size_t>(t) * c.top_k + j;
        REQUIRE(alone.ids[j] == batch.ids[i]);
        REQUIRE(std::bit_cast<uint32_t>(alone.weights[j]) == std::bit_cast<uint32_t>(batch.weights[i]));
      }
    }
  }
}

TEST_CASE("Rows that cannot be routed: the first is named, they get no experts, and the others are routed") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const int experts : {8, 64, 256, 5000}) {
    for (const int groups : {1, 4}) {
      RouterCase c;
      c.experts = experts;
      c.top_k = 2;
      c.rule.groups = groups;
      c.rule.score = RouterRule::Score::kSigmoid;
      std::vector<float> logits = RandomLogits({c.rule, experts, experts}, 6, 4);
      const auto at = [&](int t, int e) -> float& { return logits[static_cast<size_t>(t) * experts + e]; };
      at(2, experts - 1) = kNan;
      at(3, 0) = kInf;
      for (int e = 0; e < experts; ++e) at(4, e) = e == experts / 2 ? 1.0f : -kInf;
      for (int e = 0; e < experts; ++e) at(5, e) = -kInf;
      INFO("E=" << experts << ", groups " << groups);
      const Routed got = RunDevice(c, logits, {}, false, {0, experts});
      CHECK(got.error_row == 2);
      for (int t = 0; t < 6; ++t) {
        const auto row = std::span(logits).subspan(static_cast<size_t>(t) * experts, experts);
        const Wanted want = RunHost(c, row, {});
        CHECK(want.status.ok() == (t < 2));
        for (int j = 0; j < 2; ++j) {
          CHECK(got.ids[t * 2 + j] == (t < 2 ? want.ids[j] : -1));
          CHECK(got.local_ids[t * 2 + j] == got.ids[t * 2 + j]);
          if (t >= 2) CHECK(got.weights[t * 2 + j] == 0.0f);
        }
      }
    }
  }
}

TEST_CASE("Logits of the server's own gate that are not finite give NaN to their row alone") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const int experts : {6, 256, 5000}) {
    RouterCase c;
    c.experts = experts;
    c.top_k = 3;
    std::vector<float> logits = RandomLogits({c.rule, experts, experts}, 5, 8);
    logits[experts + 2] = kNan;
    logits[2 * experts + 1] = kInf;
    logits[3 * experts + 5] = -kInf;
    const Wanted want = RunHost(c, logits, {}, true);
    const Routed got = RunDevice(c, logits, {}, true);
    CHECK(got.error_row == INT32_MAX);
    CHECK(got.ids == want.ids);
    for (size_t i = 0; i < want.weights.size(); ++i) {
      const bool bad = i / 3 >= 1 && i / 3 <= 3;
      CHECK(std::isnan(got.weights[i]) == bad);
      if (!bad) CHECK(got.weights[i] == Approx(want.weights[i]).epsilon(WeightTolerance(c)));
    }
  }
}

TEST_CASE("Local ids are those of the experts that are held, -1 for all others") {
  if (!HaveGpu()) return Skip("no GPU");
  RouterCase c;
  c.experts = 60;
  c.top_k = 60;
  const std::vector<float> logits = RandomLogits(c, 3, 12);
  for (const Held held : {Held{0, 60}, Held{20, 15}, Held{59, 1}, Held{0, 0}}) {
    const Routed got = RunDevice(c, logits, {}, false, held);
    for (size_t i = 0; i < got.ids.size(); ++i) {
      const int local = got.ids[i] - held.first;
      REQUIRE(got.local_ids[i] == (local >= 0 && local < held.held ? local : -1));
    }
  }
}

TEST_CASE("Ids that were sent are mapped, their weights left alone, and the first row with an unknown one is named") {
  if (!HaveGpu()) return Skip("no GPU");
  const std::vector<int32_t> sent = {0, 9, -1, 3, 4, 5, 9, 2, 10, 0, -2, 7, INT32_MIN, INT32_MAX, 1};
  const std::vector<int32_t> local = {-1, -1, -1, 0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  for (const int rows : {0, 1, 2, 3, 4, 5}) {
    const std::vector<int32_t> used(sent.begin(), sent.begin() + rows * 3);
    DeviceArray<int32_t> ids(used), local_ids(used.size() + 6);
    const int32_t none = INT32_MAX;
    DeviceArray<int32_t> error_row(std::span<const int32_t>(&none, 1));
    RouterArgs args;
    args.rows = rows;
    args.experts = 10;
    args.top_k = 3;
    args.ids = ids.data();
    args.first_expert = 3;
    args.held = 4;
    args.local_ids = local_ids.data();
    args.error_row = error_row.data();
    DeviceArray<RouterArgs> device_args(std::span<const RouterArgs>(&args, 1));
    REQUIRE(LaunchRouter(device_args.data(), rows + 2, 10, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(local_ids.Read(used.size()) == std::vector<int32_t>(local.begin(), local.begin() + rows * 3));
    CHECK(ids.Read(used.size()) == used);
    CHECK(error_row.Read(1)[0] == (rows >= 3 ? 2 : INT32_MAX));
  }
}

}  // namespace
}  // namespace moed::cuda
