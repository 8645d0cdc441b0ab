// The sizes of a call on the GPU: tiles, blocks of the sort, ranges of inputs, and which of them exist for a layer's weights.
#include "kernels/cuda/layer_plan.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/call_sizes.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"

namespace moed::cuda {
namespace {

using testing::Random;
using testing::Weights;

int64_t TilesOf(const std::vector<int64_t>& counts, int64_t tile_rows) {
  int64_t tiles = 0;
  for (int64_t count : counts) tiles += (count + tile_rows - 1) / tile_rows;
  return tiles;
}

}  // namespace

TEST_CASE("tile plan: a call never makes more tiles than its capacity, and the worst one makes as many") {
  Random random(1);
  for (int round = 0; round < 20000; ++round) {
    const int64_t experts = 1 + random.Below(round % 3 == 0 ? 300 : 9), slots = random.Below(round % 2 == 0 ? 20 : 3000);
    std::vector<int64_t> counts(static_cast<size_t>(experts), 0);
    // Some slots have no expert; some calls go to few experts.
    const int64_t reached = 1 + random.Below(experts), routed = slots - (round % 5 == 0 ? random.Below(slots + 1) : 0);
    for (int64_t slot = 0; slot < routed; ++slot) ++counts[static_cast<size_t>(random.Below(reached))];
    for (int tile_rows : kTileRowChoices) {
      const int64_t capacity = TileCapacity(slots, experts, tile_rows), made = TilesOf(counts, tile_rows);
      INFO(slots << " slots, " << experts << " experts, tiles of " << tile_rows);
      REQUIRE(made <= capacity);
    }
  }
  for (int64_t experts : {1, 2, 7, 256, 65535}) {
    for (int64_t slots : {1, 2, 7, 8, 9, 300, 8192, 70000}) {
      const int64_t reached = std::min(slots, experts);
      std::vector<int64_t> counts(static_cast<size_t>(reached), 1);
      counts[0] = slots - reached + 1;
      for (int tile_rows : kTileRowChoices) {
        CHECK(TilesOf(counts, tile_rows) == TileCapacity(slots, experts, tile_rows));
      }
    }
  }
  CHECK(TileCapacity(0, 5, 8) == 0);
}

TEST_CASE("tile plan: tiles hold what most experts of a random routing have, where such tiles exist") {
  for (bool terms : {false, true}) {
    const int32_t most = terms ? kMostTermRows : kTileRowChoices[std::size(kTileRowChoices) - 1];
    for (int64_t experts : {1, 2, 8, 60, 256, 65535}) {
      for (int64_t slots = 0; slots <= 200 * experts; slots += std::max<int64_t>(1, experts / 3)) {
        const int32_t rows = TileRowsFor(slots, experts, terms);
        REQUIRE(std::find(std::begin(kTileRowChoices), std::end(kTileRowChoices), rows) != std::end(kTileRowChoices));
        REQUIRE(rows <= most);
        const int64_t mean = slots == 0 ? 0 : slots / std::min(slots, experts);
        if (mean <= 40) REQUIRE((rows == most || rows >= mean));
        if (mean <= 4) REQUIRE(rows == kTileRowChoices[0]);
      }
    }
    CHECK(TileRowsFor(int64_t{1} << 30, 65535, terms) == most);
    CHECK(TileRowsFor(int64_t{1} << 30, 1, terms) == most);
  }
  // A smaller tile never needs less room in the list of tiles.
  for (int64_t experts : {1, 7, 65535}) {
    for (int64_t slots : {1, 8, 100, 100000}) {
      const int64_t most = TileCapacity(slots, experts, kTileRowChoices[0]);
      for (int tile_rows : kTileRowChoices) CHECK(TileCapacity(slots, experts, tile_rows) <= most);
      for (const HopperTile& tile : kHopperTiles) CHECK(TileCapacity(slots, experts, tile.rows) <= most);
    }
  }
}

constexpr WeightKinds kCodesOnly = {.codes = true}, kZerosToo = {.codes = true, .zeros = true}, kBf16Only = {.bf16 = true},
                      kBothKinds = {.codes = true, .bf16 = true};

TEST_CASE("tile plan: Hopper's tiles have sizes that exist for all kinds of weights of the layer") {
  for (int64_t experts : {1, 2, 8, 60, 256, 65535}) {
    for (int64_t slots = 1; slots <= 300 * experts; slots += std::max<int64_t>(1, experts / 3)) {
      for (const WeightKinds kinds : {kCodesOnly, kZerosToo, kBf16Only, kBothKinds}) {
        for (const bool words : {false, true}) {
          const HopperTileRows chosen = HopperTileRowsFor(slots, experts, kinds, words);
          if (words) REQUIRE((HopperHasWords(chosen.rows) && chosen.rests == 0));
          for (const int32_t rows : {chosen.rows, chosen.rests}) {
            if (rows == 0 && rows == chosen.rests) continue;
            const auto* tile = std::find_if(std::begin(kHopperTiles), std::end(kHopperTiles),
                                            [rows](const HopperTile& t) { return t.rows == rows; });
            REQUIRE(tile != std::end(kHopperTiles));
            if (kinds.codes) REQUIRE(tile->codes > 0);
            if (kinds.bf16) REQUIRE(tile->bf16 > 0);
            if (kinds.zeros) REQUIRE(tile->zeros);
          }
          if (chosen.rests == 0) continue;
          // The second list has room behind the first one.
          REQUIRE((slots > kFewSlots && 2 * chosen.rests <= chosen.rows));
          REQUIRE(TileCapacity(slots, experts, chosen.rows) + std::min(slots, experts) <=
                  TileCapacity(slots, experts, kTileRowChoices[0]));
        }
      }
    }
  }
}

TEST_CASE("tile plan: nearly all experts of a random routing fit Hopper's tile, until they are more than the widest holds") {
  for (int64_t mean : {12, 20, 32, 64, 100, 128}) {
    const int32_t rows = HopperTileRowsFor(mean * 64, 64, kBf16Only, false).rows;
    INFO(mean << " rows an expert: tiles of " << rows);
    CHECK(rows >= mean + static_cast<int64_t>(std::sqrt(static_cast<double>(mean))));
    CHECK(rows <= 2 * mean + 16);
  }
  for (const WeightKinds kinds : {kCodesOnly, kBf16Only}) CHECK(HopperTileRowsFor(2048 * 8, 8, kinds, false).rows >= 128);
}

TEST_CASE("tile plan: the sort has one block for few slots or very many experts, else blocks that read few counts each") {
  for (int64_t experts : {1, 8, 128, 256, 300, 4096, 4097, 65535}) {
    int32_t last = 1;
    for (int64_t slots : {0, 1, 2048, 2049, 16384, 65536, 1000000, 1 << 30}) {
      const int32_t blocks = SortBlocks(slots, experts);
      INFO(slots << " slots, " << experts << " experts: " << blocks << " blocks");
      CHECK((blocks >= last && blocks <= 128));
      if (slots <= 2048 || experts > kSharedExperts) CHECK(blocks == 1);
      if (slots > 2048 && experts <= kSharedExperts) CHECK((blocks > 1 && blocks * experts <= 16384));
      CHECK(SortScratch(slots, experts) >= std::max<int64_t>(2, blocks) * experts);
      last = blocks;
    }
  }
  CHECK(SortBlocks(65536, 128) == 64);
  CHECK(SortBlocks(16384, 256) == 16);
}

TEST_CASE("tile plan: tiles for few rows are for experts of up to 12 rows on average, more of codes, in the sizes that exist") {
  for (int64_t experts : {1, 2, 8, 60, 256, 65535}) {
    for (int64_t slots = 1; slots <= 30 * experts; slots += std::max<int64_t>(1, experts / 3)) {
      const int64_t reached = std::min(slots, experts);
      for (const WeightKinds kinds : {kCodesOnly, kZerosToo, kBf16Only, kBothKinds}) {
        const int32_t rows = FewRowsTileRowsFor(slots, experts, kinds);
        REQUIRE((rows == 0) == (slots > (kinds.many ? kMostFewRowsOfMany : kMostFewRows) * reached));
        if (rows == 0) continue;
        REQUIRE(std::count(std::begin(kFewRowsTileRowChoices), std::end(kFewRowsTileRowChoices), rows) == 1);
        REQUIRE((!kinds.bf16 || rows <= kMostFewRowsOfBf16Tile));
        if (slots <= 4 * reached) REQUIRE(rows == 8);
        if (!kinds.bf16 && slots > 8 * reached) REQUIRE(rows * reached > slots);
      }
    }
  }
}

TEST_CASE("tile plan: inputs are cut into ranges where thread blocks are few, as far as there are blocks of inputs") {
  PackedShape shape;
  for (int64_t tiles : {1, 2, 8, 64, 5000}) {
    for (int64_t row_tiles : {1, 3, 12, 32, 224}) {
      for (int64_t blocks : {1, 3, 4, 7, 8, 11, 45, 224}) {
        shape.row_tiles = row_tiles;
        shape.blocks = blocks;
        for (const auto& [expected, rows] : {std::pair<int64_t, int32_t>{tiles, 8}, {(tiles + 1) / 2, 16}, {tiles, 32}}) {
          const int64_t ranges = FewRowsRanges(tiles, expected, rows, shape), places = tiles * row_tiles;
          INFO(tiles << " tiles, " << row_tiles << " row tiles, " << blocks << " blocks");
          REQUIRE(ranges >= 1);
          if (places * rows <= kProcessors * 16 && blocks >= 8 * kFewestRangeBlocks) CHECK(ranges > 1);
          if (ranges == 1) continue;
          CHECK(places <= kFewRowsCounters);
          CHECK(places * ranges * std::max(rows, 16) <= kFewRowsBlocks * 16);
          CHECK(blocks / ranges >= kFewestRangeBlocks);
        }
      }
    }
  }
  CHECK(ExpectedTilesOf(2, 8, 8) == 2);
  CHECK(ExpectedTilesOf(16, 8, 8) == 7);  // two rows an expert on average leave one of eight without
  CHECK(ExpectedTilesOf(512, 8, 32) == 20);  // 64 rows are two tiles, and half of the experts have more
  // Mixtral's down, for one token: all thread blocks run at once.
  shape.row_tiles = 32, shape.blocks = 224;
  CHECK(FewRowsRanges(2, 2, 8, shape) * 64 <= 5 * kProcessors);
}

TEST_CASE("tile plan: products for few rows share a scale for as many steps as lie in a group, two blocks at most") {
  const auto shape_of = [](GroupShape group, bool zero_points, bool act_order, bool uneven) {
    WeightScheme scheme = Weights(ElementType::kInt4, ScaleType::kF16, group, zero_points);
    scheme.act_order = act_order;
    return ShapeOf(scheme, 256, 1024, false, false, uneven);
  };
  for (const auto& [cols, steps, many] : std::vector<std::tuple<int, int, bool>>{
           {0, 0, false}, {16, 1, true}, {24, 2, true}, {32, 2, true}, {64, 4, true}, {128, 8, false}, {192, 4, true},
           {256, 8, false}}) {
    INFO("groups of " << cols);
    const PackedShape shape = shape_of({1, cols}, false, false, false);
    CHECK(FewRowsSlotSteps(shape) == steps);
    CHECK(HasManyGroups(shape) == many);
  }
  // A zero point is not left to the sums; groups of any sizes may end after any step.
  CHECK(FewRowsSlotSteps(shape_of({1, 0}, true, false, false)) == 8);
  CHECK_FALSE(HasManyGroups(shape_of({1, 0}, true, false, false)));
  CHECK(FewRowsSlotSteps(shape_of({1, 128}, false, true, false)) == 8);
  CHECK(FewRowsSlotSteps(shape_of({1, 128}, false, true, true)) == 1);
  CHECK(HasManyGroups(shape_of({1, 128}, false, true, true)));
}

}  // namespace moed::cuda
