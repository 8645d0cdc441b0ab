// One forward of one ready layer: routing, routed experts, shared expert, in chunks; on the host's processors, or as a whole on an
// accelerator.
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
  Lane* lane = nullptr;     // for prepared layers of its accelerator; set where a call may need it, never owned
};

// One call of one prepared layer, with workspace from `scratch`, or on its lane where the layer is an accelerator's.
absl::Status RunPrepared(const PreparedMoe& moe, const MoeBatch& batch, MutableTensorView out, WorkerPool& pool, Scratch& scratch);

// Checks the shapes of a call against the layer: INVALID_ARGUMENT with the numbers.
absl::Status ValidateCall(const ModelConfig& config, const ForwardCall& call, const MutableTensorView& out);

// Whether no activation scale of the layer spans the rows of a call.
bool RowsStandAlone(const LoadedLayer& layer, bool with_shared = true);

// Waits until the first `rows` rows of the call's hidden states are there.
void WaitForRows(const ForwardCall& call, int64_t rows);

// Runs a validated call on the host's processors, parts on an accelerator by scratch.lane. All of its hidden states must be there.
// Every row is routed before anything is computed, so that a bad row leaves `out` unwritten.
absl::Status RunForward(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                        WorkerPool& pool, Scratch& scratch, ForwardInfo* info);

// The same for a layer that was assembled on an accelerator, on scratch.lane. Caller's logits are looked at there, chunk by chunk:
// one that cannot be routed fails the call with INVALID_ARGUMENT when earlier chunks of `out` may be written, which the caller must
// drop on any error.
absl::Status RunOnDevice(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                         WorkerPool& pool, Scratch& scratch, ForwardInfo* info);

}  // namespace moed

#endif  // MOED_ENGINE_FORWARD_H_
