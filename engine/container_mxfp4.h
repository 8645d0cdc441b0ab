// The MXFP4 form of gpt-oss: the experts of a whole layer in six tensors.
//
//   gate_up_proj_blocks U8 [E, 2I, H/32, 16]   gate_up_proj_scales U8 [E, 2I, H/32]   gate_up_proj_bias [E, 2I]
//   down_proj_blocks U8 [E, H, I/32, 16]       down_proj_scales U8 [E, H, I/32]       down_proj_bias [E, H]
//
// Row 2i of gate_up is gate's row i, row 2i + 1 is up's. The last two dimensions of blocks are K/2 bytes with the even k in
// the low nibble; scales are E8M0 exponents. H and I are multiples of 32, nothing is padded.
#ifndef MOED_ENGINE_CONTAINER_MXFP4_H_
#define MOED_ENGINE_CONTAINER_MXFP4_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/fused_experts.h"
#include "engine/model_config.h"
#include "engine/tensor_finder.h"

namespace moed {

// Whether the layer's tensors below `root` ("model.layers.0.mlp.experts.") are of this form.
bool HasFusedMxfp4(const TensorFinder& finder, const std::string& root);

// Finds and checks the tensors; `declared` gives the scheme. Biases only where config.expert_biases. Missing tensors are
// left to `finder`, the reader is then null. INVALID_ARGUMENT names file, tensor, wanted and got.
absl::StatusOr<FusedPlan> PlanFusedMxfp4(const ModelConfig& config, TensorFinder& finder, const DeclaredScheme& declared,
                                         const std::string& root);

}  // namespace moed

#endif  // MOED_ENGINE_CONTAINER_MXFP4_H_
