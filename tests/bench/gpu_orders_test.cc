// Act-order tables of random weights: permutations that a packed layer may hold.
#include <catch2/catch.hpp>

#include <algorithm>
#include <numeric>

#include "bench/gpu_orders.h"

namespace moed::bench {
namespace {

constexpr int kExperts = 3, kGroup = 128;

cuda::PackedShape ShapeOf(int64_t cols) {
  WeightScheme scheme;
  scheme.element = ElementType::kInt4;
  scheme.scale = ScaleType::kBf16;
  scheme.group = {1, kGroup};
  scheme.act_order = true;
  return cuda::ShapeOf(scheme, 256, cols, false, false, false);
}

}  // namespace

TEST_CASE("every expert has a random permutation of its own whose groups are full and ascending, also with a last short group") {
  for (const int64_t cols : {512, 448}) {
    const cuda::PackedShape shape = ShapeOf(cols);
    REQUIRE(shape.own_order);
    const OrderTables tables = RandomOrders(shape, kGroup, kExperts, 7).value();
    REQUIRE(tables.orders.size() == static_cast<size_t>(kExperts * shape.depth()));
    REQUIRE(tables.step_groups.size() == static_cast<size_t>(kExperts * shape.blocks * cuda::kSteps));
    std::vector<int32_t> identity(static_cast<size_t>(cols));
    std::iota(identity.begin(), identity.end(), 0);
    std::vector<std::vector<int32_t>> seen;
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      INFO(cols << " inputs, expert " << expert);
      const int32_t* const order = tables.orders.data() + expert * shape.depth();
      const int32_t* const groups = tables.step_groups.data() + expert * shape.blocks * cuda::kSteps;
      for (int64_t at = 0; at < cols; ++at) {
        CHECK(groups[at / cuda::kStepDepth] == at / kGroup);
        if (at % kGroup > 0) CHECK(order[at - 1] < order[at]);
      }
      CHECK(std::all_of(order + cols, order + shape.depth(), [](int32_t input) { return input == -1; }));
      std::vector<int32_t> inputs(order, order + cols);
      CHECK(inputs != identity);
      CHECK(std::count(seen.begin(), seen.end(), inputs) == 0);
      seen.push_back(inputs);
      std::sort(inputs.begin(), inputs.end());
      CHECK(inputs == identity);
    }
  }
}

TEST_CASE("orders follow from the seed") {
  const cuda::PackedShape shape = ShapeOf(512);
  CHECK(RandomOrders(shape, kGroup, kExperts, 7)->orders == RandomOrders(shape, kGroup, kExperts, 7)->orders);
  CHECK(RandomOrders(shape, kGroup, kExperts, 7)->orders != RandomOrders(shape, kGroup, kExperts, 8)->orders);
}

}  // namespace moed::bench
