// Variants of a layer that the GPU benchmark times beside each other, and what their times by the base's come to. Plain values and
// pure functions; no CUDA.
#ifndef MOED_BENCH_GPU_VARIANTS_H_
#define MOED_BENCH_GPU_VARIANTS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu_cells.h"
#include "bench/report.h"
#include "kernels/moe_kernel.h"

namespace moed::bench {

// One change of a layer or of its calls.
struct Variant {
  const char* name;
  MoeDesc desc;
  bool equal_orders = true;  // act-order: gate and up of an expert have the same order
  bool batched = false;      // the rows come as batched experts
};

// Whether a layer has variants: symmetric integer weights in groups of 128 inputs, activations that are not quantized.
bool HasVariants(const MoeDesc& base);

// "base", "group-32", "act-order", "act-order-unequal", "asymmetric", "batched", "deterministic", of a layer that HasVariants.
std::vector<Variant> VariantsOf(const MoeDesc& base);

// Tokens from which on a variant's ratios count in its mean: 8 for act-order, which puts rows into another order, a launch or two
// that the shortest calls cannot hide.
int64_t FewestTokens(std::string_view variant);

// The cells of layers that have variants, of `shapes` and `tokens` as ChooseGpuCells; those of one layer follow each other. Layers
// that `recorded` does not have, as a file of peers lacks them, come from UsualGpuCells.
absl::StatusOr<std::vector<GpuCell>> VariantCells(const GpuCells& recorded, const std::vector<std::string>& shapes,
                                                  const std::vector<int64_t>& tokens);

// Of the rows of a scheme and variant with FewestTokens or more.
struct VariantMean {
  std::string scheme, variant;
  int cells = 0;
  double ratio = 0.0;  // geometric mean of the ratios to the base
  double worst = 0.0;  // the largest, and where it is
  std::string worst_shape;
  int64_t worst_tokens = 0;
};
// One for each scheme and variant but the base, in the order of the rows.
std::vector<VariantMean> VariantMeans(const std::vector<Row>& rows);

// Rows, and the means after them.
void PrintVariants(const std::vector<Row>& rows);

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_VARIANTS_H_
