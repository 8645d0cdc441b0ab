#include "bench/gpu_variants.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace moed::bench {
namespace {

constexpr const char* kBase = "base";

// `change` made to the weights of all three projections.
template <typename Change>
MoeDesc WithWeights(MoeDesc desc, const Change& change) {
  for (LinearScheme* linear : {&desc.scheme.gate, &desc.scheme.up, &desc.scheme.down}) change(&linear->weights);
  return desc;
}

MoeDesc Deterministic(MoeDesc desc) {
  desc.deterministic = true;
  return desc;
}

MoeDesc WithBatchedExperts(MoeDesc desc) {
  desc.max_tokens_per_expert = desc.max_tokens;
  return desc;
}

bool Groups128(const LinearScheme& linear) {
  constexpr GroupShape kGroup128 = {1, 128};
  const WeightScheme& weights = linear.weights;
  return IsInteger(weights.element) && weights.group == kGroup128 && !weights.zero_points && !weights.act_order &&
         linear.input.mode == ActivationMode::kNone;
}

std::vector<GpuCell> OfLayer(const std::vector<GpuCell>& cells, const std::string& shape, const std::string& scheme) {
  std::vector<GpuCell> found;
  std::copy_if(cells.begin(), cells.end(), std::back_inserter(found),
               [&](const GpuCell& cell) { return cell.shape == shape && cell.scheme == scheme; });
  return found;
}

}  // namespace

bool HasVariants(const MoeDesc& base) {
  return Groups128(base.scheme.gate) && Groups128(base.scheme.up) && Groups128(base.scheme.down);
}

std::vector<Variant> VariantsOf(const MoeDesc& base) {
  const MoeDesc ordered = WithWeights(base, [](WeightScheme* weights) { weights->act_order = true; });
  return {{kBase, base},
          {"group-32", WithWeights(base, [](WeightScheme* weights) { weights->group.cols = 32; })},
          {"act-order", ordered},
          {"act-order-unequal", ordered, false},
          {"asymmetric", WithWeights(base, [](WeightScheme* weights) { weights->zero_points = true; })},
          {"batched", WithBatchedExperts(base), true, true},
          {"deterministic", Deterministic(base)}};
}

int64_t FewestTokens(std::string_view variant) { return variant.starts_with("act-order") ? 8 : 1; }

absl::StatusOr<std::vector<GpuCell>> VariantCells(const GpuCells& recorded, const std::vector<std::string>& shapes,
                                                  const std::vector<int64_t>& tokens) {
  const absl::StatusOr<std::vector<GpuCell>> chosen = ChooseGpuCells(recorded, shapes, tokens);
  if (!chosen.ok()) return chosen.status();
  const absl::StatusOr<std::vector<GpuCell>> usual = ChooseGpuCells(UsualGpuCells(), shapes, tokens);
  if (!usual.ok()) return usual.status();
  std::vector<GpuCell> cells;
  for (const Shape& shape : GpuShapes()) {
    for (const char* scheme : GpuSchemes()) {
      const absl::StatusOr<MoeDesc> desc = GpuDescOf(shape.name, scheme);
      if (!desc.ok()) return desc.status();
      if (!HasVariants(*desc)) continue;
      const bool known = !OfLayer(recorded.cells, shape.name, scheme).empty();
      const std::vector<GpuCell> layer = OfLayer(known ? *chosen : *usual, shape.name, scheme);
      cells.insert(cells.end(), layer.begin(), layer.end());
    }
  }
  return cells;
}

std::vector<VariantMean> VariantMeans(const std::vector<Row>& rows) {
  std::vector<VariantMean> means;  // `ratio` holds the sum of logarithms until the end
  for (const Row& row : rows) {
    if (!row.base_ratio || row.variant == kBase || row.tokens < FewestTokens(row.variant)) continue;
    auto mean = std::find_if(means.begin(), means.end(), [&](const VariantMean& one) {
      return one.scheme == row.scheme && one.variant == row.variant;
    });
    if (mean == means.end()) mean = means.insert(means.end(), {row.scheme, row.variant});
    ++mean->cells;
    mean->ratio += std::log(*row.base_ratio);
    if (*row.base_ratio <= mean->worst) continue;
    mean->worst = *row.base_ratio;
    mean->worst_shape = row.shape;
    mean->worst_tokens = row.tokens;
  }
  for (VariantMean& mean : means) mean.ratio = std::exp(mean.ratio / mean.cells);
  return means;
}

void PrintVariants(const std::vector<Row>& rows) {
  std::printf("%-9s %-17s %-18s %-14s %6s %10s %10s\n", "shape", "scheme", "variant", "backend", "tokens", "ms", "by base's");
  for (const Row& row : rows) {
    std::printf("%-9s %-17s %-18s %-14s %6ld %10.4f %9.3fx\n", row.shape.c_str(), row.scheme.c_str(), row.variant.c_str(),
                row.backend.c_str(), static_cast<long>(row.tokens), row.ms, row.base_ratio.value_or(0.0));
  }
  std::printf("\n%-17s %-18s %6s %6s %10s %10s  %s\n", "scheme", "variant", "from M", "cells", "mean", "worst", "at");
  for (const VariantMean& mean : VariantMeans(rows)) {
    std::printf("%-17s %-18s %6ld %6d %9.3fx %9.3fx  %s, M=%ld\n", mean.scheme.c_str(), mean.variant.c_str(),
                static_cast<long>(FewestTokens(mean.variant)), mean.cells, mean.ratio, mean.worst, mean.worst_shape.c_str(),
                static_cast<long>(mean.worst_tokens));
  }
}

}  // namespace moed::bench
