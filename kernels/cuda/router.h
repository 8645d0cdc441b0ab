// The server's own gate and the router on the device: launchers as plain declarations.
//
// The kernels read everything from a RouterArgs in device memory, so that a captured launch serves any call whose rows fit the
// capacity that it was launched for. Row t of a result depends on row t of x only.
#ifndef MOED_KERNELS_CUDA_ROUTER_H_
#define MOED_KERNELS_CUDA_ROUTER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/router.h"
#include "kernels/tensor.h"

namespace moed::cuda {

// Pointers are the device's. E: experts of the model; M: rows.
struct RouterArgs {
  int32_t rows = 0;     // M
  int32_t experts = 0;  // E
  int32_t top_k = 0;    // 1 <= k <= E
  int64_t hidden = 0;   // H
  RouterRule rule;

  // The gate.
  const void* x = nullptr;  // [M, H] in x_dtype; aligned to 2 bytes. Fast where H is a multiple of 4 and x aligned to 4 elements
  DType x_dtype = DType::kBf16;
  const float* gate = nullptr;         // [E, H], best aligned to 16 bytes; null: `logits` were sent
  const float* gate_bias = nullptr;    // [E] or null
  const float* shared_gate = nullptr;  // [H], as gate, or null
  float* logits = nullptr;             // [M, E]: written by the gate, read by the router
  // [M], written by the gate: sigmoid(x . shared_gate), 1 when shared_gate is null. Null: not wanted.
  float* shared_factor = nullptr;

  // The router. `route` false: ids and weights were sent, only local_ids is made of them.
  bool route = false;
  bool own_gate = false;  // rows whose logits are not all finite get the lowest k ids and weights NaN; else they are an error
  const float* correction_bias = nullptr;  // [E] or null
  int32_t* ids = nullptr;                  // [M, k], of the model's experts
  float* weights = nullptr;                // [M, k]
  float* scratch = nullptr;                // [M, 2 E] floats that the router may use; not read when E <= 4096

  // Ids of the experts that are held here: id - first_expert, or -1 outside [0, held).
  int32_t first_expert = 0;
  int32_t held = 0;
  int32_t* local_ids = nullptr;  // [M, k]

  // The smallest row that cannot be routed or holds an id outside [-1, E); INT32_MAX when there is none. Set to that before the
  // launch; may lie in pinned memory of the host, which reads it when the stream is done. What such rows get is safe to work on: a
  // row that cannot be routed ids -1 and weights 0, an unknown id the local id -1.
  int32_t* error_row = nullptr;
};

// Logits (where gate is set) and shared factors (where wanted) of up to `capacity` rows, in float32: each sum in an order that
// depends on H only, so that a row gets the same bits at any capacity. `experts` is E, as in `args`. Rows past the capacity are
// left out.
cudaError_t LaunchGate(const RouterArgs* args, int32_t capacity, int32_t experts, cudaStream_t stream);

// Ids and weights by the rule (where `route` is set), the same for every row as moed::Route and RouteOwnGate (engine/routing.h) but
// for the last bits of exp and of sums; then local ids. For up to `capacity` rows. The rule, k and the correction bias must be such
// as Route takes; the bias is read only where the rule has one.
cudaError_t LaunchRouter(const RouterArgs* args, int32_t capacity, int32_t experts, cudaStream_t stream);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_ROUTER_H_
