// What several containers share: scales, group indices, zero points and single numbers, found and read.
//
// Internal to the containers; functions of LinearSource as container.h describes it. The Find half completes the scheme, the
// Read half checks bytes; errors name file, tensor and index.
#ifndef MOED_ENGINE_CONTAINER_PARTS_H_
#define MOED_ENGINE_CONTAINER_PARTS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/container.h"

namespace moed {

// The containers, one per file.
const Container& PlainContainer();
const Container& GptqContainer();
const Container& AwqContainer();
const Container& PackedContainer();
const Container& Int8Container();
const Container& Fp8Container();
const Container& Fp4Container();
const Container& TransposedInt4Container();
const Container& TwoStageInt4Container();

// Columns of one group (K when one group covers all) and their number along K.
int64_t GroupSize(const LinearSource& source);
int64_t GroupsAlongK(const LinearSource& source);

// Whether the scheme is an integer of 4 or 8 bits; the containers of integers refuse anything else.
absl::Status CheckInteger(const LinearSource& source);

// Shapes in which scales of `group` are stored in the plain orientation: per tensor [1], [] or [1, 1]; per channel [N, 1] or
// [N]; groups [N, G]; blocks [ceil(N/r), ceil(K/c)] or, as ModelOpt has it, [ceil(N/r), 1, ceil(K/c), 1].
std::vector<Shape> ScaleShapes(const LinearSource& source, GroupShape group);

// Completes type and granularity from source->scales, which may be absent: floating-point scales in the plain orientation. A
// scheme that is declared per tensor may be stored per channel: then it is per channel.
absl::Status TakeFloatScales(LinearSource* source);

// Finds `name`, int32 [K], and decides whether the scheme is act-order: declared, stored, and more than one group.
absl::Status FindGroupIndex(TensorFinder& finder, const std::string& name, LinearSource* source);
// The group index of an act-order scheme, in range; otherwise checks that a stored one is k / group. `unset_means_none`: an
// entry of -1 anywhere means that the array is not set.
absl::Status ReadGroupIndex(const LinearSource& source, bool unset_means_none, LinearWeights* out);

// Finite (floats), not NaN (E8M0), neither NaN nor negative (E4M3). INVALID_ARGUMENT names index and value.
absl::Status CheckScaleValues(ScaleType type, std::span<const uint8_t> scales);
// No NaN codes 0x7F and 0xFF. INVALID_ARGUMENT names the index.
absl::Status CheckFp8Codes(std::span<const uint8_t> codes);
// Every byte is zero. INVALID_ARGUMENT names the first that is not.
absl::Status CheckAllZero(const TensorRef& tensor);

// Scales as they are stored, [N, G] already, checked.
absl::Status ReadScales(const LinearSource& source, LinearWeights* out);
// Scales stored as [G, N], transposed.
absl::Status ReadTransposedScales(const LinearSource& source, LinearWeights* out);

// A tensor of one floating-point element that must be finite and above zero (`zero_allowed`: or zero).
absl::StatusOr<float> ReadNumber(const TensorRef& tensor, bool zero_allowed);

}  // namespace moed

#endif  // MOED_ENGINE_CONTAINER_PARTS_H_
