// Routing: from router logits to the experts of each token and their weights.
//
// The rules themselves are in kernels/router.h. All arithmetic is float32; ties go to the lower expert id; the correction bias
// decides the choice only,
// never the weight. Pure functions, safe from any thread.
// Source of the rules: the reference implementations of each family as summarised in docs/routing.md.
#ifndef MOED_ENGINE_ROUTING_H_
#define MOED_ENGINE_ROUTING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/router.h"

namespace moed {

// Routes `logits` [M, E] row-major: writes ids and weights [M, k] row-major, chosen experts in descending order of choice
// score (kSparseMixer: in the order of the picks). `bias` is [E] when the rule has one (finite or -Inf), else empty.
// 1 <= k <= E. A logit of -Inf means that the expert is never picked; its choice score is -Inf for its group, too.
// Without bias and groups the logits themselves order the experts, so that scores which round alike are no tie.
//
// INVALID_ARGUMENT, naming the row and the numbers, and nothing written: NaN or +Inf in a row, or fewer finite logits than
// k within the groups that are kept; sizes that do not fit; E not divisible by the groups; NaN or +Inf in the bias;
// kSparseMixer with groups or bias.
absl::Status Route(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                   std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights);

// The same for logits that the server's own gate computed: a row whose logits are not all finite gets weight NaN and the
// lowest k ids, so that its output is NaN and the other rows are served.
absl::Status RouteOwnGate(const RouterRule& rule, int experts, int top_k, std::span<const float> logits,
                          std::span<const float> bias, std::span<int32_t> ids, std::span<float> weights);

}  // namespace moed

#endif  // MOED_ENGINE_ROUTING_H_
