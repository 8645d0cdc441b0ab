// The server's own gates: router logits and the shared expert's factor from hidden states, in float32.
#ifndef MOED_ENGINE_GATE_H_
#define MOED_ENGINE_GATE_H_

#include <span>

#include "engine/weights.h"
#include "kernels/tensor.h"
#include "kernels/worker_pool.h"

namespace moed {

// logits[M, E] = x[M, H] W[E, H]^T + bias. Each logit is summed in an order that depends on H only, so a row's logits do not
// depend on the other rows. NaN and Inf go through.
void ComputeLogits(const GateWeights& gate, const TensorView& x, WorkerPool& pool, std::span<float> logits);

// factors[M] = sigmoid(x[M, H] . gate.shared_gate[H]): what the shared expert's output of each row is multiplied by.
// Depends on that row only, as the logits do; a row with NaN gets NaN.
void ComputeSharedFactors(const GateWeights& gate, const TensorView& x, WorkerPool& pool, std::span<float> factors);

}  // namespace moed

#endif  // MOED_ENGINE_GATE_H_
