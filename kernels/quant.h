// Quantization schemes as properties.
//
// A scheme is not a name but a set of properties: two schemes that compute the same compare equal, two that differ never
// do. Names of tools and formats (GPTQ, AWQ, compressed-tensors, ...) stop at //engine:weights, which turns their tensors
// into the canonical form of expert_weights.h and describes that form with these types. All types are plain values.
#ifndef MOED_KERNELS_QUANT_H_
#define MOED_KERNELS_QUANT_H_

#include <cstdint>
#include <string>

namespace moed {

// What one stored weight or quantized activation is.
// Integers are always kept as unsigned codes with a zero point: value = (code - zero) * scale; symmetric b-bit integers
// have zero = 2^(b-1) everywhere. Signed containers are converted on reading, so signedness is never a difference.
enum class ElementType : uint8_t { kF32, kBf16, kF16, kInt4, kInt8, kFp8E4m3, kFp4E2m1, kFp6E2m3, kFp6E3m2 };

// Bits of one element in the canonical code stream.
int ElementBits(ElementType element);
// True for kInt4 and kInt8.
bool IsInteger(ElementType element);
// True for kF32, kBf16, kF16: stored as they are, without scales.
bool IsUnquantized(ElementType element);
// "f32", "bf16", "f16", "int4", "int8", "fp8", "fp4", "fp6_e2m3", "fp6_e3m2".
const char* ElementName(ElementType element);

// How a scale is stored.
enum class ScaleType : uint8_t { kNone, kF32, kBf16, kF16, kE8m0, kE4m3 };
// Bytes of one stored scale; 0 for kNone.
int ScaleBytes(ScaleType type);
// "none", "f32", "bf16", "f16", "e8m0", "e4m3".
const char* ScaleName(ScaleType type);

// One scale covers `rows` output features x `cols` input features; 0 means all of them. {1, 0} is per channel, {0, 0} per
// tensor, {1, 32} a group of 32 inputs, {128, 128} a block. The last group of a row may be shorter.
// For activations a row is a token: {1, 0} is per token.
struct GroupShape {
  int32_t rows = 1;
  int32_t cols = 0;
  bool operator==(const GroupShape&) const = default;
};

// A second scale, one float32 per matrix: W = code * scale * global or W = code * (scale / global).
enum class GlobalScale : uint8_t { kNone, kMultiplier, kDivisor };

struct WeightScheme {
  ElementType element = ElementType::kBf16;
  ScaleType scale = ScaleType::kNone;
  GroupShape group = {};
  GlobalScale global_scale = GlobalScale::kNone;
  bool zero_points = false;  // integers only: one zero per group instead of 2^(b-1)
  bool act_order = false;    // the group of input feature k is group_index[k], not k / group.cols
  bool operator==(const WeightScheme&) const = default;
};

enum class ActivationMode : uint8_t { kNone, kDynamic, kStatic };

// How a dynamic scale follows from the largest magnitude A of its group.
enum class ScaleRule : uint8_t {
  kAbsMax,        // A / largest code
  kAbsMaxPow2Up,  // A / largest code, rounded up to a power of two
  kMxFloor,       // 2^(floor(log2 A) - emax)
  kMxEven,        // as kMxFloor, one more when the significand of A is at least 1.75
  kMxCeil,        // 2^ceil(log2(A / largest code))
};

// What is done to the input of a projection before the product. kNone: nothing, the product sees 16-bit or wider values.
struct ActivationScheme {
  ActivationMode mode = ActivationMode::kNone;
  ElementType element = ElementType::kInt8;
  ScaleType scale = ScaleType::kF32;
  GroupShape group = {};
  ScaleRule rule = ScaleRule::kAbsMax;
  bool zero_points = false;
  bool global_scale = false;  // a stored float32 beside the dynamic group scales (NVFP4)
  // Activations that are not quantized are equal whatever the unused properties say.
  bool operator==(const ActivationScheme& other) const;
};

// One projection: its weights and the treatment of its input.
struct LinearScheme {
  WeightScheme weights;
  ActivationScheme input;
  bool operator==(const LinearScheme&) const = default;
};

// The three projections of a gated feed-forward expert; all experts of a layer share it.
struct QuantScheme {
  LinearScheme gate;
  LinearScheme up;
  LinearScheme down;
  bool operator==(const QuantScheme&) const = default;
};

// The same scheme for all three projections.
QuantScheme UniformScheme(const LinearScheme& linear);

// In words, for people and JSON: "int4 g32 symmetric, f16 scales, 16-bit activations". Projections that differ are listed one by one.
std::string Describe(const WeightScheme& scheme);
std::string Describe(const QuantScheme& scheme);

// Number of groups along `size` features when one group covers `group` of them (0: all). ceil(size / group); 0 for size 0.
int64_t GroupCount(int64_t size, int32_t group);

}  // namespace moed

#endif  // MOED_KERNELS_QUANT_H_
