// What the CPU benchmark runs: shapes, schemes, and which ceiling a case is compared with. Plain values and pure functions.
#ifndef MOED_BENCH_CASES_H_
#define MOED_BENCH_CASES_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/ceilings.h"
#include "kernels/moe_kernel.h"

namespace moed::bench {

constexpr int64_t kMaxTokens = int64_t{1} << 20;  // of a call

// A layer of a published model, but for its weights.
struct Shape {
  const char* name;  // "qwen3-30b"
  int experts, top_k;
  int64_t hidden, intermediate;
  Activation activation = {};
  bool biases = false;
};

struct NamedScheme {
  std::string name;  // "int4-g128", with int8 activations "int4-g128-a8"
  QuantScheme scheme;
};

// Every shape of a usual run; the first is the default.
std::span<const Shape> Shapes();
// Widths that are and are not a multiple of the tiles, for --pair-b03: 176, then 192.
std::span<const Shape> PairShapes();
// The schemes of published checkpoints, one of each kind of weights, and 4-bit weights with int8 activations.
std::vector<NamedScheme> Schemes();

// The layer of `shape` with `scheme`.
MoeDesc DescOf(const Shape& shape, const QuantScheme& scheme);

// The shapes of a run. `names` is "all", names with commas between, or empty: then the shapes whose name contains the text of
// `filter` before its first '/', if that is 3 characters or longer, else the default shape. INVALID_ARGUMENT with the known
// names for an unknown one.
absl::StatusOr<std::vector<Shape>> ChooseShapes(const std::string& names, const std::string& filter);

// What bounds a layer: up to two rows an expert reading the weights, above the arithmetic that `backend` (its name) uses for
// `scheme`.
Ceiling CeilingOf(const QuantScheme& scheme, std::string_view backend, double rows_per_expert);

}  // namespace moed::bench

#endif  // MOED_BENCH_CASES_H_
