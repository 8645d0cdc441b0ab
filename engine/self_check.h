// The self-check: a layer's active backend against the reference, on the weights of the files.
#ifndef MOED_ENGINE_SELF_CHECK_H_
#define MOED_ENGINE_SELF_CHECK_H_

#include <cstdint>

#include "engine/forward.h"

namespace moed {

// The reference among `backends`, null when it is not linked in.
const Backend* FindReference(std::span<const Backend* const> backends);

// The largest relative error that a right backend may have against a reference that quantizes in the same way: 0.01 for
// weight-only schemes, else by the activations' element (a value near a rounding border may fall on either side).
double SelfCheckBound(const QuantScheme& scheme);

// A prepared part of a layer, the routed experts or the shared expert, and where its weights came from.
struct CheckTarget {
  const MoeDesc& desc;
  const ExpertReader& experts;
  const Backend& backend;
  const PreparedMoe& prepared;
};

// How much a check looks at: `tokens` rows, each with at most `slots` experts in use (further ones are -1), which are taken in
// turn from `experts` different ones.
struct CheckSize {
  int64_t tokens = 0;
  int experts = 0;
  int slots = 0;
};
// At load: three magnitudes, three experts. The reference reads and decodes them in double: each costs about three times what
// loading an expert does (docs/performance.md).
inline constexpr CheckSize kLoadCheck = {3, 3, 2};
// On demand: `tokens` rows with every slot in use, all experts in turn.
inline CheckSize FullCheck(const MoeDesc& desc, int64_t tokens) { return {tokens, desc.num_experts, desc.top_k}; }

// Runs random rows of magnitudes 1/16 to 16 through the target and through `reference`, which reads only the experts that the
// rows use. The target runs them twice, as f32 and as bf16, since a backend may have products of its own for bf16; the values are
// the same and the answers float32. On the GPU it runs the bf16 ones once more among so many rows without experts that the products
// for large calls are taken. Errors are those of reading or running; a difference beyond the bound is a row that did not pass. The
// row's layer number is left 0.
absl::StatusOr<SelfCheckRow> CheckPart(const CheckTarget& target, const Backend& reference, CheckSize size, uint64_t seed,
                                       WorkerPool& pool, Scratch& scratch);

// Both parts of a ready layer in one row, by a full check of `tokens` rows: the routed experts' backend and scheme, the larger
// error in units of its bound.
absl::StatusOr<SelfCheckRow> CheckLayer(const LoadedLayer& layer, const Backend& reference, int64_t tokens, uint64_t seed,
                                        WorkerPool& pool, Scratch& scratch);

}  // namespace moed

#endif  // MOED_ENGINE_SELF_CHECK_H_
