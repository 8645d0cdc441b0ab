// Act-order of random weights: tables as packed layers hold them. Plain values and pure functions; no CUDA.
#ifndef MOED_BENCH_GPU_ORDERS_H_
#define MOED_BENCH_GPU_ORDERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/packed_layout.h"

namespace moed::bench {

// As cuda::OrderByGroup makes them of each expert.
struct OrderTables {
  std::vector<int32_t> orders;       // [experts][depth]
  std::vector<int32_t> step_groups;  // [experts][4 blocks]
};

// For `experts` matrices of `shape`, which has an order of each expert's own and groups of `group` inputs: as GPTQ leaves them that
// quantizes inputs in a random order, `group` by `group`. The same for the same seed. Errors as cuda::OrderByGroup.
absl::StatusOr<OrderTables> RandomOrders(const cuda::PackedShape& shape, int64_t group, int experts, uint64_t seed);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_ORDERS_H_
