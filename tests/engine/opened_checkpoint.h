// A checkpoint of a test that was opened, and experts compared to the bit with what its builder knows.
//
// Pure functions, for one thread.
#ifndef MOED_TESTS_ENGINE_OPENED_CHECKPOINT_H_
#define MOED_TESTS_ENGINE_OPENED_CHECKPOINT_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/weights.h"
#include "tests/support/checkpoint_builder.h"

namespace moed::testing {

struct Opened {
  ModelConfig config;
  std::unique_ptr<Checkpoint> checkpoint;
};

// The config and the tensors of the folder `path`; the first error.
inline absl::StatusOr<Opened> Open(const std::string& path) {
  Opened opened;
  absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  return Opened{*std::move(config), *std::move(checkpoint)};
}

// Whether `weights` decode to `want`.
inline bool SameMatrix(const LinearWeights& weights, const std::vector<float>& want) {
  if (weights.rows * weights.cols != static_cast<int64_t>(want.size())) return false;
  std::vector<float> row(static_cast<size_t>(weights.cols));
  for (int64_t n = 0; n < weights.rows; ++n) {
    DequantizeRow(weights, n, row.data());
    if (std::memcmp(row.data(), want.data() + n * weights.cols, row.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

inline bool SameExpert(const ExpertWeights& got, const ExpertReference& want) {
  return SameMatrix(got.gate, want.gate) && SameMatrix(got.up, want.up) && SameMatrix(got.down, want.down) &&
         got.gate.bias == want.gate_bias && got.up.bias == want.up_bias && got.down.bias == want.down_bias;
}

}  // namespace moed::testing

#endif  // MOED_TESTS_ENGINE_OPENED_CHECKPOINT_H_
