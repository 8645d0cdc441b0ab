// Unquantized experts that are stored together: all experts of a layer in two or three tensors.
//
// Five layouts (FusedLayout in model_config.h) differ in orientation, in how gate and up share a tensor, and in names. Where
// a tensor's shape tells its orientation, the shape decides; where it fits both ways, the family does; where the two
// disagree the file is refused. Readers are immutable and read only the bytes of the expert that is asked for, through a
// buffer of bounded size; any number of threads may read at once.
#ifndef MOED_ENGINE_FUSED_EXPERTS_H_
#define MOED_ENGINE_FUSED_EXPERTS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/model_config.h"
#include "engine/tensor_finder.h"
#include "engine/weights_names.h"
#include "kernels/expert_weights.h"

namespace moed {

// The fused experts of one layer, found and checked.
struct FusedPlan {
  QuantScheme scheme;                            // plain, of the tensors' element type
  std::shared_ptr<const ExpertReader> reader;    // null when tensors are missing; points into the Checkpoint
  uint64_t file_bytes = 0;                       // of the tensors
};

// Finds the tensors of `naming` (fused), with biases when config.expert_biases, and checks dtype and shape of each against
// E, H and I. Missing tensors are left to `finder`. INVALID_ARGUMENT names file, tensor, wanted and got: a shape that fits
// no orientation, tensors of different orientation, an orientation that contradicts the family where the shape leaves it
// open, a dtype other than F32, BF16 and F16, and dtypes that differ between the projections.
absl::StatusOr<FusedPlan> PlanFusedExperts(const ModelConfig& config, TensorFinder& finder, const ExpertNaming& naming);

}  // namespace moed

#endif  // MOED_ENGINE_FUSED_EXPERTS_H_
