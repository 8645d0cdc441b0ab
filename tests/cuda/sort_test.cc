// The token sort on the device against a sort on the host. Without a GPU every case is skipped.
#include <catch2/catch.hpp>

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/layer_plan.h"
#include "tests/cuda/router_device.h"
#include "tests/support/skip.h"

namespace moed::cuda {
namespace {

using namespace moed::testing;

// A call: by `ids`, by `counts`, or with all rows on expert 0.
struct SortCall {
  int32_t experts = 1;
  int32_t rows = 0;
  int32_t top_k = 1;
  int32_t tile_rows = 64, rest_rows = 0;
  std::vector<int32_t> ids, counts;
  int32_t max_m = 0;
  bool all_to_one = false;

  SortBy by() const { return !counts.empty() ? SortBy::kCounts : all_to_one ? SortBy::kOne : SortBy::kIds; }
  size_t slots() const { return by() == SortBy::kIds ? ids.size() : by() == SortBy::kOne ? rows : sorted_rows(); }
  size_t sorted_rows() const {
    if (by() == SortBy::kOne) return static_cast<size_t>(rows);
    if (by() == SortBy::kCounts) return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), 0));
    return static_cast<size_t>(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; }));
  }
};

struct Sorted {
  std::vector<int32_t> source, slot, expert, rank, position, totals;
  std::vector<Tile> tiles, rests;
  std::vector<uint32_t> absmax;
};

// Arrays for calls of up to `slots` slots, which may follow each other.
class SortSpace {
 public:
  SortSpace(int64_t slots, int32_t experts)
      : slots_(slots),
        count_(static_cast<size_t>(SortScratch(slots, experts))),
        source_(static_cast<size_t>(slots)),
        slot_(static_cast<size_t>(slots)),
        expert_(static_cast<size_t>(slots)),
        rank_(static_cast<size_t>(slots)),
        position_(static_cast<size_t>(slots)),
        tile_places_(static_cast<size_t>(TileCapacity(slots, experts, kTileRowChoices[0]) + std::min<int64_t>(slots, experts))),
        tiles_(tile_places_) {}

  // `fresh`: the first call here, which must leave alone what lies behind its own rows.
  Sorted Run(const SortCall& call, bool fresh = true) {
    DeviceArray<int32_t> ids(call.ids), counts(call.counts);
    SortArgs args;
    args.rows = call.rows;
    args.top_k = call.top_k;
    args.experts = call.experts;
    args.tile_rows = call.tile_rows;
    args.rest_rows = call.rest_rows;
    args.rest_first = static_cast<int32_t>(TileCapacity(slots_, call.experts, call.tile_rows));
    if (call.by() == SortBy::kIds) args.ids = ids.data();
    if (call.by() == SortBy::kCounts) args.counts = counts.data(), args.max_m = call.max_m;
    args.count = count_.data();
    args.source = source_.data();
    args.slot = slot_.data();
    args.expert = expert_.data();
    args.rank = rank_.data();
    args.position = position_.data();
    args.tiles = tiles_.data();
    args.totals = totals_.data();
    args.absmax = absmax_.data();
    DeviceArray<SortArgs> device_args(std::span<const SortArgs>(&args, 1));
    const SortLaunch launch = {call.experts, static_cast<int32_t>(slots_), SortBlocks(slots_, call.experts), call.by()};
    REQUIRE(LaunchSort(launch, device_args.data(), nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    if (fresh) count_.Read(static_cast<size_t>(SortScratch(slots_, call.experts)));
    const auto read = [&](const auto& array, size_t used) {
      auto values = array.Read(fresh ? used : static_cast<size_t>(slots_));
      values.resize(used);
      return values;
    };
    const size_t rows = call.sorted_rows();
    Sorted sorted = {read(source_, rows),
                     read(slot_, rows),
                     read(expert_, rows),
                     read(rank_, rows),
                     read(position_, call.by() == SortBy::kCounts ? 0 : call.slots()),
                     totals_.Read(call.rest_rows > 0 ? 3 : 2),
                     {},
                     {},
                     absmax_.Read(2)};
    REQUIRE((sorted.totals[1] >= 0 && sorted.totals[1] <= TileCapacity(slots_, call.experts, call.tile_rows)));
    const size_t made = static_cast<size_t>(sorted.totals[1]);
    if (call.rest_rows > 0) {
      sorted.tiles = tiles_.Read(tile_places_);
      const auto first = sorted.tiles.begin() + args.rest_first;
      sorted.rests.assign(first, first + sorted.totals[2]);
    } else {
      sorted.tiles = tiles_.Read(fresh ? made : static_cast<size_t>(TileCapacity(slots_, call.experts, kTileRowChoices[0])));
    }
    sorted.tiles.resize(made);
    return sorted;
  }

 private:
  const int64_t slots_;
  DeviceArray<int32_t> count_, source_, slot_, expert_, rank_, position_;
  const size_t tile_places_;
  DeviceArray<Tile> tiles_;
  DeviceArray<int32_t> totals_{3};
  DeviceArray<uint32_t> absmax_{2};
};

// Slots, or rows of batched experts, of each expert in ascending order.
std::vector<std::vector<int32_t>> HostSort(const SortCall& call) {
  std::vector<std::vector<int32_t>> slots(static_cast<size_t>(call.experts));
  for (size_t e = 0; e < call.counts.size(); ++e) {
    for (int32_t r = 0; r < call.counts[e]; ++r) slots[e].push_back(static_cast<int32_t>(e) * call.max_m + r);
  }
  for (size_t i = 0; i < call.ids.size(); ++i) {
    if (call.ids[i] >= 0) slots[static_cast<size_t>(call.ids[i])].push_back(static_cast<int32_t>(i));
  }
  for (int32_t row = 0; call.by() == SortBy::kOne && row < call.rows; ++row) slots[0].push_back(row);
  return slots;
}

void CheckTiles(const SortCall& call, const std::vector<std::vector<int32_t>>& want, const Sorted& got) {
  std::vector<Tile> tiles, rests;
  int32_t begin = 0;
  for (size_t e = 0; e < want.size(); ++e) {
    const int32_t rows = static_cast<int32_t>(want[e].size());
    for (int32_t at = 0; at < rows; at += call.tile_rows) {
      auto& list = rows - at <= call.rest_rows ? rests : tiles;
      list.push_back({static_cast<int32_t>(e), begin + at, std::min(call.tile_rows, rows - at), 0});
    }
    begin += rows;
  }
  std::vector<int32_t> totals = {begin, static_cast<int32_t>(tiles.size())};
  if (call.rest_rows > 0) totals.push_back(static_cast<int32_t>(rests.size()));
  CHECK(got.totals == totals);
  const auto same = [](const Tile& a, const Tile& b) { return a.expert == b.expert && a.begin == b.begin && a.count == b.count; };
  CHECK(std::equal(tiles.begin(), tiles.end(), got.tiles.begin(), got.tiles.end(), same));
  CHECK(std::equal(rests.begin(), rests.end(), got.rests.begin(), got.rests.end(), same));
}

// The order within an expert is free; everything else has one right answer, or follows from the order.
void Check(const SortCall& call, const Sorted& got) {
  const std::vector<std::vector<int32_t>> want = HostSort(call);
  CheckTiles(call, want, got);
  CHECK(got.absmax == std::vector<uint32_t>{0, 0});
  std::vector<int32_t> experts, ranks, slots, got_slots = got.slot;
  for (size_t e = 0; e < want.size(); ++e) {
    const auto first = got_slots.begin() + static_cast<std::ptrdiff_t>(slots.size());
    std::sort(first, first + static_cast<std::ptrdiff_t>(want[e].size()));
    experts.insert(experts.end(), want[e].size(), static_cast<int32_t>(e));
    slots.insert(slots.end(), want[e].begin(), want[e].end());
    for (size_t r = 0; r < want[e].size(); ++r) ranks.push_back(static_cast<int32_t>(r));
  }
  REQUIRE(got.slot.size() == slots.size());
  CHECK(got_slots == slots);
  CHECK(got.expert == experts);
  CHECK(got.rank == ranks);
  std::vector<int32_t> sources, positions(got.position.size(), -1);
  for (size_t at = 0; at < got.slot.size(); ++at) {
    sources.push_back(call.by() == SortBy::kIds ? got.slot[at] / call.top_k : got.slot[at]);
    if (!positions.empty()) positions.at(static_cast<size_t>(got.slot[at])) = static_cast<int32_t>(at);
  }
  CHECK(got.source == sources);
  CHECK(got.position == positions);
}

// `none` of 100 slots have no expert; the others go to `reached` experts, which lie apart.
SortCall RandomCall(int32_t rows, int32_t top_k, int32_t experts, int32_t reached, int none, uint32_t seed) {
  SortCall call;
  call.experts = experts;
  call.rows = rows;
  call.top_k = top_k;
  std::mt19937 random(seed);
  for (int64_t slot = 0; slot < int64_t{rows} * top_k; ++slot) {
    const bool absent = static_cast<int>(random() % 100) < none;
    const int64_t expert = random() % static_cast<uint32_t>(reached);
    call.ids.push_back(absent ? -1 : static_cast<int32_t>((expert + 1) * experts / reached - 1));
  }
  return call;
}

void RunAndCheck(const SortCall& call, int64_t capacity) {
  INFO(call.rows << " rows, top-" << call.top_k << ", " << call.experts << " experts, room for " << capacity << " slots");
  Check(call, SortSpace(capacity, call.experts).Run(call));
}

TEST_CASE("sort: 65536 slots on one expert, on 8, on all of 300 and of 9000, with and without -1") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 0;
  for (const int32_t experts : {128, 300, 9000}) {
    for (const int32_t reached : {1, 8, experts}) {
      for (const int none : {0, 30}) RunAndCheck(RandomCall(8192, 8, experts, reached, none, ++seed), 65536);
    }
  }
}

TEST_CASE("sort: calls of every size, around the borders between the shapes of the sort") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 100;
  for (const int32_t slots : {1, 2, 8, 31, 32, 33, 64, 127, 128, 129, 256, 1000, 1024, 1025, 2048, 2049, 3071, 5000, 16384}) {
    for (const int32_t experts : {1, 2, 60, 256, 1024, 1025, kSharedExperts, kSharedExperts + 1}) {
      ++seed;
      SortCall call = RandomCall(slots, 1, experts, std::min(experts, 200), static_cast<int>(seed % 3) * 20, seed);
      call.tile_rows = kTileRowChoices[seed % std::size(kTileRowChoices)];
      RunAndCheck(call, slots);
    }
  }
}

TEST_CASE("sort: what an expert has beyond whole tiles is a tile of the second list where that is short enough") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 50;
  for (const int32_t slots : {129, 2048, 2049, 16384, 65536}) {
    for (const int32_t experts : {1, 8, 128, 1025, kSharedExperts + 1}) {
      for (const int32_t rest_rows : {32, 112}) {
        SortCall call = RandomCall(slots, 1, experts, std::min(experts, 60), 10, ++seed);
        call.tile_rows = 256;
        call.rest_rows = rest_rows;
        RunAndCheck(call, slots);
      }
    }
  }
  SortCall call;
  call.experts = 5;
  call.counts = {256, 257, 0, 288, 289};  // one more than a tile, as many as a rest has, one more
  call.max_m = 300;
  call.rows = 5 * call.max_m;
  call.tile_rows = 256;
  call.rest_rows = 32;
  Check(call, SortSpace(static_cast<int64_t>(call.slots()), call.experts).Run(call));
}

TEST_CASE("sort: a call without any expert has no rows and no tiles") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const int32_t rows : {1, 16, 17, 256, 1024}) RunAndCheck(RandomCall(rows, 8, 64, 64, 100, 1), rows * 8);
}

TEST_CASE("sort: launches with more room than the call has rows, also none at all") {
  if (!HaveGpu()) return Skip("no GPU");
  uint32_t seed = 200;
  for (const int64_t capacity : {128, 129, 2048, 8192, 65536}) {
    for (const int32_t rows : {0, 1, 7, 100, 2000, 8000}) {
      if (rows * 3 <= capacity) RunAndCheck(RandomCall(rows, 3, 300, 200, 10, ++seed), capacity);
      SortCall one;
      one.rows = rows;
      one.all_to_one = true;
      if (rows <= capacity) RunAndCheck(one, capacity);
    }
  }
}

TEST_CASE("sort: without ids every row goes to expert 0, whatever the number of experts") {
  if (!HaveGpu()) return Skip("no GPU");
  for (const int32_t experts : {1, 5, 9000}) {
    for (const int32_t rows : {1, 128, 129, 2048, 30000}) {
      SortCall call;
      call.rows = rows;
      call.experts = experts;
      call.all_to_one = true;
      RunAndCheck(call, rows);
    }
  }
}

TEST_CASE("sort: batched experts keep the rows that their counts tell, in order") {
  if (!HaveGpu()) return Skip("no GPU");
  std::mt19937 random(5);
  for (const int32_t experts : {1, 3, 256, 1500, 9000}) {
    for (const int32_t most : {1, 3, 40, 5000}) {
      SortCall call;
      call.experts = experts;
      call.max_m = most + 2;
      call.rows = experts * call.max_m;
      for (int32_t e = 0; e < experts; ++e) {
        const bool large = most < 1000 || e % 700 == 1;  // a few experts with all of their rows, which many blocks share
        call.counts.push_back(large ? static_cast<int32_t>(random() % static_cast<uint32_t>(most + 1)) : 0);
      }
      call.counts.back() = most;
      const Sorted got = SortSpace(static_cast<int64_t>(call.slots()), experts).Run(call);
      INFO(experts << " experts of up to " << most << " rows");
      Check(call, got);
      CHECK(std::is_sorted(got.slot.begin(), got.slot.end()));
    }
  }
}

TEST_CASE("sort: calls of other sizes and other numbers of experts follow each other in one workspace") {
  if (!HaveGpu()) return Skip("no GPU");
  SortSpace space(16384, 300);
  uint32_t seed = 300;
  for (int round = 0; round < 3; ++round) {
    for (const int32_t rows : {2048, 1, 700, 2048, 16, 0, 1999}) {
      for (const int32_t experts : {300, 7, 128}) {
        const SortCall call = RandomCall(rows, 8, experts, experts, 5 * round, ++seed);
        INFO("round " << round << ", " << rows << " rows, " << experts << " experts");
        Check(call, space.Run(call, false));
      }
    }
    SortCall one;
    one.rows = 5000;
    one.all_to_one = true;
    Check(one, space.Run(one, false));
  }
}

}  // namespace
}  // namespace moed::cuda
