// Activation quantization of the reference on the device: launchers as plain declarations. All pointers are the device's.
//
// The same bits as QuantizeRow (kernels/activation_quant.h) gives for the row rounded to float32, for every scheme that CanQuantize
// accepts: the arithmetic is that of activation_quant_rules.h, in float32 with IEEE division and without fused operations.
#ifndef MOED_KERNELS_CUDA_REFERENCE_QUANTIZE_H_
#define MOED_KERNELS_CUDA_REFERENCE_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/quant.h"
#include "kernels/tensor.h"

namespace moed::cuda {

// *largest = the larger of *largest and the largest magnitude of values[count], rounded to float32; NaN where there is one, which
// stays. *largest starts as 0.
cudaError_t LaunchAbsMax(const double* values, int64_t count, float* largest, cudaStream_t stream);

// The same for hidden states of a call.
cudaError_t LaunchInputAbsMax(const void* values, DType dtype, int64_t count, float* largest, cudaStream_t stream);

struct QuantizeRowsArgs {
  ActivationScheme scheme;           // CanQuantize; the mode is not kNone
  const double* rows = nullptr;      // [count, cols]
  double* quantized = nullptr;       // [count, cols]: the values that the codes stand for; may be `rows`
  int64_t count = 0;                 // below 2^31
  int64_t cols = 0;
  const int32_t* experts = nullptr;  // [count]: whose row it is
  const float* stored = nullptr;     // [E]: each expert's own scale from the file
  const float* absmax = nullptr;     // of all rows of the request; read only when the scheme SpansRows
};

// One block a row.
cudaError_t LaunchQuantizeRows(const QuantizeRowsArgs& args, cudaStream_t stream);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_REFERENCE_QUANTIZE_H_
