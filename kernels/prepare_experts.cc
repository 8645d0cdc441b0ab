#include "kernels/prepare_experts.h"

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

absl::Status CheckProjection(const char* projection, int expert, const LinearWeights& weights, const WeightScheme& scheme,
                             int64_t rows, int64_t cols, bool bias) {
  if (weights.rows == rows && weights.cols == cols && weights.scheme == scheme &&
      static_cast<int64_t>(weights.bias.size()) == (bias ? rows : 0)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("expert ", expert, " ", projection, ": read [", weights.rows, ", ", weights.cols, "] ",
                                          Describe(weights.scheme), ", want [", rows, ", ", cols, "] ", Describe(scheme)));
}

int64_t ProjectionBytes(const WeightScheme& scheme, int64_t rows, int64_t cols, bool bias) {
  const int64_t row_bytes = (cols * ElementBits(scheme.element) + 7) / 8;
  const int64_t groups =
      IsUnquantized(scheme.element) ? 0 : GroupCount(rows, scheme.group.rows) * GroupCount(cols, scheme.group.cols);
  int64_t bytes = rows * row_bytes + groups * (ScaleBytes(scheme.scale) + (scheme.zero_points ? 1 : 0));
  if (scheme.act_order) bytes += cols * 4;
  if (bias) bytes += rows * 4;
  return bytes;
}

}  // namespace

absl::Status CheckExpert(const MoeDesc& desc, int expert, const ExpertWeights& weights) {
  const QuantScheme& scheme = desc.scheme;
  absl::Status status =
      CheckProjection("gate", expert, weights.gate, scheme.gate.weights, desc.intermediate, desc.hidden, desc.biases);
  if (status.ok()) {
    status = CheckProjection("up", expert, weights.up, scheme.up.weights, desc.intermediate, desc.hidden, desc.biases);
  }
  if (status.ok()) {
    status = CheckProjection("down", expert, weights.down, scheme.down.weights, desc.hidden, desc.intermediate, desc.biases);
  }
  return status;
}

size_t CanonicalExpertBytes(const MoeDesc& desc) {
  const QuantScheme& scheme = desc.scheme;
  return static_cast<size_t>(ProjectionBytes(scheme.gate.weights, desc.intermediate, desc.hidden, desc.biases) +
                             ProjectionBytes(scheme.up.weights, desc.intermediate, desc.hidden, desc.biases) +
                             ProjectionBytes(scheme.down.weights, desc.hidden, desc.intermediate, desc.biases));
}

}  // namespace moed
