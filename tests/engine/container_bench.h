// What the tests of containers share: a declaration for each format of the checkpoint builder, and a checkpoint of single
// projections that are found and read one by one.
#ifndef MOED_TESTS_ENGINE_CONTAINER_BENCH_H_
#define MOED_TESTS_ENGINE_CONTAINER_BENCH_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/container.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

using Kind = DeclaredScheme::Container;

// A declaration as a config would give it.
inline DeclaredScheme Declared(Kind kind, ElementType element, ScaleType scale, GroupShape group) {
  DeclaredScheme declared;
  declared.container = kind;
  declared.linear.weights.element = element;
  declared.linear.weights.scale = scale;
  declared.linear.weights.group = group;
  return declared;
}

inline Kind KindOf(ExpertFormat format) {
  switch (format) {
    case ExpertFormat::kGptq: return Kind::kGptq;
    case ExpertFormat::kPacked: return Kind::kPacked;
    case ExpertFormat::kAwq: return Kind::kAwq;
    case ExpertFormat::kInt8: return Kind::kInt8;
    case ExpertFormat::kFp8:
    case ExpertFormat::kMxfp8: return Kind::kFp8;
    case ExpertFormat::kMxfp4:
    case ExpertFormat::kMxfp4Packed:
    case ExpertFormat::kMxfp4Short:
    case ExpertFormat::kNvfp4:
    case ExpertFormat::kNvfp4Packed: return Kind::kFp4;
    case ExpertFormat::kQuarkInt4: return Kind::kTransposedInt4;
    case ExpertFormat::kQuarkTwoStage: return Kind::kTwoStageInt4;
    default: return Kind::kPlain;
  }
}

inline DeclaredScheme DeclaredFor(const ExpertSpec& spec) {
  const Kind kind = KindOf(spec.format);
  DeclaredScheme declared = Declared(kind, spec.bits == 8 ? ElementType::kInt8 : ElementType::kInt4, ScaleType::kF32, {});
  WeightScheme& weights = declared.linear.weights;
  weights.group = spec.per_tensor ? GroupShape{0, 0} : GroupShape{std::max(spec.block_rows, 1), std::max(spec.group, 0)};
  weights.zero_points = spec.asymmetric || spec.format == ExpertFormat::kAwq;
  if (kind == Kind::kFp8) weights.element = ElementType::kFp8E4m3;
  if (kind == Kind::kFp4) weights.element = ElementType::kFp4E2m1;
  const bool nvfp4 = spec.format == ExpertFormat::kNvfp4 || spec.format == ExpertFormat::kNvfp4Packed;
  if (nvfp4) weights.group = {1, 16};
  if (nvfp4) weights.scale = ScaleType::kE4m3;
  if (spec.format == ExpertFormat::kNvfp4) weights.global_scale = GlobalScale::kMultiplier;
  if (spec.format == ExpertFormat::kNvfp4Packed) weights.global_scale = GlobalScale::kDivisor;
  if (spec.format == ExpertFormat::kMxfp8 || (kind == Kind::kFp4 && !nvfp4)) {
    weights.group = {1, 32};
    weights.scale = ScaleType::kE8m0;
  }
  declared.gptq_v2 = spec.gptq_v2;
  declared.awq_order = spec.awq_order;
  declared.twos_complement = spec.twos_complement || spec.format == ExpertFormat::kQuarkTwoStage;
  return declared;
}

// A checkpoint of single projections, found and read one by one.
class Bench {
 public:
  CheckpointBuilder builder;

  absl::Status Open() {
    absl::Status status = builder.Write(dir_.path());
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(dir_.path());
    if (!checkpoint.ok()) return checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
    return absl::OkStatus();
  }

  absl::StatusOr<LinearSource> Find(const DeclaredScheme& declared, const std::string& module, int64_t rows, int64_t cols) {
    used.clear();
    TensorFinder finder(*checkpoint_, &used);
    absl::StatusOr<LinearSource> source = FindLinear(finder, declared, module, rows, cols, false, &note);
    missing = finder.missing();
    return source;
  }

  // Finds and reads; the first error, a missing tensor being one.
  absl::StatusOr<LinearWeights> Read(const DeclaredScheme& declared, const std::string& module, int64_t rows, int64_t cols) {
    const absl::StatusOr<LinearSource> source = Find(declared, module, rows, cols);
    if (!source.ok()) return source.status();
    if (!missing.empty()) return absl::NotFoundError("missing: " + missing.front());
    LinearWeights weights;
    absl::Status status = ReadLinear(*source, &weights);
    if (!status.ok()) return status;
    return weights;
  }

  std::vector<const TensorInfo*> used;
  std::vector<std::string> missing;
  std::string note;

 private:
  TempDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

inline std::vector<float> Values(const LinearWeights& weights) {
  std::vector<float> values(static_cast<size_t>(weights.rows * weights.cols));
  for (int64_t n = 0; n < weights.rows; ++n) DequantizeRow(weights, n, values.data() + n * weights.cols);
  return values;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Weights whose magnitude differs from row to row and along K, so that no two scales agree by chance.
inline std::function<float(int64_t)> Weights(uint32_t stream, int64_t cols) {
  return [stream, cols](int64_t i) {
    const double size = 1.0 + 0.37 * static_cast<double>((i / cols) % 11) + 0.11 * static_cast<double>(i % cols / 16);
    return static_cast<float>(R(stream, static_cast<uint64_t>(i)) * size);
  };
}

inline void AddScalar(CheckpointBuilder& b, const std::string& name, float value, const std::vector<int64_t>& shape = {}) {
  b.AddFloats(name, StDtype::kF32, shape, std::span(&value, 1));
}

}  // namespace moed::testing

#endif  // MOED_TESTS_ENGINE_CONTAINER_BENCH_H_
