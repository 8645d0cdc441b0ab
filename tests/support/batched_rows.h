// Calls in the batched-experts format, with every byte that a backend must leave alone marked.
#ifndef MOED_TESTS_SUPPORT_BATCHED_ROWS_H_
#define MOED_TESTS_SUPPORT_BATCHED_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe_kernel.h"
#include "tests/support/random_layer.h"

namespace moed::testing {

// Inputs of a RunBatched, owned. Rows at or beyond the counts are NaN. max_m is the description's.
struct BatchedRows {
  // Random rows, rounded to `dtype`.
  BatchedRows(const MoeDesc& desc, std::vector<int32_t> counts, DType dtype, uint64_t seed);
  // The rows of `batch` as a dispatcher places them: a copy for each slot, in the order of slots.
  BatchedRows(const MoeDesc& desc, const RandomBatch& batch);
  BatchedExperts view() const;
  int64_t counted() const;  // the sum of the counts

  int64_t hidden, max_m;
  DType dtype;
  std::vector<uint8_t> x;          // [E * max_m, H]
  std::vector<int32_t> counts;     // [E]
  std::vector<int64_t> slot_rows;  // of a dispatched batch, by slot: the row of BatchedOutput::y
};

struct BatchedOutput {
  std::vector<float> y;  // [counted, H]: the counted rows, by expert
  bool intact = false;   // the rows at or beyond the counts, and what lies around output and workspace, are as they were
};

// Runs a prepared layer with an exact workspace full of NaN and an output of `dtype` full of a pattern.
// `lane`: of layers on an accelerator, whose workspace it then is.
absl::StatusOr<BatchedOutput> RunBatchedLayer(const PreparedMoe& moe, const BatchedRows& rows, DType dtype, WorkerPool& pool,
                                              Lane* lane = nullptr);

// What a dispatcher makes of the results: [rows, H] of `batch`, slots in order, by fused multiply-adds. With `weighted` false the
// results are added as they are.
std::vector<float> CombineByHand(const RandomBatch& batch, const BatchedRows& rows, const BatchedOutput& output, bool weighted = true);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_BATCHED_ROWS_H_
