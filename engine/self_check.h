// The self-check: a layer's active backend against the reference, on the weights of the files.
#ifndef MOED_ENGINE_SELF_CHECK_H_
#define MOED_ENGINE_SELF_CHECK_H_

#include <cstdint>

#include "engine/forward.h"

namespace moed {

// Runs `tokens` random rows of magnitudes 1/16 to 16 with random experts through the layer and through `reference`, which
// reads only the experts that the rows use. float32 in and out. Errors are those of reading or running; a difference beyond
// the bound is a row that did not pass.
absl::StatusOr<SelfCheckRow> CheckLayer(const LoadedLayer& layer, const Backend& reference, int64_t tokens, uint64_t seed,
                                        WorkerPool& pool, Scratch& scratch);

}  // namespace moed

#endif  // MOED_ENGINE_SELF_CHECK_H_
