// One forward of one ready layer: routing, routed experts, shared expert, in chunks.
#ifndef MOED_ENGINE_FORWARD_H_
#define MOED_ENGINE_FORWARD_H_

#include <vector>

#include "engine/model.h"
#include "kernels/aligned_buffer.h"

namespace moed {

// Memory that calls reuse; owned by whoever serialises them. Grows to what the largest chunk needs, never with M.
struct Scratch {
  std::vector<float> logits;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<int32_t> local_ids;  // ids among the experts that are held, -1 for the others
  std::vector<float> routed;  // float32 sums of a chunk when a shared expert is added
  std::vector<float> shared;
  std::vector<float> factors;  // of the shared expert's rows
  AlignedBuffer workspace;  // in huge pages where it is large: rows of results lie far apart
};

// One call of one prepared layer, with workspace from `scratch`.
absl::Status RunPrepared(const PreparedMoe& moe, const MoeBatch& batch, MutableTensorView out, WorkerPool& pool, Scratch& scratch);

// Checks the shapes of a call against the layer: INVALID_ARGUMENT with the numbers.
absl::Status ValidateCall(const ModelConfig& config, const ForwardCall& call, const MutableTensorView& out);

// Runs a validated call. Every row is routed before anything is computed, so that a bad row leaves `out` unwritten.
absl::Status RunForward(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                        WorkerPool& pool, Scratch& scratch, ForwardInfo* info);

}  // namespace moed

#endif  // MOED_ENGINE_FORWARD_H_
