#include "bench/gpu_orders.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/cuda/pack.h"

namespace moed::bench {

absl::StatusOr<OrderTables> RandomOrders(const cuda::PackedShape& shape, int64_t group, int experts, uint64_t seed) {
  const int64_t depth = shape.depth(), steps = shape.blocks * cuda::kSteps;
  OrderTables tables;
  tables.orders.resize(static_cast<size_t>(experts * depth));
  tables.step_groups.resize(static_cast<size_t>(experts * steps));
  std::mt19937_64 random(seed);
  std::vector<int32_t> quantized(static_cast<size_t>(shape.cols)), group_index(quantized.size());
  std::iota(quantized.begin(), quantized.end(), 0);
  for (int64_t expert = 0; expert < experts; ++expert) {
    std::shuffle(quantized.begin(), quantized.end(), random);
    for (int64_t at = 0; at < shape.cols; ++at) {
      group_index[static_cast<size_t>(quantized[static_cast<size_t>(at)])] = static_cast<int32_t>(at / group);
    }
    const absl::Status status = cuda::OrderByGroup(shape, group_index, tables.orders.data() + expert * depth,
                                                   tables.step_groups.data() + expert * steps);
    if (!status.ok()) return status;
  }
  return tables;
}

}  // namespace moed::bench
