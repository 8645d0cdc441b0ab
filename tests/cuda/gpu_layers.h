// What tests of the GPU's backends share: a lane with poisoned memory, the judge, and both activation formats on them.
// Failures fail the running test case.
#ifndef MOED_TESTS_CUDA_GPU_LAYERS_H_
#define MOED_TESTS_CUDA_GPU_LAYERS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/accelerator.h"
#include "kernels/moe_kernel.h"
#include "tests/support/random_layer.h"

namespace moed::testing {

// The process's GPU and one lane of it, for the whole program. Only where HaveGpu().
Accelerator& Gpu();
Lane& GpuLane();

// Fills GpuLane()'s, or another lane's, workspace of at least `bytes` with 0xFF: NaN everywhere, negative everywhere.
void PoisonLane(size_t bytes);
void PoisonLane(Lane& lane, size_t bytes);

// `batch` through `moe` on GpuLane() with poisoned workspace and output, as float32.
absl::StatusOr<std::vector<float>> RunOnGpu(const PreparedMoe& moe, const MoeBatch& batch, DType dtype);

// Whether `n` floats have the same bits, which tells NaN and the sign of zeros.
bool SameBits(const float* a, const float* b, int64_t n);

// `experts` on the judge.
std::unique_ptr<PreparedMoe> JudgeOf(const MoeDesc& desc, const ExpertReader& experts);

// One layer of random experts on a backend and on the judge.
class JudgedLayer {
 public:
  JudgedLayer(const MoeDesc& desc, uint64_t seed, const Backend& backend);

  // `rows` random rows in `dtype`, output in float32: the largest relative error of a row, which must be within `bound`.
  double Compare(int64_t rows, DType dtype, double bound, uint64_t seed) const;
  double CompareBatch(const MoeBatch& batch, double bound) const;
  // Rows [first, first + count) of `batch` by themselves must give the bits that they have in its company.
  void CompareParts(const MoeBatch& batch, const std::vector<std::pair<int64_t, int64_t>>& parts) const;

  const PreparedMoe& moe() const { return *moe_; }
  const PreparedMoe& judge() const { return *judge_; }
  RandomExperts& experts() { return experts_; }
  const MoeDesc& desc() const { return desc_; }

 private:
  const MoeDesc desc_;
  RandomExperts experts_;
  std::unique_ptr<PreparedMoe> moe_, judge_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_GPU_LAYERS_H_
