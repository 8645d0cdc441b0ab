// Random layers in canonical form, and random batches for them: what kernel tests and benchmarks run on.
#ifndef MOED_TESTS_SUPPORT_RANDOM_LAYER_H_
#define MOED_TESTS_SUPPORT_RANDOM_LAYER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe_kernel.h"

namespace moed::testing {

// A fast, seeded generator; the same seed gives the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t Next();
  float Uniform();                          // [-1, 1)
  int64_t Below(int64_t n) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// Weight schemes by name, for tests: int4 symmetric with a scale type and group (0: channel), or an unquantized element.
QuantScheme Int4Scheme(int32_t group, ScaleType scale);
QuantScheme PlainScheme(ElementType element);

// A description with silu and top_k = 2 unless changed afterwards.
MoeDesc MakeDesc(int experts, int top_k, int64_t hidden, int64_t intermediate, const QuantScheme& scheme);

// Experts in memory. Scales differ between groups, experts and projections; weights have magnitude about 1 / sqrt(K), so
// that outputs stay of order 1.
class RandomExperts : public ExpertReader {
 public:
  RandomExperts(const MoeDesc& desc, uint64_t seed);
  absl::Status Read(int expert, ExpertWeights* out) const override;
  std::vector<ExpertWeights>& experts() { return experts_; }

 private:
  std::vector<ExpertWeights> experts_;
};

// Inputs of a call, owned. Rows are float32 rounded to `dtype`, ids are distinct per row.
struct RandomBatch {
  RandomBatch(const MoeDesc& desc, int64_t rows, int top_k, DType dtype, uint64_t seed);
  MoeBatch view() const;

  int64_t rows, hidden;
  int top_k;
  DType dtype;
  std::vector<uint8_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// Runs a prepared layer with a poisoned workspace (0xFF bytes: NaN everywhere) and a poisoned output of `dtype`, and
// returns the output as float32.
absl::StatusOr<std::vector<float>> RunLayer(const PreparedMoe& moe, const MoeBatch& batch, DType dtype, WorkerPool& pool);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_RANDOM_LAYER_H_
