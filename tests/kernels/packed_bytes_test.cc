// How much larger packed layers are than the same weights in a file.
#include <catch2/catch.hpp>

#include <cstdint>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/random_layer.h"

namespace moed {
namespace {

using testing::Int8;
using testing::Weights;

constexpr double kMostOfFile = 1.12;

// Codes, scales and packed zero points of [rows, cols], as every container stores them.
double FileBytes(const WeightScheme& scheme, int64_t rows, int64_t cols) {
  const int64_t group = scheme.group.cols == 0 ? cols : scheme.group.cols;
  const int64_t scale_rows = scheme.group.rows == 0 ? 1 : (rows + scheme.group.rows - 1) / scheme.group.rows;
  const double bits = ElementBits(scheme.element), groups = static_cast<double>(scale_rows * ((cols + group - 1) / group));
  return static_cast<double>(rows * cols) * bits / 8 + groups * (ScaleBytes(scheme.scale) + (scheme.zero_points ? bits / 8 : 0.0));
}

std::vector<WeightScheme> Schemes() {
  WeightScheme nvfp4 = Weights(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16});
  nvfp4.global_scale = GlobalScale::kMultiplier;
  std::vector<WeightScheme> all = {Weights(ElementType::kInt8, ScaleType::kBf16, {1, 0}),
                                   Weights(ElementType::kFp8E4m3, ScaleType::kF32, {128, 128}),
                                   Weights(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}),
                                   nvfp4,
                                   Weights(ElementType::kBf16, ScaleType::kNone, {1, 0})};
  for (int32_t group : {0, 32, 64, 128}) {
    for (bool zero_points : {false, true}) all.push_back(Weights(ElementType::kInt4, ScaleType::kF16, {1, group}, zero_points));
  }
  return all;
}

}  // namespace

TEST_CASE("A packed layer takes at most 1.12 times the bytes of its experts in a file, at the sizes of real models") {
  struct Size { int64_t hidden, intermediate; };
  for (const Size& size : {Size{2048, 768}, Size{2880, 2880}, Size{4096, 14336}, Size{7168, 2048}, Size{2048, 1408}, Size{1344, 704}}) {
    for (const WeightScheme& weights : Schemes()) {
      const MoeDesc desc = testing::MakeDesc(8, 2, size.hidden, size.intermediate, UniformScheme({weights, ActivationScheme()}));
      const double file = 8 * (2 * FileBytes(weights, size.intermediate, size.hidden) + FileBytes(weights, size.hidden, size.intermediate));
      for (const Backend* backend : cpu::CpuBackends()) {
        const double packed = static_cast<double>(backend->PreparedBytes(desc));
        INFO(backend->Name() << ": " << Describe(desc.scheme) << " H=" << size.hidden << " I=" << size.intermediate << ": " << packed
                             << " bytes of " << file);
        CHECK(packed >= 0.99 * file);
        CHECK(packed <= kMostOfFile * file);
      }
    }
  }
}

}  // namespace moed
