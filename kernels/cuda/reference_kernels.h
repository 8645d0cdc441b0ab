// The reference's kernels on the device, in double precision: launchers as plain declarations. All pointers are the device's.
//
// A row of a result depends on its own inputs only, and each sum adds its terms in ascending order, whatever the other rows are.
// `routed` rows are those of SortedRows. Counts of rows stay below 2^31; nothing is launched for nothing to do.
#ifndef MOED_KERNELS_CUDA_REFERENCE_KERNELS_H_
#define MOED_KERNELS_CUDA_REFERENCE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/activation_kind.h"
#include "kernels/cuda/reference_rows.h"
#include "kernels/tensor.h"

namespace moed::cuda {

struct GatherArgs {
  const void* x = nullptr;           // [rows, cols] in dtype
  DType dtype = DType::kF32;
  const int32_t* sources = nullptr;  // [routed] rows of x
  const float* weights = nullptr;    // [routed] factors of the copies, or null
  double* copies = nullptr;          // [routed, cols]
  int64_t routed = 0;
  int64_t cols = 0;
};

// copies[r] = x[sources[r]] * weights[r].
cudaError_t LaunchGather(const GatherArgs& args, cudaStream_t stream);

struct ProductArgs {
  const RowTile* tiles = nullptr;  // [tile_count]
  int64_t tile_count = 0;
  const double* x = nullptr;       // [routed, inputs]
  const float* weights = nullptr;  // [E, outputs, inputs]
  const float* bias = nullptr;     // [E, outputs] or null
  double* y = nullptr;             // [routed, outputs], apart from x
  int64_t inputs = 0;
  int64_t outputs = 0;
};

// y[r] = W_e x[r] + b_e for the rows r of each tile, e its expert.
cudaError_t LaunchProduct(const ProductArgs& args, cudaStream_t stream);

// gate[i] = act(gate[i], up[i]) for count values.
cudaError_t LaunchActivate(const Activation& activation, double* gate, const double* up, int64_t count, cudaStream_t stream);

struct CombineArgs {
  const double* y = nullptr;           // [routed, cols]
  const int32_t* positions = nullptr;  // [rows, top_k]: rows of y, -1 for none
  const float* weights = nullptr;      // [rows, top_k], or null: 1
  int64_t rows = 0;
  int64_t cols = 0;
  int top_k = 1;
  void* out = nullptr;                 // [rows, cols] in dtype
  DType dtype = DType::kF32;
};

// out[t] = the sum over slots j, in their order, of weights[t, j] * y[positions[t, j]], in double; rounded to float32 and then to
// dtype.
cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_REFERENCE_KERNELS_H_
